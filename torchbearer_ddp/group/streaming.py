"""One value for all ranks, of any size, without a second copy of it in the memory of any rank.

What fits travels in one message. Of a larger value first the text travels, and then its tensors:
large ones from memory to memory, small ones in pieces of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.group import wire

#: Overwrites a tensor with rank zero's.
Exchange = Callable[[torch.Tensor, str], Any]
#: The first message has this size, which is enough for most plain values.
HEAD_BYTES = 4096
_NUMBERS = 2
_NUMBER_BYTES = 8
_PREFIX_BYTES = _NUMBERS * _NUMBER_BYTES
#: Tensors from this size on travel by themselves.
_LARGE_BYTES = 2**20
#: What small ones together may take.
_PIECE_BYTES = 16 * 2**20


def broadcast(mine: wire.Encoded | None, exchange: Exchange, name: str) -> wire.Encoded:
    """Rank zero's value on every rank; the other ranks have None."""
    head = torch.zeros(HEAD_BYTES, dtype=torch.uint8, device="cpu")
    if mine is not None:
        _write_head(head, mine)
    exchange(head, name)
    length, size = head[:_PREFIX_BYTES].view(torch.int64).tolist()
    with wire.received(0, name):
        checked.byte_count(size, "the length of the message")
        checked.whole(0, size)(length, "the length of its text")
        if size <= HEAD_BYTES - _PREFIX_BYTES:
            return mine or _read_head(head[_PREFIX_BYTES:][:size], length)
    more = f"{name} (continued)"
    text = torch.empty(length, dtype=torch.uint8, device="cpu") if mine is None else mine.text
    exchange(text, more)
    if mine is None:
        mine = _memory_for(text, size, name)
    for piece in _pieces(mine.blobs):
        if len(piece) == 1:
            exchange(piece[0], more)
        else:
            joined = torch.cat(piece)
            exchange(joined, more)
            for blob, received in zip(
                piece, torch.split(joined, list(map(len, piece))), strict=True
            ):
                blob.copy_(received)
    return mine


def _memory_for(text: torch.Tensor, size: int, name: str) -> wire.Encoded:
    """The received text, and memory for the tensors that follow."""
    with wire.received(0, name):
        sizes = wire.sizes(text)
        checked.one_of(size - len(text))(sum(sizes), "the length of its tensors")
    blobs = [torch.empty(each, dtype=torch.uint8, device="cpu") for each in sizes]
    return wire.Encoded(text, blobs)


def _write_head(head: torch.Tensor, mine: wire.Encoded) -> None:
    head[:_PREFIX_BYTES].view(torch.int64).copy_(
        torch.tensor([len(mine.text), mine.size], device="cpu")
    )
    if mine.size <= HEAD_BYTES - _PREFIX_BYTES:
        head[_PREFIX_BYTES:][: mine.size] = torch.cat([mine.text, *mine.blobs])


def _read_head(content: torch.Tensor, length: int) -> wire.Encoded:
    text, rest = content[:length], content[length:]
    sizes = wire.sizes(text)
    checked.one_of(len(rest))(sum(sizes), "the length of its tensors")
    return wire.Encoded(text, [blob.clone() for blob in torch.split(rest, sizes)])


def _pieces(blobs: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """What travels in one message each: a large tensor, or small ones that follow each other."""
    piece: list[torch.Tensor] = []
    for blob in blobs:
        if len(blob) >= _LARGE_BYTES:
            yield [blob]
        elif len(blob):
            piece.append(blob)
            if sum(map(len, piece)) >= _PIECE_BYTES:
                yield piece
                piece = []
    if piece:
        yield piece
