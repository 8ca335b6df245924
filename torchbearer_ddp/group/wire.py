"""Plain data as bytes: what crosses between ranks is JSON and raw tensors, never pickle.

Whoever can reach a port of the run could otherwise send a pickle, which is code. The price is that
only plain data travels: None, booleans, numbers, strings, bytes, tensors, arrays of numbers, and
lists, tuples, sets and dicts of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from torchbearer_ddp.group import layouts
from torchbearer_ddp.group.plain_data import PlainDataWalker, type_name

_LENGTH_BYTES = 8
_CONTAINERS = {"list": list, "tuple": tuple, "set": set}


def encode(value: Any) -> torch.Tensor:
    """Packs plain data into a flat ``uint8`` tensor on the CPU.

    Raises:
        TypeError: If the value holds something that is not plain data; the message names it.
    """
    encoder = _Encoder()
    return _packed(encoder.walk(value, "value"), encoder.blobs)


@dataclass
class Failure:
    """What a rank sends in place of a value that cannot be sent: the kind and text of the error."""

    described: list[str]

    def encode(self) -> torch.Tensor:
        """Packs it, for :func:`decode`."""
        return _packed(["failure", self.described], [])


def decode(packed: torch.Tensor, device: Any = "cpu") -> Any:
    """Unpacks what :func:`encode` made, with tensors that were not on the CPU on the device."""
    length = int.from_bytes(packed[:_LENGTH_BYTES].numpy().tobytes(), "little")
    start = _LENGTH_BYTES + length
    tree = json.loads(packed[_LENGTH_BYTES:start].numpy().tobytes())
    return _Decoder(packed[start:], device).build(tree)


def _packed(tree: Any, blobs: list[torch.Tensor]) -> torch.Tensor:
    text = json.dumps(tree, separators=(",", ":")).encode()
    return torch.cat([_byte_tensor(len(text).to_bytes(_LENGTH_BYTES, "little") + text), *blobs])


class _Encoder(PlainDataWalker):
    """The JSON form of a value: most scalars are themselves, all else is ``[kind, ...]``."""

    def __init__(self) -> None:
        self.blobs: list[torch.Tensor] = []

    def scalar(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return ["bytes", self.tensor(_byte_tensor(value), "")]
        if isinstance(value, float) and not math.isfinite(value):
            return ["float", repr(value)]
        return value

    def tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if (parts := layouts.sparse_parts(tensor)) is not None:
            packed = [self.tensor(part, where) for part in parts]
            coalesced = layouts.is_coalesced(tensor)
            return ["sparse", _short(tensor.layout), list(tensor.shape), coalesced, packed]
        if not layouts.is_strided(tensor):
            return self.other(tensor, where)
        plain = layouts.dense(tensor).cpu()
        self.blobs.append(layouts.memory(plain))
        node = ["tensor", _short(plain.dtype), list(plain.shape), tensor.device.type != "cpu"]
        usual = torch.empty(plain.shape, device="meta").stride()
        return node if plain.stride() == usual else [*node, list(plain.stride())]

    def array(self, array: Any, where: str) -> Any:
        return ["array", super().array(array, where)]

    def sequence(self, kind: type, items: list[Any]) -> Any:
        return [kind.__name__, items]

    def mapping(self, keys: list[Any], values: list[Any]) -> Any:
        return ["dict", keys, values]

    def other(self, value: Any, where: str) -> Any:
        raise TypeError(
            f"{where} is a {type_name(value)}, which cannot be sent to other ranks: only None, "
            "numbers, strings, bytes, tensors and lists, tuples, sets and dicts of them can. "
            "Convert it first."
        )


class _Decoder:
    """Rebuilds a value; the tensors' bytes come in the order in which they were packed."""

    def __init__(self, blob: torch.Tensor, device: Any) -> None:
        self._blob = blob
        self._device = device

    def build(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *rest = node
        if kind == "tensor":
            return self._tensor(*rest)
        if kind == "sparse":
            layout, shape, coalesced, packed = rest
            parts = [self.build(part) for part in packed]
            layout = getattr(torch, layout)
            return layouts.from_sparse_parts(layout, parts, shape, coalesced=coalesced)
        if kind == "failure":
            return Failure(rest[0])
        if kind == "array":
            return self.build(rest[0]).numpy()
        if kind == "bytes":
            return self.build(rest[0]).numpy().tobytes()
        if kind == "float":
            return float(rest[0])
        built = [[self.build(item) for item in items] for items in rest]
        if kind == "dict":
            return dict(zip(*built, strict=True))
        return _CONTAINERS[kind](built[0])

    def _tensor(
        self,
        dtype_name: str,
        shape: list[int],
        on_device: bool,
        strides: list[int] | None = None,
    ) -> torch.Tensor:
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        # A clone is aligned for its dtype, which a view at any byte offset is not.
        raw, self._blob = self._blob[:size].clone(), self._blob[size:]
        flat = raw.view(dtype)
        tensor = flat.reshape(shape) if strides is None else flat.as_strided(shape, strides)
        return tensor.to(self._device if on_device else "cpu")


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def _byte_tensor(data: bytes) -> torch.Tensor:
    if not data:  # torch.frombuffer refuses an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
