"""When to ask rank zero whether a save is due by the clock or a write has failed.

Only rank zero knows, and every rank must act at the same step. Asking at each step would cost an
exchange each time, so all ranks ask at steps they know beforehand. After a save they ask at the
next step, then after 2, 4, 8 ... more until the file stands; for the clock, at half of the steps
that are left by the pace so far, so a handful of times per save.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Answer:
    """What rank zero says, the same on every rank.

    Args:
        failed: A write has failed.
        save: A save is due by the clock.
        ask_again: The step at which to ask next, or None if there is nothing to wait for.
    """

    failed: bool
    save: bool
    ask_again: int | None


class SaveSchedule:
    """Knows at which step to ask, alike on every rank.

    Args:
        every_seconds: The time between two saves, or None.
    """

    def __init__(self, every_seconds: float | None) -> None:
        self._every_seconds = every_seconds
        self._ask_at: int | None = None
        self._gap = 1
        self._saved_at = self._asked_at = time.monotonic()
        self._asked_step = 0

    def begin(self, step: int, *, writing: bool) -> None:
        """Starts the clock: at the start of a run, and after a save.

        Args:
            step: The number of steps done.
            writing: A write has begun.
        """
        self._saved_at = self._asked_at = time.monotonic()
        self._asked_step = step
        self._gap = 1
        self._ask_at = step + 1 if writing or self._every_seconds is not None else None

    def is_due(self, step: int) -> bool:
        """Whether to ask at this step."""
        return self._ask_at is not None and step >= self._ask_at

    def answer(self, step: int, *, busy: bool, failed: bool) -> Answer:
        """What rank zero says at this step.

        Args:
            step: The number of steps done.
            busy: A write is under way.
            failed: A write has failed.
        """
        now = time.monotonic()
        pace = (now - self._asked_at) / max(1, step - self._asked_step)
        self._asked_at, self._asked_step = now, step
        again = []
        if busy:
            again.append(step + self._gap)
            self._gap *= 2
        save = False
        if self._every_seconds is not None:
            left = self._every_seconds - (now - self._saved_at)
            save = left <= 0
            again.append(step + max(1, int(left / max(pace, 1e-9) / 2)))
        return Answer(failed, save, min(again, default=None))

    def heard(self, answer: Answer) -> None:
        """Notes when to ask next.

        Args:
            answer: What rank zero said.
        """
        self._ask_at = answer.ask_again
