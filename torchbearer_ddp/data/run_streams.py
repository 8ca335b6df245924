"""Each rank's own random streams while a run trains, and one common stream outside of runs."""

from __future__ import annotations

from typing import ClassVar

import torch

from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import membership


class RunStreams:
    """Remembers the seed with which a run was entered; a run inside a run changes nothing."""

    _is_open: ClassVar[bool] = False

    def __init__(self) -> None:
        self._seed: int | None = None

    def enter(self) -> None:
        """Gives each rank its own streams."""
        group = membership.current()
        if group is not None and group.member.world_size > 1 and not RunStreams._is_open:
            RunStreams._is_open = True
            self._seed = torch.initial_seed()
            randomness.enter_run(self._seed, group.runs, group.member.rank)

    def leave(self) -> None:
        """Gives all ranks the common stream."""
        if self._seed is None:
            return
        RunStreams._is_open = False
        if (group := membership.current()) is not None:
            randomness.leave_run(self._seed, group.runs)
            group.runs += 1
        self._seed = None
