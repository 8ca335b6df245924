"""Buckets through torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import torch

from torchbearer_ddp.process_group import Group
from torchbearer_ddp.reducer import sums
from torchbearer_ddp.waiting import Wait


class CollectiveTransport:
    """One asynchronous sum per bucket, over all ranks.

    Args:
        group: The group of all ranks.
        name: What to call it: the backend that serves the gradients' device.
        compress: What travels instead of single precision, or None.
    """

    overlaps = True
    bucket_bytes = 25 * 2**20

    def __init__(self, group: Group, name: str, compress: str | None = None) -> None:
        self.name = name
        self._group = group
        self._compress = compress
        self._sums: dict[int, tuple[sums.Sum, torch.Tensor]] = {}

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, header: int = 0
    ) -> torch.Tensor:
        """Ordinary memory."""
        bucket = torch.zeros(numel, dtype=dtype, device=device)
        way = sums.make(self._group.gradients, bucket, header, self._compress)
        self._sums[id(bucket)] = (way, bucket[: numel - header])
        return bucket

    def start(self, bucket: torch.Tensor, wait: Wait, weight: float = 1.0) -> None:
        """Weights the bucket and hands it to the backend's own threads or stream."""
        del wait
        way, body = self._sums[id(bucket)]
        if weight != 1.0:
            body.mul_(weight)
        way.start()

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits for the backend."""
        self._sums[id(bucket)][0].finish(wait)

    def close(self) -> None:
        """Lets go of the buckets."""
        self._sums.clear()
