"""Names a rank that is slower than the others for many steps, from the times in the header."""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence

#: So many steps are compared at once, and a rank must be the slowest in so many rows of them.
_STEPS, _ROWS = 20, 3
#: A rank is slow if it takes so many times as long as the median of the others, and at least so
#: many seconds longer at each step.
_RATIO, _LEAST_SECONDS = 1.4, 0.001
#: Between two lines.
_QUIET_SECONDS = 300.0


class Stragglers:
    """Compares how long the ranks take from one exchange to the next.

    Args:
        hosts: The host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._said_at = -math.inf
        self._row = [0.0] * len(hosts)
        self._forget()

    def _forget(self) -> None:
        self._slow: int | None = None
        self._since = self._steps = self._rows = 0
        self._total = [0.0] * len(self.hosts)

    def add(self, times: Sequence[float], step: Callable[[], int | None]) -> str | None:
        """Adds the times of a step; returns a sentence if one rank has been slower for long."""
        self._row = list(map(operator.add, self._row, times))
        self._steps += 1
        if self._steps % _STEPS:
            return None
        row, self._row = self._row, [0.0] * len(self.hosts)
        slow = max(range(len(row)), key=row.__getitem__)
        others = statistics.median(row[:slow] + row[slow + 1 :])
        if row[slow] < max(_RATIO * others, others + _STEPS * _LEAST_SECONDS):
            self._forget()
            return None
        if slow != self._slow:
            self._forget()
            self._slow, self._since = slow, max(1, (step() or 0) - _STEPS + 1)
            self._steps = _STEPS
        self._rows += 1
        self._total = list(map(operator.add, self._total, row))
        if self._rows < _ROWS or time.monotonic() - self._said_at < _QUIET_SECONDS:
            return None
        self._said_at = time.monotonic()
        return self._sentence(slow)

    def _sentence(self, slow: int) -> str:
        total = self._total
        mine = total[slow] / self._steps
        others = statistics.median(total[:slow] + total[slow + 1 :]) / self._steps
        ratio = f"{mine / others:.1f} times as long as" if others > 0 else "much longer than"
        return (
            f"rank {slow} on {self.hosts[slow]} takes {ratio} the others since step {self._since} "
            f"({1000 * mine:.0f} ms against {1000 * others:.0f} ms from one exchange to the next): "
            "all ranks wait for it"
        )
