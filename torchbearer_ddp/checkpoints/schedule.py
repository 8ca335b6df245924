"""When a save is due: by epochs, by steps, by the clock."""

from __future__ import annotations

import time


class SaveSchedule:
    """Knows when a save is due; only rank zero's clock counts, which the caller shares.

    Attributes:
        every_seconds: The time between two saves, or None.
        saved_step: The step of the last save, or -1.
    """

    def __init__(
        self, every_epochs: int | None, every_steps: int | None, every_seconds: float | None
    ) -> None:
        require_positive(
            every_epochs=every_epochs, every_steps=every_steps, every_seconds=every_seconds
        )
        self._every_epochs = every_epochs
        self._every_steps = every_steps
        self.every_seconds = every_seconds
        self.saved_step = -1
        self._clock_start = time.monotonic()

    def restart_clock(self) -> None:
        """Counts the time to the next save from now on."""
        self._clock_start = time.monotonic()

    def saved(self, step: int) -> None:
        """Notes a save."""
        self.saved_step = step
        self.restart_clock()

    def is_due_by_clock(self) -> bool:
        """Whether the time between two saves has passed."""
        passed = time.monotonic() - self._clock_start
        return self.every_seconds is not None and passed >= self.every_seconds

    def is_due_at_step(self, step: int) -> bool:
        """Whether a save is due after so many steps."""
        return self._every_steps is not None and step % self._every_steps == 0

    def is_due_after_epochs(self, epochs: int, *, ends: bool) -> bool:
        """Whether a save is due after so many epochs; if the run ends with them, it is."""
        return self._every_epochs is not None and (epochs % self._every_epochs == 0 or ends)


def require_positive(**given: float | None) -> None:
    """Refuses numbers that are not above 0."""
    for name, value in given.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}: give a number above 0, or None.")
