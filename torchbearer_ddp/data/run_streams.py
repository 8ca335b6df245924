"""Each rank's own random streams while a run trains, and one common stream outside of runs."""

from __future__ import annotations

import torch

from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import membership


class RunStreams:
    """Remembers the seed with which a run was entered."""

    def __init__(self) -> None:
        self._seed: int | None = None

    def enter(self) -> None:
        """Gives each rank its own streams."""
        group = membership.current()
        if group is not None and group.member.world_size > 1:
            self._seed = torch.initial_seed()
            randomness.enter_run(self._seed, group.runs, group.member.rank)

    def leave(self) -> None:
        """Gives all ranks the common stream."""
        group = membership.current()
        if self._seed is not None and group is not None:
            randomness.leave_run(self._seed, group.runs)
            group.runs += 1
        self._seed = None
