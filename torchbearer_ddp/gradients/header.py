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

from torchbearer_ddp.gradients.host_copy import HostCopy
from torchbearer_ddp.group.waiting import Wait

#: Numbers up to twice this are exact in single precision.
MODULUS = 2**22
#: So many yes-or-no marks fit one number that is exact in single precision.
MAX_WISHES = 20
MAX_GROUPS = 20


@dataclass
class RankReport:
    """What one rank reports with its gradient.

    Attributes:
        step: The number of exchanges so far: the same on ranks that are in step.
        weight: What the loss behind this gradient divides by: the number of samples, mostly.
        stop: True to ask that all ranks leave the loop at this step.
        signal: The number of the signal this rank has received, or 0.
        seconds: How long this rank took since the last exchange.
        loss: The loss behind this gradient.
        again: True if gradients have changed since they were sent.
        wishes: One bit for each registered wish that this rank expresses.
        batch: The number of the batch in its epoch.
        site: 0 after a backward of the Trial's closure; else the number of the optimizer that is
            about to step.
        groups: One bit for each group of parameters that has gradients to average.
        mixed: One bit for each group with gradients that were added to an average.
        frozen: A checksum of which parameters require a gradient.
        failed: True if the backward pass of this exchange failed after some buckets were sent.
        regroup: True if a parameter outside all buckets has a gradient.
    """

    step: int = 0
    weight: float = 1.0
    stop: bool = False
    signal: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    again: bool = False
    wishes: int = 0
    batch: int = 0
    site: int = 0
    groups: int = 0
    mixed: int = 0
    frozen: int = 0
    failed: bool = False
    regroup: bool = False


#: The elements of a row, in this order.
_NAMES = tuple(each.name for each in fields(RankReport))
_FIELDS = len(_NAMES)


@dataclass
class StepSummary:
    """What all ranks reported, the same on every rank.

    Attributes:
        steps: Each rank's step.
        weights: Each rank's weight.
        losses: Each rank's loss.
        batches: Each rank's batch.
        sites: Each rank's site.
        frozen: Each rank's checksum of which parameters are frozen.
        failed: The ranks whose backward pass failed.
        stop: True if any rank asked to stop.
        signal: The largest signal number any rank has received, or 0.
        slowest: The longest any rank took since the last exchange, in seconds.
        again: True if any rank's gradients have changed since they were sent.
        regroup: True if any rank has a gradient outside all buckets.
        wishes: The bits that any rank has set.
        groups: The bits that any rank has set.
        mixed: The bits that any rank has set.
        used: One entry per parameter: whether any rank has a gradient for it.
    """

    steps: list[int]
    weights: list[float]
    losses: list[float]
    batches: list[int]
    sites: list[int]
    frozen: list[int]
    failed: list[int]
    stop: bool
    signal: int
    slowest: float
    again: bool
    regroup: bool
    wishes: int
    groups: int
    mixed: int
    used: numpy.typing.NDArray[numpy.bool_]

    def in_step(self, step: int) -> bool:
        """True if every rank is at this step."""
        return all(each == step % MODULUS for each in self.steps)


class Header:
    """Reads and writes the header in its place at the end of a bucket."""

    @staticmethod
    def size(world_size: int, parameters: int) -> int:
        """The number of elements a header takes."""
        return world_size * _FIELDS + parameters

    def __init__(self, place: torch.Tensor, rank: int, world_size: int) -> None:
        self._copy = None if place.device.type == "cpu" else HostCopy(place)
        # On the CPU numpy shares the bucket's memory: a tenth of the time of tensor indexing.
        self._values = place.numpy() if self._copy is None else self._copy.values
        self._rows = world_size * _FIELDS
        self._mine = slice(rank * _FIELDS, (rank + 1) * _FIELDS)

    def write(self, report: RankReport, used: list[bool] | None) -> None:
        """Writes this rank's part before the bucket is sent; ``used`` is None where all are."""
        values = self._values
        values[: self._rows] = 0
        step, *others = vars(report).values()
        values[self._mine] = (step % MODULUS, *others)
        values[self._rows :] = 1 if used is None else used
        if self._copy is not None:
            self._copy.send()

    def read(self, wait: Wait) -> StepSummary:
        """Reads all parts, after the bucket was summed."""
        if self._copy is not None:
            self._copy.receive(wait)
        values = self._values
        rows = values[: self._rows].reshape(-1, _FIELDS)
        # One call for what is a handful of numbers: python's own arithmetic is faster on those.
        column = dict(zip(_NAMES, zip(*rows.tolist(), strict=True), strict=True))
        return StepSummary(
            steps=_whole(column["step"]),
            weights=list(column["weight"]),
            losses=list(column["loss"]),
            batches=_whole(column["batch"]),
            sites=_whole(column["site"]),
            frozen=_whole(column["frozen"]),
            failed=[r for r, failed in enumerate(column["failed"]) if failed],
            stop=any(column["stop"]),
            signal=int(max(column["signal"])),
            slowest=max(column["seconds"]),
            again=any(column["again"]),
            regroup=any(column["regroup"]),
            wishes=_bits(column["wishes"]),
            groups=_bits(column["groups"]),
            mixed=_bits(column["mixed"]),
            used=values[self._rows :] > 0,
        )


def _whole(column: tuple[float, ...]) -> list[int]:
    return list(map(int, column))


def _bits(column: tuple[float, ...]) -> int:
    return functools.reduce(operator.or_, map(int, column)) if any(column) else 0
