"""Interleaved rounds: every way takes its turn in each round, so that noise meets all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.models import Case
from benchmarks.steps import DDP, LOCAL, Steps
from torchbearer_ddp import barrier
from torchbearer_ddp.group import collectives


@dataclass
class Result:
    """The times of one way, as the slowest rank saw them.

    Args:
        way: The name of the way.
        milliseconds: The median step.
        spread: The middle half of the rounds, from and to, in milliseconds.
    """

    way: str
    milliseconds: float
    spread: tuple[float, float]


def interleaved(
    case: Case,
    ways: list[str],
    prepare: Callable[[str, Case], Steps],
    *,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Measures every way on every rank.

    Args:
        case: The model.
        ways: The names of the ways.
        prepare: Makes the steps of a way.
        rounds: How often each way takes its turn.
        seconds: About how long a turn takes.
    """
    steps = {way: prepare(way, case) for way in ways}
    for run in steps.values():
        run(3)
    count = collectives.broadcast(max(3, round(seconds / (steps[ways[0]](3) / 3))), "step count")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way in ways if turn % 2 else reversed(ways):
            barrier("the benchmark")
            mine = steps[way](count) / count
            times[way].append(1000 * max(collectives.all_gather(mine, "the benchmark's times")))
    return [result(way, found) for way, found in times.items()]


def result(way: str, milliseconds: list[float]) -> dict[str, Any]:
    """Sums up the times of one way."""
    quarters = (
        statistics.quantiles(milliseconds, n=4) if len(milliseconds) > 1 else milliseconds * 3
    )
    return asdict(Result(way, statistics.median(milliseconds), (quarters[0], quarters[-1])))


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """How many times faster than the best of DDP's settings each way is."""
    best = min(r["milliseconds"] for r in results if r["way"] in DDP)
    return {r["way"]: best / r["milliseconds"] for r in results if r["way"] not in (*DDP, LOCAL)}
