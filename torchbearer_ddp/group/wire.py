"""Plain data as bytes: what crosses between ranks is JSON and raw tensors, never pickle.

Whoever can reach a port of the run could otherwise send a pickle, which is code. The price is that
only plain data travels: None, booleans, numbers, strings, bytes, tensors, arrays of numbers, and
lists, tuples, sets and dicts of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.checked import Unexpected
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import layouts
from torchbearer_ddp.group.plain_data import DEEPEST, PlainDataWalker, type_name

_LENGTH_BYTES = 8
_JSON = json.JSONEncoder(separators=(",", ":"))
_CONTAINERS = {"list": list, "tuple": tuple, "set": set}
#: What messages call what was received.
_MESSAGE = "the message"
#: Whole numbers with more bits are sent in base 16: JSON's have as many digits as Python prints.
_LARGE_BITS = 8192
_LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and each.itemsize
}
_SHAPE = checked.items(checked.whole(0, 2**62))


@dataclass
class Encoded:
    """A value as text and the bytes of its tensors, which are those of the value itself.

    Attributes:
        text: The JSON form of the value.
        blobs: The bytes of each tensor, flat, on the CPU.
    """

    text: torch.Tensor
    blobs: list[torch.Tensor]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.text) + sum(map(len, self.blobs))

    def packed(self) -> torch.Tensor:
        """All of it as one tensor."""
        length = len(self.text).to_bytes(_LENGTH_BYTES, "little")
        if not self.blobs:
            return _byte_tensor(length + self.text.numpy().tobytes())
        return torch.cat([_byte_tensor(length), self.text, *self.blobs])


@dataclass
class Failure:
    """What a rank sends in place of a value that cannot be sent: the kind and text of the error."""

    described: list[str]

    def take_apart(self) -> Encoded:
        """Encodes it, for :func:`build`."""
        return Encoded(_text(["failure", self.described]), [])


def take_apart(value: Any) -> Encoded:
    """Encodes plain data, without copying its tensors.

    Raises:
        TypeError: If the value holds something that is not plain data; the message names it.
    """
    encoder = _Encoder()
    try:
        return Encoded(_text(encoder.walk(value, "value")), encoder.blobs)
    except RecursionError:
        raise TypeError(
            f"value holds itself, or more than {DEEPEST} lists or dicts in each other, which "
            "cannot be sent to other ranks. Make it flatter."
        ) from None


def received(sender: int, name: str) -> AbstractContextManager[None]:
    """Raises what is wrong with a message as an error that names the rank and the exchange."""
    return checked.as_error(
        DesyncError,
        f"What rank {sender} sent for {name} cannot be read: ",
        ". It runs another version of torchbearer_ddp, another program takes part in the run, or "
        "the network damages data.",
    )


def encode(value: Any) -> torch.Tensor:
    """Packs plain data into a flat ``uint8`` tensor on the CPU; see :func:`take_apart`."""
    return take_apart(value).packed()


def decode(packed: torch.Tensor, device: Any = "cpu") -> Any:
    """Unpacks what :func:`encode` made, with tensors that were not on the CPU on the device.

    Raises:
        Unexpected: If it was not made by :func:`encode`.
    """
    with checked.damage(_MESSAGE):
        data = packed.numpy()
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
        text, rest = data[_LENGTH_BYTES:end], packed[end:]
        tree = _tree(text)
        parts = torch.split(rest, found) if (found := _sizes_in(tree)) or len(rest) else ()
        # A clone is aligned for its dtype, which a view at any byte offset is not.
        return _Decoder((part.clone() for part in parts), device).build(tree)


def sizes(text: torch.Tensor) -> list[int]:
    """The number of bytes of each tensor in an encoded value.

    Raises:
        Unexpected: If any part of the text is not what :func:`take_apart` writes.
    """
    with checked.damage(_MESSAGE):
        return _sizes_in(_tree(text.numpy()))


def build(text: torch.Tensor, blobs: Iterator[torch.Tensor], device: Any = "cpu") -> Any:
    """Rebuilds a value on the memory of its tensors' bytes, each of which is aligned.

    Raises:
        Unexpected: If the bytes are not what the text says.
    """
    with checked.damage(_MESSAGE):
        return _Decoder(blobs, device).build(_tree(text.numpy()))


def _tree(text: Any) -> Any:
    return checked.from_json(text.tobytes(), checked.anything, _MESSAGE, len(text))


def _sizes_in(tree: Any) -> list[int]:
    """Checks a tree; returns the bytes of each tensor in it."""
    if isinstance(tree, list) and tree[0] == "failure":
        checked.items(checked.items(checked.text(), 2), 1)(tree[1:], _MESSAGE)
        return []
    return list(_sizes(tree))


def _text(tree: Any) -> torch.Tensor:
    return _byte_tensor(_JSON.encode(tree).encode())


def _sizes(node: Any) -> Iterator[int]:
    """Checks a part and all in it; yields the bytes of its tensors."""
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise Unexpected(f"{_MESSAGE} holds {checked.shown(node)}, which is not sent")
        return
    kind, *rest = node
    if kind == "tensor":
        yield _tensor_size(*rest)
    elif kind in ("array", "bytes"):
        (inner,) = rest
        checked.one_of("tensor")(inner[0], _MESSAGE)
        yield from _sizes(inner)
    elif kind == "float":
        checked.items(checked.one_of("inf", "-inf", "nan"), 1)(rest, _MESSAGE)
    elif kind == "int":
        checked.items(checked.text(), 1)(rest, _MESSAGE)
    elif kind == "sparse":
        layout, shape, coalesced, parts = rest
        checked.one_of(*_LAYOUTS)(layout, _MESSAGE)
        _SHAPE(shape, _MESSAGE)
        checked.boolean(coalesced, _MESSAGE)
        yield from _sizes(["list", parts])
    else:
        checked.one_of("dict", *_CONTAINERS)(kind, _MESSAGE)
        for items in checked.items(checked.kind(list, "a list"), 1 + (kind == "dict"))(
            rest, _MESSAGE
        ):
            for item in items:
                yield from _sizes(item)


def _tensor_size(
    dtype_name: Any, shape: Any, on_device: Any, strides: list[int] | None = None
) -> int:
    _SHAPE(shape, _MESSAGE)
    checked.boolean(on_device, _MESSAGE)
    if strides is not None and not _is_dense(shape, _SHAPE(strides, _MESSAGE)):
        raise Unexpected(f"{_MESSAGE} has a tensor with the strides {strides[:9]}")
    dtype = _DTYPES[checked.one_of(*_DTYPES)(dtype_name, _MESSAGE)]
    return checked.byte_count(math.prod(shape) * dtype.itemsize, f"a tensor of {_MESSAGE}")


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    """True if these strides reach each element of the tensor's memory once."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class _Encoder(PlainDataWalker):
    """The JSON form of a value: most scalars are themselves, all else is ``[kind, ...]``."""

    def __init__(self) -> None:
        self.blobs: list[torch.Tensor] = []

    def scalar(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return ["bytes", self.tensor(_byte_tensor(value), "")]
        if isinstance(value, float) and not math.isfinite(value):
            return ["float", repr(value)]
        if type(value) is int and value.bit_length() > _LARGE_BITS:
            return ["int", hex(value)]
        return value

    def tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if (parts := layouts.sparse_parts(tensor)) is not None:
            packed = [self.tensor(part, where) for part in parts]
            coalesced = layouts.is_coalesced(tensor)
            return ["sparse", _short(tensor.layout), list(tensor.shape), coalesced, packed]
        if not layouts.is_strided(tensor) or tensor.is_meta:
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
    """Rebuilds a value; the tensors' bytes come in the order in which they were encoded."""

    def __init__(self, blobs: Iterator[torch.Tensor], device: Any) -> None:
        self._blobs = blobs
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
        if kind == "int":
            return int(rest[0], 16)
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
        memory, dtype = next(self._blobs), _DTYPES[dtype_name]
        if dtype is torch.bool and memory.numel() and memory.max() > 1:
            raise Unexpected(f"{_MESSAGE} has a byte other than 0 and 1 in a tensor of bool")
        flat = memory.view(dtype)
        tensor = flat.reshape(shape) if strides is None else flat.as_strided(shape, strides)
        return tensor.to(self._device if on_device else "cpu")


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def _byte_tensor(data: bytes) -> torch.Tensor:
    if not data:  # torch.frombuffer refuses an empty buffer
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
