"""Buckets through torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import torch

from torchbearer_ddp.gradients.transports import sums
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait


class TorchTransport:
    """Asynchronous sums of each bucket's pieces, over all ranks.

    Args:
        group: The group of all ranks.
        name: What to call it: the backend that serves the gradients' device.
        compress: What travels instead of single precision, or None.
    """

    overlaps = True
    applies_weight = False

    def __init__(self, group: Group, name: str, compress: str | None = None) -> None:
        self.name = name
        # NCCL is slow to start and fast to run; gloo the other way round, and the sooner a full
        # bucket is on its way, the less is left to wait for after backward.
        self.bucket_bytes = (25 if name == "nccl" else 4) * 2**20
        self._group = group
        self._compress = compress
        self._bodies: dict[int, torch.Tensor] = {}
        self._ways: dict[int, list[sums.Sum]] = {}

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, header: int = 0
    ) -> torch.Tensor:
        """Ordinary memory."""
        bucket = torch.zeros(numel, dtype=dtype, device=device)
        body = numel - header
        # Rounding takes the processor's time, and in pieces the network need not wait for it. Gloo
        # alone is better off with the whole, and NCCL has streams of its own.
        in_pieces = self._compress is not None and device.type == "cpu"
        step = sums.piece_numel(dtype) if in_pieces else max(1, body)
        ends = [*range(step, body, step), numel]  # the header travels with the last numbers
        self._bodies[id(bucket)] = bucket[:body]
        self._ways[id(bucket)] = [
            way
            for begin, end in zip([0, *ends], ends, strict=False)
            for way in sums.make(
                self._group.gradients, bucket[begin:end], max(0, end - body), self._compress
            )
        ]
        return bucket

    def start(self, bucket: torch.Tensor, weight: float = 1.0) -> None:
        """Hands the bucket to the backend's own threads or stream."""
        if weight != 1.0:
            self._bodies[id(bucket)].mul_(weight)
        for way in self._ways[id(bucket)]:
            way.start()

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits for the backend."""
        for way in self._ways[id(bucket)]:
            way.turn(wait)
        for way in self._ways[id(bucket)]:
            way.finish(wait)

    def close(self) -> None:
        """Lets go of the buckets."""
        self._bodies.clear()
        self._ways.clear()
