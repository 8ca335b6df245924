"""The end of a run at a batch, for runs that are resumed or started again."""

from __future__ import annotations

from typing import Any

import torchbearer
from torchbearer.callbacks import Callback


class Killed(Exception):
    """The end of a run."""


class KillAt(Callback):  # type: ignore[misc]
    """Ends a run before a batch of an epoch, once."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._place: tuple[int, int] | None = (epoch, batch)

    def on_sample(self, state: Any) -> None:
        if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == self._place:
            self._place = None
            raise Killed
