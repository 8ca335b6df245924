"""Buckets through torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchbearer_ddp.gradients.transports import sums
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait


class TorchTransport:
    """Asynchronous sums of each bucket's pieces over all ranks, by the backend of their device."""

    overlaps = True
    applies_weight = False

    def __init__(
        self, group: Group, buckets: Sequence[Bucket], name: str, compress: str | None = None
    ) -> None:
        self.name = name
        self.tensors = [torch.zeros(b.size, dtype=b.dtype, device=b.device) for b in buckets]
        self._numels = [bucket.numel for bucket in buckets]
        self._sums = [
            _sums(group.gradients, tensor, bucket.header, compress)
            for tensor, bucket in zip(self.tensors, buckets, strict=True)
        ]

    def start(self, index: int, weight: float = 1.0) -> None:
        """Hands the bucket to the backend's own threads or stream."""
        if weight != 1.0:
            self.tensors[index][: self._numels[index]].mul_(weight)
        for each in self._sums[index]:
            each.start()

    def finish(self, index: int, wait: Wait) -> None:
        """Waits for the backend."""
        for each in self._sums[index]:
            each.advance(wait)
        for each in self._sums[index]:
            each.finish(wait)

    def close(self) -> None:
        """Drops the references to the buckets."""
        self.tensors, self._sums = [], []


def _sums(channel: Any, tensor: torch.Tensor, header: int, compress: str | None) -> list[sums.Sum]:
    """The sums of a bucket's pieces; the header travels with the last one."""
    body = tensor.numel() - header
    # Rounding takes the processor's time; in pieces the network need not wait for it. Gloo alone is
    # faster with the whole bucket, and NCCL has streams of its own.
    in_pieces = compress is not None and tensor.device.type == "cpu"
    step = sums.piece_numel(tensor.dtype) if in_pieces else max(1, body)
    ends = [*range(step, body, step), tensor.numel()]
    return [
        each
        for begin, end in zip([0, *ends], ends, strict=False)
        for each in sums.make(channel, tensor[begin:end], max(0, end - body), compress)
    ]
