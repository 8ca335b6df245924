"""Plain data as bytes: what crosses between ranks is JSON and raw tensors, never pickle.

Whoever can reach a port of the run could otherwise send a pickle, which is code. The price is that
only plain data travels: None, booleans, numbers, strings, bytes, tensors, and lists, tuples, sets
and dicts of them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

_LENGTH_BYTES = 8


def encode(value: Any) -> torch.Tensor:
    """Packs plain data into a flat ``uint8`` tensor on the CPU.

    Args:
        value: The value to pack.

    Raises:
        TypeError: If the value holds something that is not plain data; the message names it.
    """
    blobs: list[torch.Tensor] = []
    tree = json.dumps(_pack(value, blobs, "value"), separators=(",", ":")).encode()
    length = torch.frombuffer(
        bytearray(len(tree).to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8
    )
    text = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    return torch.cat([length, text, *blobs])


def decode(packed: torch.Tensor) -> Any:
    """Unpacks what :func:`encode` made; the tensors in it are copies on the CPU."""
    length = int.from_bytes(packed[:_LENGTH_BYTES].numpy().tobytes(), "little")
    start = _LENGTH_BYTES + length
    tree = json.loads(packed[_LENGTH_BYTES:start].numpy().tobytes())
    return _unpack(tree, packed[start:])


def _pack(value: Any, blobs: list[torch.Tensor], where: str) -> Any:
    """The JSON form of a value: scalars stand for themselves, all else is ``[kind, ...]``."""
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, blobs)
    if isinstance(value, bytes):
        return (
            ["bytes", _pack_tensor(torch.frombuffer(bytearray(value), dtype=torch.uint8), blobs)]
            if value
            else ["bytes", None]
        )
    if isinstance(value, dict):
        pairs = [
            [_pack(k, blobs, where), _pack(v, blobs, f"{where}[{k!r}]")] for k, v in value.items()
        ]
        return ["dict", pairs]
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            items = sorted(value) if kind is set else value
            return [kind.__name__, [_pack(v, blobs, f"{where}[{i}]") for i, v in enumerate(items)]]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return _pack(value.item(), blobs, where)
    if isinstance(value, int | float | str):  # subclasses, such as an IntEnum or a StateKey's name
        return _pack(
            next(t(value) for t in (int, float, str) if isinstance(value, t)), blobs, where
        )
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent "
        "to other ranks: only None, numbers, strings, bytes, tensors and lists, tuples, sets and "
        "dicts of them can. Convert it first."
    )


def _pack_tensor(tensor: torch.Tensor, blobs: list[torch.Tensor]) -> Any:
    plain = tensor.detach().to_dense().cpu().contiguous()
    blobs.append(
        plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0).byte()
    )
    return ["tensor", str(plain.dtype).removeprefix("torch."), list(plain.shape)]


class _Reader:
    """Hands out the tensors' bytes in the order in which they were packed."""

    def __init__(self, blob: torch.Tensor) -> None:
        self._blob = blob
        self._at = 0

    def tensor(self, dtype_name: str, shape: list[int]) -> torch.Tensor:
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        # A clone is aligned for its dtype, which a view at any byte offset is not.
        raw = self._blob[self._at : self._at + size].clone()
        self._at += size
        return raw.view(dtype).reshape(shape)


def _unpack(tree: Any, blob: torch.Tensor) -> Any:
    reader = _Reader(blob)

    def build(node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *rest = node
        if kind == "tensor":
            return reader.tensor(*rest)
        if kind == "bytes":
            return b"" if rest[0] is None else build(rest[0]).numpy().tobytes()
        if kind == "float":
            return float(rest[0])
        if kind == "dict":
            return {build(k): build(v) for k, v in rest[0]}
        items = [build(item) for item in rest[0]]
        return {"list": list, "tuple": tuple, "set": set}[kind](items)

    return build(tree)
