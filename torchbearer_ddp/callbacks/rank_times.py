"""How the ranks' times differ, for TensorBoard."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


class RankTimes:
    """Adds up how long each rank computed, and waited for the slowest, since the last reading."""

    def __init__(self) -> None:
        self._steps: list[list[float]] = []

    def add(self, times: Sequence[float]) -> None:
        """Adds the times of a step, one for each rank."""
        self._steps.append(list(times))

    def read(self) -> dict[str, float]:
        """The curves: least, median and most of the ranks' averages, and which rank has most."""
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        waits = [[max(times) - each for each in times] for times in steps]
        values = {}
        for name, rows in (("compute", steps), ("waiting", waits)):
            averages = [1000 * statistics.fmean(rank) for rank in zip(*rows, strict=True)]
            values[f"rank_{name}_ms/min"] = min(averages)
            values[f"rank_{name}_ms/median"] = statistics.median(averages)
            values[f"rank_{name}_ms/max"] = max(averages)
            values[f"rank_{name}_ms/rank_of_max"] = float(averages.index(max(averages)))
        return values
