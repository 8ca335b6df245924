"""Buckets through torch.distributed: gloo between CPUs, NCCL between GPUs.

What must be the same on all ranks is the order of the messages: first whatever was started, then
what depends on it, bucket by bucket.

Numbers travel as they are, or in fewer bytes. Coded numbers travel in pieces: while one is on the
wire, the next is coded and the one before is added, so the network need not wait for the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbearer_ddp.gradients.transports.codecs import codec_of
from torchbearer_ddp.gradients.transports.compression import CODED, Compression
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.gradients.transports.memory import Residual
from torchbearer_ddp.gradients.transports.sums import CodedSum, Lanes, Sum, works_by_itself
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait, complete

#: The size of a piece.
PIECE_BYTES = 2 * 2**20


class TorchTransport:
    """Asynchronous sums of each bucket over all ranks, by the backend of its device."""

    overlaps = True

    def __init__(
        self, group: Group, buckets: Sequence[Bucket], name: str, compression: Compression
    ) -> None:
        self.name = name
        # On a GPU one multiplication of the bucket is cheaper than one for each gradient; on a CPU
        # it is cheaper to multiply while copying.
        self.applies_weight = any(bucket.device.type != "cpu" for bucket in buckets)
        self.tensors = [torch.zeros(b.size, dtype=b.dtype, device=b.device) for b in buckets]
        self._numels = [bucket.numel for bucket in buckets]
        if compression.feeds_back:
            compression.memory.begin(buckets)
        lanes = [_lanes(group, bucket, compression) for bucket in buckets]
        # One order of what is sent from other threads, for all buckets of a channel.
        for each in lanes:
            each.turns = lanes[0].turns
        self._sums = [
            _make_pieces(each, self.tensors[index], bucket.numel, compression, index)
            for index, (each, bucket) in enumerate(zip(lanes, buckets, strict=True))
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

    def commit(self) -> None:
        """Says that the last exchange counts."""
        for pieces in self._sums:
            for each in pieces:
                each.commit()


def channel_of(group: Group, bucket: Bucket) -> Any:
    """The channel for a bucket: a group of NCCL alone has none for what a model has on the CPU."""
    if f"{bucket.device.type}:" in dist.get_backend_config(group.gradients):
        return group.gradients
    everyone = list(range(group.member.world_size))
    wait = Wait(group, "the channel for gradients on the CPU")
    return complete(partial(group.channel_between, everyone), wait)


def lanes_between(
    group: Group, ranks: Sequence[int], compression: Compression, wait: Wait
) -> Lanes:
    """The channels of some ranks; collective, also for ranks not among them."""
    channels = [
        complete(partial(group.channel_between, list(ranks), lane), wait)
        for lane in range(_lane_count(compression, len(ranks)))
    ]
    return Lanes(*channels)


def _lane_count(compression: Compression, ranks: int) -> int:
    """Only the sums of slices, which more than two ranks have, are sent from other threads."""
    return 2 if compression.kind in CODED and ranks > 2 else 1


def _lanes(group: Group, bucket: Bucket, compression: Compression) -> Lanes:
    first = channel_of(group, bucket)
    everyone = range(group.member.world_size)
    if _lane_count(compression, len(everyone)) == 1 or not works_by_itself(first):
        return Lanes(first)
    wait = Wait(group, "the second channel of compressed gradients")
    return Lanes(first, complete(partial(group.channel_between, list(everyone), 1), wait))


def make_sums(
    lanes: Lanes, tensor: torch.Tensor, numel: int, compression: Compression, key: str
) -> list[Sum]:
    """The sums of a tensor's parts: what follows the first ``numel`` elements is never rounded.

    ``key`` is the place of the tensor in the buckets.
    """
    if compression.kind not in CODED or tensor.dtype != torch.float32 or numel == 0:
        return [Sum(lanes.first, tensor)]
    residual: Any = None
    if compression.feeds_back:
        memory = compression.memory

        def residual(part: str, like: torch.Tensor) -> Residual:
            return memory.residual(f"{key} {part}", like)

    coded = CodedSum(lanes, tensor[:numel], codec_of(compression.kind), residual)
    return [coded, Sum(lanes.first, tensor[numel:])] if numel < tensor.numel() else [coded]


def piece_numel(dtype: torch.dtype) -> int:
    """The number of elements in a piece."""
    return PIECE_BYTES // dtype.itemsize


def _make_pieces(
    lanes: Lanes, tensor: torch.Tensor, numel: int, compression: Compression, index: int
) -> list[Sum]:
    """The sums of a bucket's pieces; the header travels with the last one."""
    # Rounding takes the processor's time, so it is done in pieces. Without it gloo is faster with
    # the whole bucket, and NCCL has streams of its own.
    in_pieces = compression.kind in CODED and tensor.device.type == "cpu"
    step = piece_numel(tensor.dtype) if in_pieces else max(1, numel)
    ends = [*range(step, numel, step), tensor.numel()]
    return [
        each
        for begin, end in zip([0, *ends], ends, strict=False)
        for each in make_sums(
            lanes, tensor[begin:end], min(end, numel) - begin, compression, f"{index}:{begin}"
        )
    ]
