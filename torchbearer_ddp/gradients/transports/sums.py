"""The sum of tensors over the ranks of a channel: as they are, or in half precision on the wire.

Half precision travels in pieces: while one is on the wire, the next is rounded and the one before
is added, so the network need not wait for the processor.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchbearer_ddp.group.waiting import Wait, wait_for

#: What travels instead of single precision, by the name that users give it.
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The size of a piece.
PIECE_BYTES = 2 * 2**20


class Sum(Protocol):
    """Sums one tensor in place, again and again: start, advance and finish, in this order."""

    def start(self) -> None:
        """Sends this rank's numbers."""
        ...

    def advance(self, wait: Wait) -> None:
        """Waits for what the other ranks sent at the start, and sends what depends on it."""
        ...

    def finish(self, wait: Wait) -> None:
        """Waits until the tensor holds the sum."""
        ...


def piece_numel(dtype: torch.dtype) -> int:
    """The number of elements in a piece."""
    return PIECE_BYTES // dtype.itemsize


def make(channel: Any, tensor: torch.Tensor, header: int, compress: str | None) -> list[Sum]:
    """The sums of a tensor's parts: ``header`` elements at its end are never compressed."""
    body = tensor.numel() - header
    if compress is None or tensor.dtype != torch.float32 or not body:
        return [PlainSum(channel, tensor)]
    half = HalfSum(channel, tensor[:body], HALVES[compress])
    return [half, PlainSum(channel, tensor[body:])] if header else [half]


class PlainSum:
    """One all-reduce over the ranks of a channel."""

    def __init__(self, channel: Any, tensor: torch.Tensor) -> None:
        self._channel = channel
        self._tensor = tensor
        self._work: Any = None

    def start(self) -> None:
        """Hands the tensor to the backend's own threads or stream."""
        self._work = dist.all_reduce(self._tensor, group=self._channel, async_op=True)

    def advance(self, wait: Wait) -> None:
        """Does nothing: the backend does all of it."""

    def finish(self, wait: Wait) -> None:
        """Waits for the backend."""
        wait_for(self._work, wait)
        self._work = None


class HalfSum:
    """Half the bytes: numbers travel in half precision, but are added in single precision.

    Each rank gets one slice from every other rank, adds them up, and sends the sum of its slice to
    all. An all-reduce in half precision would round after every addition instead of twice. Every
    rank takes the rounded sums, its own slice too, so the replicas stay equal.
    """

    def __init__(self, channel: Any, tensor: torch.Tensor, half: torch.dtype) -> None:
        ranks = dist.get_world_size(channel)
        step = -(-tensor.numel() // ranks)
        self._channel = channel
        self._tensor = tensor
        #: First what is sent to each rank, later the sums of all slices.
        self._all = torch.zeros(ranks, step, dtype=half, device=tensor.device)
        self._slices = torch.zeros_like(self._all)
        self._sum = torch.zeros(step, dtype=half, device=tensor.device)
        self._work: Any = None

    def start(self) -> None:
        """Rounds the numbers and sends each rank its slice."""
        self._numbers().copy_(self._tensor)
        self._work = dist.all_to_all_single(
            _bytes(self._slices), _bytes(self._all), group=self._channel, async_op=True
        )

    def advance(self, wait: Wait) -> None:
        """Adds up this rank's slice, and sends the sum to all."""
        wait_for(self._work, wait)
        first, *others = self._slices
        total = first.float()
        for each in others:
            total.add_(each)
        self._sum.copy_(total)
        self._work = dist.all_gather(
            [_bytes(each) for each in self._all],
            _bytes(self._sum),
            group=self._channel,
            async_op=True,
        )

    def finish(self, wait: Wait) -> None:
        """Takes everybody's sums."""
        wait_for(self._work, wait)
        self._work = None
        self._tensor.copy_(self._numbers())

    def _numbers(self) -> torch.Tensor:
        """The tensor's own elements: the slices together may be longer."""
        return self._all.view(-1)[: self._tensor.numel()]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: not every backend supports every half precision, but all of them support bytes."""
    return tensor.view(-1).view(torch.uint8)
