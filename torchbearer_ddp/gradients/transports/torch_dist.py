"""Buckets through torch.distributed: gloo between CPUs, NCCL between GPUs.

What must be the same on all ranks is the order of the messages: first whatever was started, then
what depends on it, bucket by bucket.

Numbers travel as they are, or in half precision. Half precision travels in pieces: while one is on
the wire, the next is rounded and the one before is added, so the network need not wait for the
processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait, complete, waiter

#: What travels instead of single precision, by the name that users give it.
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The first is the newer name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: The size of a piece.
PIECE_BYTES = 2 * 2**20


class TorchTransport:
    """Asynchronous sums of each bucket over all ranks, by the backend of its device."""

    overlaps = True

    def __init__(
        self, group: Group, buckets: Sequence[Bucket], name: str, compress: str | None = None
    ) -> None:
        self.name = name
        # On a GPU one multiplication of the bucket is cheaper than one for each gradient; on a CPU
        # it is cheaper to multiply while copying.
        self.applies_weight = any(bucket.device.type != "cpu" for bucket in buckets)
        self.tensors = [torch.zeros(b.size, dtype=b.dtype, device=b.device) for b in buckets]
        self._numels = [bucket.numel for bucket in buckets]
        self._sums = [
            _make_pieces(_channel(group, bucket), tensor, bucket.numel, compress)
            for tensor, bucket in zip(self.tensors, buckets, strict=True)
        ]
        #: Sums that were started and not advanced.
        self._begun: list[Sum] = []

    def start(self, index: int, weight: float = 1.0) -> None:
        """Hands the bucket to the backend's own threads or stream."""
        if weight != 1.0:
            self.tensors[index][: self._numels[index]].mul_(weight)
        for each in self._sums[index]:
            each.start()
            self._begun.append(each)

    def finish(self, index: int, wait: Wait) -> None:
        """Waits for the backend."""
        # All that were started, before any is finished: so no message waits for another bucket.
        for each in self._begun:
            each.advance(wait)
        self._begun.clear()
        for each in self._sums[index]:
            each.finish(wait)


class Sum:
    """Sums one tensor over the ranks of a channel in place: start, advance and finish, in order."""

    def __init__(self, channel: Any, tensor: torch.Tensor) -> None:
        self._channel = channel
        self._tensor = tensor
        self._wait_for = waiter(channel)
        self._work: Any = None

    def start(self) -> None:
        """Sends this rank's numbers."""
        self._work = dist.all_reduce(self._tensor, group=self._channel, async_op=True)

    def advance(self, wait: Wait) -> None:
        """Sends what depends on the numbers of other ranks: nothing, the backend does all of it."""

    def finish(self, wait: Wait) -> None:
        """Waits until the tensor holds the sum."""
        self._wait_for(self._work, wait)
        self._work = None


class HalfSum(Sum):
    """Half the bytes: numbers travel in half precision, but are added in single precision.

    Each rank gets one slice from every other rank, adds them up, and sends the sum of its slice to
    all. An all-reduce in half precision would round after every addition instead of twice. Every
    rank takes the rounded sums, its own slice too, so the replicas stay equal.
    """

    def __init__(self, channel: Any, tensor: torch.Tensor, half: torch.dtype) -> None:
        super().__init__(channel, tensor)
        ranks = dist.get_world_size(channel)
        step = -(-tensor.numel() // ranks)
        #: First what is sent to each rank, later the sums of all slices.
        self._all = torch.zeros(ranks, step, dtype=half, device=tensor.device)
        self._slices = torch.zeros_like(self._all)
        self._sum = torch.zeros(step, dtype=half, device=tensor.device)
        #: The slices together may be longer than the tensor.
        self._numbers = self._all.view(-1)[: tensor.numel()]

    def start(self) -> None:
        """Rounds the numbers and sends each rank its slice."""
        self._numbers.copy_(self._tensor)
        self._work = dist.all_to_all_single(
            _bytes(self._slices), _bytes(self._all), group=self._channel, async_op=True
        )

    def advance(self, wait: Wait) -> None:
        """Adds up this rank's slice, and sends the sum to all."""
        self._wait_for(self._work, wait)
        first, *others = self._slices
        total = first.float()
        for each in others:
            total.add_(each)
        self._sum.copy_(total)
        self._work = _all_gather(
            _bytes(self._all), _bytes(self._sum), group=self._channel, async_op=True
        )

    def finish(self, wait: Wait) -> None:
        """Waits for the sums of all slices."""
        super().finish(wait)
        self._tensor.copy_(self._numbers)


def _channel(group: Group, bucket: Bucket) -> Any:
    """The channel for a bucket: a group of NCCL alone has none for what a model has on the CPU."""
    if f"{bucket.device.type}:" in dist.get_backend_config(group.gradients):
        return group.gradients
    everyone = list(range(group.member.world_size))
    wait = Wait(group, "the channel for gradients on the CPU")
    return complete(partial(group.channel_between, everyone), wait)


def make_sums(channel: Any, tensor: torch.Tensor, numel: int, compress: str | None) -> list[Sum]:
    """The sums of a tensor's parts: what follows the first ``numel`` elements is never rounded."""
    if compress is None or tensor.dtype != torch.float32 or numel == 0:
        return [Sum(channel, tensor)]
    half = HalfSum(channel, tensor[:numel], HALVES[compress])
    return [half, Sum(channel, tensor[numel:])] if numel < tensor.numel() else [half]


def piece_numel(dtype: torch.dtype) -> int:
    """The number of elements in a piece."""
    return PIECE_BYTES // dtype.itemsize


def _make_pieces(channel: Any, tensor: torch.Tensor, numel: int, compress: str | None) -> list[Sum]:
    """The sums of a bucket's pieces; the header travels with the last one."""
    # Rounding takes the processor's time, so it is done in pieces. Without it gloo is faster with
    # the whole bucket, and NCCL has streams of its own.
    in_pieces = compress is not None and tensor.device.type == "cpu"
    step = piece_numel(tensor.dtype) if in_pieces else max(1, numel)
    ends = [*range(step, numel, step), tensor.numel()]
    return [
        each
        for begin, end in zip([0, *ends], ends, strict=False)
        for each in make_sums(channel, tensor[begin:end], min(end, numel) - begin, compress)
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: not every backend supports every half precision, but all of them support bytes."""
    return tensor.view(-1).view(torch.uint8)
