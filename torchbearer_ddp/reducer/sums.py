"""The sum of one tensor over the ranks of a channel: as it is, or in half precision on the wire."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchbearer_ddp.waiting import Wait, wait_for

#: What travels instead of single precision, by the name that users give it.
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sum(Protocol):
    """Sums one tensor in place, again and again."""

    def start(self) -> None:
        """Puts this rank's numbers on the wire."""
        ...

    def finish(self, wait: Wait) -> None:
        """Waits until the tensor holds the sum."""
        ...


def make(channel: Any, tensor: torch.Tensor, header: int, compress: str | None) -> Sum:
    """The way in which a tensor is summed.

    Args:
        channel: The group of torch.distributed to sum over.
        tensor: What is summed, in place.
        header: How many elements at its end must arrive exactly.
        compress: One of :data:`HALVES`, or None.
    """
    if compress is not None and tensor.dtype == torch.float32 and tensor.numel() > header:
        return HalfSum(channel, tensor, header, HALVES[compress])
    return PlainSum(channel, tensor)


class PlainSum:
    """One all-reduce.

    Args:
        channel: The group of torch.distributed to sum over.
        tensor: What is summed, in place.
    """

    def __init__(self, channel: Any, tensor: torch.Tensor) -> None:
        self._channel = channel
        self._tensor = tensor
        self._work: Any = None

    def start(self) -> None:
        """Hands the tensor to the backend's own threads or stream."""
        self._work = dist.all_reduce(self._tensor, group=self._channel, async_op=True)

    def finish(self, wait: Wait) -> None:
        """Waits for the backend."""
        wait_for(self._work, wait)
        self._work = None


class HalfSum:
    """Half the bytes: numbers travel in half precision, but are added in single precision.

    Each rank gets one slice from every other rank, adds them up, and sends the sum of its slice to
    all. An all-reduce in half precision would round after every addition instead of twice. Every
    rank takes the rounded sums, its own slice too, so the replicas stay equal.

    Args:
        channel: The group of torch.distributed to sum over.
        tensor: What is summed, in place.
        header: How many elements at its end travel exactly.
        half: What travels.
    """

    def __init__(self, channel: Any, tensor: torch.Tensor, header: int, half: torch.dtype) -> None:
        ranks = dist.get_world_size(channel)
        body = tensor.numel() - header
        step = -(-body // ranks)
        self._channel = channel
        self._body, self._header = tensor[:body], tensor[body:]
        self._out = torch.zeros(ranks * step, dtype=half, device=tensor.device)
        self._slices = torch.zeros(ranks, step, dtype=half, device=tensor.device)
        # The second message: this rank's sum, and its header as the bytes that it is.
        size = step * half.itemsize
        self._mine = torch.zeros(size + header * 4, dtype=torch.uint8, device=tensor.device)
        self._sum_bytes, self._header_bytes = self._mine[:size], self._mine[size:]
        self._gathered = self._mine.new_zeros(ranks, len(self._mine))
        self._half, self._size = half, size
        self._work: Any = None

    def start(self) -> None:
        """Rounds the numbers and sends each rank its slice."""
        self._out[: len(self._body)].copy_(self._body)
        self._work = dist.all_to_all_single(
            self._slices.view(torch.uint8).view(-1),
            self._out.view(torch.uint8),
            group=self._channel,
            async_op=True,
        )

    def finish(self, wait: Wait) -> None:
        """Adds up this rank's slice, and exchanges the sums."""
        wait_for(self._work, wait)
        total = self._slices.float().sum(0).to(self._half)
        self._sum_bytes.copy_(total.view(torch.uint8))
        self._header_bytes.copy_(self._header.view(torch.uint8))
        self._work = dist.all_gather(
            list(self._gathered), self._mine, group=self._channel, async_op=True
        )
        wait_for(self._work, wait)
        self._work = None
        sums = self._gathered[:, : self._size].contiguous().view(self._half).view(-1)
        self._body.copy_(sums[: len(self._body)])
        if self._header.numel():
            headers = self._gathered[:, self._size :].contiguous().view(torch.float32)
            torch.sum(headers, 0, out=self._header)
