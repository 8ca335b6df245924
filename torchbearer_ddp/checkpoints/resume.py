"""A checkpoint that is being put back, in steps that fit the order in which a run starts.

At ``on_start`` the weights and the history, so that every callback sees the run that continues. At
the first ``on_start_epoch``, when all have started, what their start may have changed: a scheduler
that was just made sets its first learning rate, for one. In mid-epoch once more when the loader has
been brought to its place, since the hooks at the start of that epoch have run a second time.
"""

from __future__ import annotations

import warnings
from typing import Any

import torchbearer

from torchbearer_ddp.checkpoints import contents, metric_state, position, rank_state
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import collectives
from torchbearer_ddp.log import announce


def data_plan(state: Any) -> dict[str, Any]:
    """What must be the same for a place in an epoch to mean the same.

    Args:
        state: The state of the running Trial, after all callbacks have started.
    """
    generator, steps = state[torchbearer.SELF].state[torchbearer.TRAIN_DATA] or (None, None)
    return {
        "world_size": collectives.world_size(),
        "train_steps": steps,
        "batch_size": getattr(generator, "batch_size", None),
    }


class Resume:
    """What is left to do until a run stands where the checkpoint was taken.

    Args:
        path: Where the checkpoint was found, for messages.
        payload: Its contents.
    """

    def __init__(self, path: str, payload: dict[str, Any]) -> None:
        self._path = path
        self._payload = payload
        self._section = payload[SECTION]
        self._mine: dict[str, Any] | None = None
        #: The steps done in the epoch that continues; 0 to begin that epoch.
        self.batch = 0

    @property
    def global_step(self) -> int:
        """The number of steps done."""
        return int(self._section["global_step"])

    def start(self, state: Any) -> None:
        """Puts back what the other callbacks may want to see at their start.

        Args:
            state: The state of the running Trial.

        Raises:
            CheckpointError: On all ranks, if it does not fit this trial.
        """
        error = None
        try:
            contents.restore(state, self._payload)
        except CheckpointError as caught:
            error = CheckpointError(f"{self._path}: {caught}")
        collectives.raise_together(error, "continuing from a checkpoint")
        contents.restore_callbacks(state, self._payload)
        if self._section["world_size"] == collectives.world_size():
            # Whoever derives a seed at the start (the order of the data) is to find the same.
            mine = self._section["ranks"][collectives.rank()]
            rank_state.set_generators(state, mine["generators"])
            state[torchbearer.HISTORY][:] = mine["history"]
        position.show_progress(state, self._section["epochs"], on_epoch=True)
        if collectives.is_rank_zero():
            contents.warn_of_changed_callbacks(state, self._payload)
        announce(
            f"continuing from {self._path} ({self._section['epochs']} epochs and "
            f"{self.global_step} steps done); to start afresh, give another folder or remove the "
            "checkpoints there"
        )

    def start_epoch(self, state: Any) -> None:
        """Puts back what the start of the other callbacks may have changed, and the generators.

        Args:
            state: The state of the running Trial, before the loader is started.
        """
        self._choose_part(state)
        self._put_back(state)
        if self._mine is None:
            return
        if self.batch:
            rank_state.set_generators(state, self._mine["epoch"]["start"])
        else:
            metrics = state[torchbearer.METRIC_LIST]
            metrics.train()
            metrics.reset(state)  # a metric may get its parts only now
            self._put_back_metrics(state)
            rank_state.set_generators(state, self._mine["generators"])

    def continue_epoch(self, state: Any, trace: position.Trace) -> None:
        """Goes to the middle of the epoch.

        Args:
            state: The state of the running Trial, the loader having been started.
            trace: The trace of this epoch.
        """
        if self._mine is not None and self.batch:
            trace.replay(state, self._mine["epoch"], self.batch)
            self._put_back(state)
            self._put_back_metrics(state)
            rank_state.set_generators(state, self._mine["generators"])

    def _put_back(self, state: Any) -> None:
        contents.restore_callbacks(state, self._payload)
        # After the schedulers: one that was just made has set its first learning rate.
        contents.restore_optimizer(state, self._payload)
        if self._mine is not None:
            model = contents.unwrapped(state[torchbearer.MODEL])
            rank_state.restore_buffers(model, self._mine["buffers"])

    def _put_back_metrics(self, state: Any) -> None:
        if self._mine is not None:
            metrics, device = state[torchbearer.METRIC_LIST], state[torchbearer.DEVICE]
            metric_state.restore(metrics, self._mine["metrics"], device)

    def _choose_part(self, state: Any) -> None:
        """Takes this rank's part, where the ranks and the data are as they were."""
        plan, batch = data_plan(state), self._section["batch"]
        changed = {
            name: (self._section[name], value)
            for name, value in plan.items()
            if self._section[name] != value and (batch or name == "world_size")
        }
        if not changed:
            self._mine, self.batch = self._section["ranks"][collectives.rank()], batch
            return
        if collectives.is_rank_zero():
            listed = ", ".join(
                f"{name.replace('_', ' ')} {old} then and {new} now"
                for name, (old, new) in changed.items()
            )
            place = "the epoch begins again, and " if batch else ""
            warnings.warn(
                f"{self._path} was saved under other conditions ({listed}). Weights, optimizer, "
                f"history and callbacks carry over; {place}random numbers start anew, so the "
                "run is not bit for bit the one that would have gone on.",
                stacklevel=2,
            )
