"""The few numbers that travel with every gradient: one header instead of several messages.

The header sits at the end of a bucket and is summed with it. Each rank writes its own row and
leaves the others zero, so the sum is the table of all rows: every rank reads every rank's report.
The marks, one per parameter, are really summed: a parameter with a zero was used by no rank.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields

import numpy
import numpy.typing
import torch

#: A step number must be exact in single precision.
_STEP_MODULUS = 2**22
#: So many wishes fit one number that is exact in single precision.
MAX_WISHES = 20


@dataclass
class RankReport:
    """What one rank reports with its gradient.

    Attributes:
        step: The number of exchanges so far: the same on ranks that are in step.
        batch_size: The number of samples behind this gradient.
        stop: True to ask that all ranks leave the loop at this step.
        signal: The number of the signal this rank has received, or 0.
        seconds: How long this rank took since the last exchange.
        loss: The loss behind this gradient.
        again: True if gradients have changed since they were sent.
        wishes: One bit for each registered wish that this rank expresses.
    """

    step: int = 0
    batch_size: int = 1
    stop: bool = False
    signal: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    again: bool = False
    wishes: int = 0


#: The elements of a row, in this order.
_FIELDS = len(fields(RankReport))


@dataclass
class StepSummary:
    """What all ranks reported, the same on every rank.

    Attributes:
        steps: Each rank's step.
        samples: The number of samples over all ranks.
        stop: True if any rank asked to stop.
        signal: The largest signal number any rank has received, or 0.
        slowest: The longest any rank took since the last exchange, in seconds.
        loss: The mean loss over all ranks.
        again: True if any rank's gradients have changed since they were sent.
        wishes: The bits that any rank has set.
        used: One entry per parameter: whether any rank has a gradient for it.
    """

    steps: list[int]
    samples: float
    stop: bool
    signal: int
    slowest: float
    loss: float
    again: bool
    wishes: int
    used: numpy.typing.NDArray[numpy.bool_]

    def in_step(self, step: int) -> bool:
        """True if every rank is at this step."""
        return all(each == step % _STEP_MODULUS for each in self.steps)


class Header:
    """Reads and writes the header in its place at the end of a bucket."""

    @staticmethod
    def size(world_size: int, parameters: int) -> int:
        """The number of elements a header takes."""
        return world_size * _FIELDS + parameters

    def __init__(self, place: torch.Tensor, rank: int, world_size: int) -> None:
        self._place = place
        self._on_host = place.device.type == "cpu"
        # On the CPU numpy shares the bucket's memory: a tenth of the time of tensor indexing.
        self._values = place.numpy() if self._on_host else numpy.zeros(len(place), numpy.float32)
        self._rows = world_size * _FIELDS
        self._mine = slice(rank * _FIELDS, (rank + 1) * _FIELDS)

    def write(self, report: RankReport, used: list[bool] | None) -> None:
        """Writes this rank's part before the bucket is sent; ``used`` is None where all are."""
        values = self._values
        values[: self._rows] = 0
        step, *others = vars(report).values()
        values[self._mine] = (step % _STEP_MODULUS, *others)
        values[self._rows :] = 1 if used is None else used
        if not self._on_host:
            self._place.copy_(torch.from_numpy(values))

    def read(self) -> StepSummary:
        """Reads all parts, after the bucket was summed."""
        values = self._values if self._on_host else self._place.cpu().numpy()
        rows = values[: self._rows].reshape(-1, _FIELDS)
        # One call for what is a handful of numbers: python's own arithmetic is faster on those.
        columns = zip(*rows.tolist(), strict=True)
        steps, samples, stops, signals, seconds, losses, again, wishes = columns
        return StepSummary(
            steps=[int(step) for step in steps],
            samples=sum(samples),
            stop=any(stops),
            signal=int(max(signals)),
            slowest=max(seconds),
            loss=sum(losses) / len(losses),
            again=any(again),
            wishes=functools.reduce(operator.or_, map(int, wishes)),
            used=values[self._rows :] > 0,
        )
