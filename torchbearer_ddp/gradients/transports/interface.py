"""What the reducer asks of a transport: a place for a bucket, and the sum of it over all ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from torchbearer_ddp.group.waiting import Wait


class Transport(Protocol):
    """Sums flat tensors over all ranks, in place.

    Buckets are started in the same order on every rank and finished in that order. Between
    ``finish`` and the next ``start`` a bucket belongs to this rank alone: callbacks clip the
    gradients in it, the optimizer reads them.
    """

    name: str
    #: True if a bucket makes progress between ``start`` and ``finish``.
    overlaps: bool
    #: True if a weight costs nothing in ``start``; else it is given where the numbers are copied.
    applies_weight: bool
    #: The size of a bucket that suits it.
    bucket_bytes: int

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, header: int = 0
    ) -> torch.Tensor:
        """A flat zeroed tensor that this transport can sum; collective, the same on every rank.

        Args:
            numel: The number of elements.
            dtype: Their type.
            device: Where they live.
            header: How many elements at the end are summed without weights.
        """
        ...

    def start(self, bucket: torch.Tensor, weight: float = 1.0) -> None:
        """Begins to sum a whole bucket; returns at once where the transport can.

        Args:
            bucket: What :meth:`allocate` gave.
            weight: What this rank's numbers, but not its header, are multiplied by in the sum. Each
                rank may have its own; 1/world size makes the sum a mean.
        """
        ...

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits until the bucket holds the weighted sum over all ranks."""
        ...

    def close(self) -> None:
        """Gives back what was allocated."""
        ...
