"""What the reducer asks of a transport: a place for a bucket, and the sum of it over all ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from torchbearer_ddp.waiting import Wait


class Transport(Protocol):
    """Sums flat tensors over all ranks, in place.

    Buckets are started in the same order on every rank and finished in that order. Between
    ``finish`` and the next ``start`` a bucket belongs to this rank alone: callbacks clip the
    gradients in it, the optimizer reads them.
    """

    name: str

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat zeroed tensor that this transport can sum; collective, the same on every rank."""
        ...

    def start(self, bucket: torch.Tensor, wait: Wait, scale: float = 1.0) -> None:
        """Begins to sum a whole bucket; returns at once where the transport can.

        Args:
            bucket: What :meth:`allocate` gave.
            wait: The wait for this bucket.
            scale: What the sum is multiplied by (1/world size for a mean), the same on every rank.
                It is given here since a transport may have the sum before anybody asks for it, and
                costs least while the numbers are in the cache.
        """
        ...

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits until the bucket holds the scaled sum over all ranks."""
        ...

    def close(self) -> None:
        """Gives back what was allocated."""
        ...
