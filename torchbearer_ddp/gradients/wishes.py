"""Yes-or-no questions that every exchange of gradients carries from each rank to all."""

from __future__ import annotations

from collections.abc import Callable

from torchbearer_ddp.gradients.header import MAX_WISHES


class Wishes:
    """What callbacks ask at each exchange: a bit for each."""

    def __init__(self) -> None:
        self._polls: list[Callable[[], bool]] = []

    def register(self, poll: Callable[[], bool]) -> int:
        """Adds a question and returns its number."""
        if len(self._polls) == MAX_WISHES:
            raise ValueError(
                f"register_wish was called {MAX_WISHES} times before: the header has no room for "
                "more. Register each wish once."
            )
        self._polls.append(poll)
        return len(self._polls) - 1

    def bits(self) -> int:
        """This rank's answers now."""
        if not self._polls:  # as in most runs, at every step
            return 0
        return sum(1 << number for number, poll in enumerate(self._polls) if poll())
