"""Buckets through torch.distributed's own all-reduce: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchbearer_ddp.process_group import Group
from torchbearer_ddp.waiting import Wait, wait_for


class CollectiveTransport:
    """One asynchronous all-reduce per bucket.

    Args:
        group: The group of all ranks.
        name: What to call it: the backend that serves the gradients' device.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.name = name
        self.overlaps = True
        self._group = group
        self._works: dict[int, Any] = {}
        self._headers: dict[int, int] = {}

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, header: int = 0
    ) -> torch.Tensor:
        """Ordinary memory."""
        bucket = torch.zeros(numel, dtype=dtype, device=device)
        self._headers[bucket.data_ptr()] = header
        return bucket

    def start(self, bucket: torch.Tensor, wait: Wait, weight: float = 1.0) -> None:
        """Weights the bucket and hands it to the backend's own threads or stream."""
        del wait
        key = bucket.data_ptr()
        if weight != 1.0:
            bucket[: bucket.numel() - self._headers[key]].mul_(weight)
        self._works[key] = dist.all_reduce(bucket, group=self._group.gradients, async_op=True)

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits for the backend."""
        wait_for(self._works.pop(bucket.data_ptr()), wait)

    def close(self) -> None:
        """Nothing is held."""
