"""What the reducer asks of a transport: places for all buckets, and the sum of each over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from torchbearer_ddp.group.waiting import Wait


@dataclass
class Bucket:
    """One flat tensor to sum.

    Attributes:
        numel: The number of elements, without the header.
        header: The number of elements after those, which are summed without weights.
        group: The group of parameters that travel together; a bucket holds one group only.
        parameters: Those whose gradients are in it.
    """

    dtype: torch.dtype
    device: torch.device
    numel: int = 0
    header: int = 0
    group: int = 0
    parameters: list[torch.Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of elements with the header."""
        return self.numel + self.header

    def describe(self) -> str:
        """What must be the same on every rank."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.numel} + {self.header} elements of {dtype} on {self.device.type}"


class Transport(Protocol):
    """Sums a fixed list of buckets over all ranks, in place.

    Buckets are started in the same order on every rank and finished in that order. Between
    ``finish`` and the next ``start`` a bucket belongs to this rank alone: callbacks clip the
    gradients in it, the optimizer reads them. The memory lives as long as a tensor over it.
    """

    name: str
    #: True if a bucket makes progress between ``start`` and ``finish``.
    overlaps: bool
    #: True if ``start`` applies a weight for free; else it is better applied while copying.
    applies_weight: bool
    #: The buckets' memory, zeroed at first.
    tensors: list[torch.Tensor]

    def start(self, index: int, weight: float = 1.0) -> None:
        """Begins to sum one bucket; returns at once where the transport can.

        Args:
            index: The bucket's place in :attr:`tensors`.
            weight: What this rank's numbers, but not its header, are multiplied by in the sum. Each
                rank may have its own; 1/world size makes the sum a mean.
        """
        ...

    def finish(self, index: int, wait: Wait) -> None:
        """Waits until the bucket holds the weighted sum over all ranks."""
        ...

    def commit(self) -> None:
        """Says that the last exchange counts: what it has lost is added to the next one."""
        ...
