"""How much each rank's gradient counts in the average."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

#: Whole numbers below this are the same in single precision.
_EXACT_UP_TO = 2**24


class Average(enum.Enum):
    """What the ranks' gradients become together."""

    #: The mean weighted by what each rank's loss divides by: by samples, mostly.
    WEIGHTED = "weighted"
    #: The mean of all ranks, whatever the sizes of their batches.
    EQUAL = "equal"
    #: The sum, for a loss that sums over its samples.
    SUM = "sum"


@dataclass(frozen=True)
class Weights:
    """The weights of all ranks' gradients.

    A rank cannot know the total before the exchange. So it counts n / (N n0) with the regular size
    n0, which is 1 / N for a regular batch, and the sum is corrected only where the total is not
    N n0. Multiplying by n before the sum would leave the range of half precision.

    Attributes:
        world_size: N.
        regular: n0, the same on every rank.
    """

    world_size: int
    regular: float = 1.0

    def of(self, average: Average, own: float) -> float:
        """What this rank's gradient is multiplied by before the sum."""
        if average is Average.SUM:
            return 1.0
        if average is Average.EQUAL or own == self.regular:
            return 1.0 / self.world_size
        return own / (self.world_size * self.regular)

    def part(self, average: Average, own: float, *, known: bool) -> float:
        """How much of a regular batch a rank sends; all where the weights were ``known`` before."""
        return own / self.regular if average is Average.WEIGHTED and not known else 1.0

    def share(self, average: Average, own: float, everyones: Sequence[float]) -> float:
        """What this rank's gradient is multiplied by where every rank's weight is known before."""
        total = sum(everyones)
        return own / total if average is Average.WEIGHTED and total else self.of(average, own)

    def correction(self, average: Average, everyones: Sequence[float]) -> float:
        """What the sum is multiplied by, now that every rank's weight is known."""
        total, expected = sum(everyones), self.world_size * self.regular
        if average is not Average.WEIGHTED or total in (0.0, expected):
            return 1.0
        return expected / total

    def combine(
        self, average: Average, values: Sequence[float], everyones: Sequence[float]
    ) -> float:
        """The same for one number per rank, such as the loss."""
        if average is Average.SUM:
            return sum(values)
        if average is Average.EQUAL or not sum(everyones):
            return sum(values) / len(values)
        pairs = zip(values, everyones, strict=True)
        return sum(value * weight for value, weight in pairs if weight) / sum(everyones)


def counts_nothing(average: Average, weight: float) -> bool:
    """True if a rank's gradient must be left out: a mean over no samples is no number."""
    return average is Average.WEIGHTED and weight == 0


def as_sent(weight: float) -> float:
    """A weight as the header carries it, in single precision: this rank must use the same."""
    is_exact = weight.is_integer() and 0 <= weight < _EXACT_UP_TO
    return weight if is_exact else float(numpy.float32(weight))
