"""The few numbers that travel with every gradient: one header instead of several messages.

The header sits at the end of a bucket and is summed with it. Each rank writes its own row and
leaves the others zero, so the sum is the table of all rows: every rank reads every rank's report.
The marks, one per parameter, are really summed: a parameter with a zero was used by no rank.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


#: What must be the same on all ranks, then what differs, then what is zero in most steps.
_EQUAL = ("step", "batch", "site", "frozen")
_DIFFERENT = ("weight", "loss", "seconds")
_RARE = ("stop", "signal", "again", "wishes", "groups", "mixed", "failed", "regroup")
_NAMES = (*_EQUAL, *_DIFFERENT, *_RARE)
_FIELDS, _USUAL, _SAME = len(_NAMES), len(_EQUAL) + len(_DIFFERENT), len(_EQUAL)
_WEIGHT, _SECONDS = _NAMES.index("weight"), _NAMES.index("seconds")
_NOTHING_RARE = [0.0] * len(_RARE)
_row = operator.attrgetter(*_NAMES[1:])


@dataclass
class StepSummary:
    """What all ranks reported, the same on every rank.

    Attributes:
        rows: The row of each rank, one after the other.
        weights: Each rank's weight.
        times: How long each rank took since the last exchange, in seconds.
        together: True if all ranks have the same step, batch, site and frozen parameters.
        marks: One number per parameter: zero if no rank has a gradient for it. To be read before
            the next exchange.
        failed: The ranks whose backward pass failed.
        stop: True if any rank asked to stop.
        signal: The largest signal number any rank has received, or 0.
        again: True if any rank's gradients have changed since they were sent.
        regroup: True if any rank has a gradient outside all buckets.
        wishes: The bits that any rank has set.
        groups: The bits that any rank has set.
        mixed: The bits that any rank has set.
    """

    rows: Sequence[float]
    weights: Sequence[float]
    times: Sequence[float]
    together: bool
    marks: numpy.typing.NDArray[numpy.float32]
    failed: Sequence[int] = ()
    stop: bool = False
    signal: int = 0
    again: bool = False
    regroup: bool = False
    wishes: int = 0
    groups: int = 0
    mixed: int = 0

    @property
    def steps(self) -> Sequence[float]:
        """Each rank's step."""
        return self._column("step")

    @property
    def batches(self) -> Sequence[float]:
        """Each rank's batch."""
        return self._column("batch")

    @property
    def sites(self) -> Sequence[float]:
        """Each rank's site."""
        return self._column("site")

    @property
    def frozen(self) -> Sequence[float]:
        """Each rank's checksum of which parameters are frozen."""
        return self._column("frozen")

    @property
    def losses(self) -> Sequence[float]:
        """Each rank's loss."""
        return self._column("loss")

    def _column(self, name: str) -> Sequence[float]:
        return self.rows[_NAMES.index(name) :: _FIELDS]

    @property
    def slowest(self) -> float:
        """The longest any rank took since the last exchange, in seconds."""
        return max(self.times)

    def problem(self, step: int) -> str | None:
        """Why the ranks cannot go on together from this step, as sentences."""
        if self.together and self.rows[0] == step % MODULUS and not self.failed:
            return None  # as at nearly every step
        if self.steps.count(step % MODULUS) != len(self.steps):
            steps = "; ".join(f"rank {rank} at {at:.0f}" for rank, at in enumerate(self.steps))
            return (
                f"The ranks exchanged gradients of different steps: {steps}. Every rank must run "
                "the same number of backward passes: look for a step that only some ranks take."
            )
        if self.failed and len(self.failed) < len(self.steps):
            return (
                f"The backward pass of rank {', '.join(map(str, self.failed))} failed and its "
                "batch was skipped, but the other ranks went on with theirs. Skip a batch on "
                "every rank, or let the exception end the run."
            )
        return None

    @property
    def used(self) -> list[bool]:
        """One entry per parameter: whether any rank has a gradient for it."""
        return (self.marks > 0).tolist()  # type: ignore[no-any-return]


def bits(numbers: Iterable[int]) -> int:
    """A number with these bits set."""
    return functools.reduce(lambda known, number: known | 1 << number, numbers, 0)


class Header:
    """Reads and writes the header in its place at the end of a bucket."""

    @staticmethod
    def size(world_size: int, parameters: int) -> int:
        """The number of elements a header takes."""
        return world_size * _FIELDS + parameters

    def __init__(self, place: torch.Tensor, rank: int, world_size: int) -> None:
        self._copy = None if place.device.type == "cpu" else HostCopy(place)
        #: On the CPU numpy shares the bucket's memory.
        self._values = place.numpy() if self._copy is None else self._copy.values
        # Memory and not numpy or torch: a third of the time for a few numbers.
        self._memory = memoryview(self._values)  # type: ignore[arg-type]
        self._rows = world_size * _FIELDS
        self._marks = self._values[self._rows :]
        blank = numpy.zeros_like(self._values)
        blank[self._rows :] = 1
        self._blank = memoryview(blank)  # type: ignore[arg-type]
        self._row = struct.Struct(f"{_FIELDS}{self._memory.format}")
        self._offset = rank * self._row.size

    def write(self, report: RankReport, used: list[bool] | None) -> None:
        """Writes this rank's part before the bucket is sent; ``used`` is None where all are."""
        self._memory[:] = self._blank
        self._row.pack_into(self._memory, self._offset, report.step % MODULUS, *_row(report))
        if used is not None:
            self._marks[:] = used
        if self._copy is not None:
            self._copy.send()

    def read(self, wait: Wait) -> StepSummary:
        """Reads all parts, after the bucket was summed."""
        if self._copy is not None:
            self._copy.receive(wait)
        values: list[Any] = self._memory[: self._rows].tolist()
        together, is_rare = True, False
        for start in range(0, self._rows, _FIELDS):  # a plain loop: the fastest for a few ranks
            together = together and values[start : start + _SAME] == values[:_SAME]
            is_rare = is_rare or values[start + _USUAL : start + _FIELDS] != _NOTHING_RARE
        weights, times = values[_WEIGHT::_FIELDS], values[_SECONDS::_FIELDS]
        summary = StepSummary(values, weights, times, together, self._marks)
        if is_rare:
            rare = [values[field::_FIELDS] for field in range(_USUAL, _FIELDS)]
            _add_rare(summary, dict(zip(_RARE, rare, strict=True)))
        return summary


def _add_rare(summary: StepSummary, column: dict[str, list[float]]) -> None:
    summary.failed = [rank for rank, failed in enumerate(column["failed"]) if failed]
    summary.stop, summary.again = any(column["stop"]), any(column["again"])
    summary.regroup, summary.signal = any(column["regroup"]), int(max(column["signal"]))
    for name in ("wishes", "groups", "mixed"):
        setattr(summary, name, functools.reduce(operator.or_, map(int, column[name])))
