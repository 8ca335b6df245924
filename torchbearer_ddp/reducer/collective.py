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
        self._group = group
        self._works: dict[int, tuple[Any, float]] = {}

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def start(self, bucket: torch.Tensor, wait: Wait, scale: float = 1.0) -> None:
        """Hands the bucket to the backend's own threads or stream."""
        del wait
        work = dist.all_reduce(bucket, group=self._group.gradients, async_op=True)
        self._works[bucket.data_ptr()] = (work, scale)

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits for the backend, then scales."""
        work, scale = self._works.pop(bucket.data_ptr())
        wait_for(work, wait)
        if scale != 1.0:
            bucket.mul_(scale)

    def close(self) -> None:
        """Nothing is held."""
