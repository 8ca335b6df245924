"""What is exchanged: the trained parameters, and one exchange of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchbearer_ddp.gradients.header import RankReport
from torchbearer_ddp.gradients.hooks import is_zero
from torchbearer_ddp.gradients.transports.compression import Compression
from torchbearer_ddp.gradients.weights import Average


@dataclass(frozen=True)
class Options:
    """How gradients are exchanged.

    Attributes:
        transport: The name of the transport, or ``auto``.
        bucket_bytes: The size of a bucket, or None for what suits the device.
        compress: What travels instead of single precision, or None.
    """

    transport: str = "auto"
    bucket_bytes: int | None = None
    compress: str | Compression | None = None


@dataclass(frozen=True)
class Trained:
    """A parameter whose gradients are exchanged.

    Attributes:
        parameter: The parameter.
        group: Parameters of one group travel together.
        is_sparse: True if its gradients are sparse.
        is_stepped: True if an optimizer is known to step on it.
    """

    parameter: torch.nn.Parameter
    group: int = 0
    is_sparse: bool = False
    is_stepped: bool = True

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """All but the parameter; tensors have no equality of their own."""
        return self.group, self.is_sparse, self.is_stepped


@dataclass
class Exchange:
    """One exchange of gradients.

    Attributes:
        report: What this rank reports.
        used: By parameter: whether this rank has a new gradient.
        is_full: True if it has one for every parameter.
        is_skipped: True if it has made nothing of the batch.
        average: What the gradients become.
        empty: True if this rank counts nothing.
        usual: All gradients, if nothing about them is unusual; else empty.
        factor: What this rank's gradients are multiplied by.
        indices: The parameters that take part.
        kept: Gradients, by parameter, to put back if no rank has a new one in their place.
    """

    report: RankReport
    used: list[bool]
    average: Average
    empty: bool
    usual: list[torch.Tensor] = field(default_factory=list)
    factor: float = 1.0
    indices: Sequence[int] = ()
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_full = all(self.used)
        self.is_skipped = not self.report.weight and not any(self.used)

    def drop_old(self, cleared: set[int]) -> None:
        """A rank that has skipped the batch may not have cleared what the others have cleared."""
        for index, gradient in [*self.kept.items()]:
            if index in cleared and not is_zero(gradient):
                del self.kept[index]
