"""Continuing from a checkpoint, in steps that fit the order in which a run starts.

At ``on_start`` the weights and the history, so that every callback sees the run that continues. At
the first ``on_start_epoch``, when all have started, what their start may have changed: a scheduler
that was just made sets its first learning rate, for one. In mid-epoch once more when the loader has
been brought to its place, since the hooks at the start of that epoch have run a second time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torchbearer

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import (
    contents,
    generators,
    loader_state,
    metric_state,
    rank_state,
    rehearsal,
    trained_state,
)
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.epoch_trace import EpochTrace, show_progress
from torchbearer_ddp.data import randomness
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import collectives
from torchbearer_ddp.log import announce


def data_plan(state: Any) -> dict[str, Any]:
    """What must be the same for a place in an epoch to mean the same; known after all started."""
    _, steps = state[torchbearer.SELF].state[torchbearer.TRAIN_DATA] or (None, None)
    return {
        "world_size": collectives.world_size(),
        "train_steps": steps,
        "batch_size": rank_state.train_batch_size(state),
    }


def load_into(state: Any, payload: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Puts a file into a trial that does not run: all but what each rank had for itself."""
    section = payload.get(SECTION, {})
    with contents.of_file(path):
        contents.restore(state, payload)
        trained_state.restore(state, trained_state.saved_states(section), {})
        if "callbacks" in section:
            if collectives.is_rank_zero():
                contents.warn_of_changed_callbacks(state, payload)
            contents.restore_callbacks(state, payload)
            contents.restore_schedulers(state, payload)


class Resume:
    """What is left to do until a run is where the checkpoint was taken.

    Args:
        path: Where the checkpoint was found, for messages.
        payload: Its contents.

    Attributes:
        path: As given.
    """

    def __init__(self, path: str, payload: dict[str, Any]) -> None:
        self.path = path
        self._payload = payload
        self._section = payload[SECTION]
        self._others = trained_state.saved_states(self._section)
        #: This rank's part, and the same once the data are known to be as they were.
        self._own: dict[str, Any] | None = None
        self._mine: dict[str, Any] | None = None
        #: The steps done in the epoch that continues; 0 to begin that epoch.
        self._batch = 0
        self._stops = False

    @property
    def global_step(self) -> int:
        """The number of steps done."""
        return int(self._section["global_step"])

    @property
    def run_number(self) -> int:
        """During which call of ``run()`` it was saved; 0 in a file of format 2."""
        return len(self._section.get("runs", []))

    @property
    def epochs_asked(self) -> int:
        """How many epochs that call had asked for."""
        return int(self._section["runs"][-1][0])

    @property
    def stopped(self) -> str | None:
        """The callback that had ended that call, if one had."""
        found: str | None = self._section.get("stopped")
        return found

    @property
    def callbacks(self) -> list[str]:
        """The names of the callbacks."""
        return list(self._section["callbacks"])

    def ended_run(self, number: int, asked: int) -> list[int] | None:
        """The entry for the call with this number, if it had ended when this was saved.

        A call that now asks for another number of epochs is not the same: the script has changed.
        """
        if number < self.run_number and self._section["runs"][number - 1][0] == asked:
            found: list[int] = self._section["runs"][number - 1]
            return found
        return None

    def can_be_of(self, asked: int) -> bool:
        """Whether a run that asks for so many epochs comes to where this was saved."""
        epochs = self._section["epochs"]
        return bool(epochs < asked or (epochs == asked and not self._section["batch"]))

    def start(self, state: Any) -> None:
        """Puts back what the other callbacks may want to see at their start."""
        self._together(lambda: self._start(state))
        show_progress(state, self._section["epochs"], on_epoch=True)
        if collectives.is_rank_zero():
            contents.warn_of_changed_callbacks(state, self._payload)

    def _start(self, state: Any) -> None:
        rehearsal.check_schedulers(state, self._payload)
        contents.restore(state, self._payload)
        contents.restore_callbacks(state, self._payload)
        own: trained_state.States = {}
        if self._section["world_size"] == collectives.world_size():
            self._own = mine = self._own_part(state)
            self._try_part(state, mine)
            # A callback that derives a seed at its start (the order of the data, the streams of the
            # ranks) must get the same.
            generators.restore(state, mine.get("started") or mine["generators"])
            state[torchbearer.HISTORY][:] = mine["history"]
            own = mine["others"]
        trained_state.restore(state, self._others, own)

    def _try_part(self, state: Any, mine: dict[str, Any]) -> None:
        """Finds what cannot be put back later, while there is still an older file to be used."""
        rank_state.check_buffers(contents.unwrapped(state[torchbearer.MODEL]), mine["buffers"])
        rehearsal.check_metrics(state, mine["metrics"])
        epoch = mine["epoch"] or {}
        loader_state.rehearse(state, epoch.get("loader"), self._section["batch"])
        for each in (mine["generators"], epoch.get("start"), epoch.get("again")):
            if each is not None:
                generators.restore(state, each)

    def _together(self, action: Callable[[], None]) -> None:
        """Puts something back; what does not fit on one rank is an error on all."""

        def put_back() -> None:
            with contents.of_file(self.path):
                contents.fitting(action, "state")

        collectives.run_together(put_back, "continuing from a checkpoint")

    def announce(self, asked: int) -> None:
        """Says where the run continues, or that none of the epochs it asks for is left to do."""
        if self._section["epochs"] >= asked:
            announce(
                f"all {asked} epochs are done ({self.path}), nothing to train; to start anew, give "
                "another folder or remove the checkpoints there; to train on, ask for more epochs"
            )
            return
        announce(
            f"continuing from {self.path} (epochs done: {self._section['epochs']}, steps in all: "
            f"{self.global_step}); to start afresh, give another folder or remove the checkpoints "
            "there"
        )

    def stop(self, state: Any) -> None:
        """Lets the run end where it was stopped: after an epoch, or by the hooks of its middle."""
        if self._section["batch"]:
            self._stops = True
        else:
            state[torchbearer.MAX_EPOCHS] = len(state[torchbearer.HISTORY])

    def start_epoch(self, state: Any) -> None:
        """Puts back what the start of the other callbacks may have changed, and the generators."""
        self._choose_part(state)
        self._warn_of_lost_place(state)
        trained_state.warn_of_changes(state, self._others)
        if self._mine is not None and self._batch:
            start = self._mine["epoch"]["start"]
            self._put_back(state)
            self._together(lambda: generators.restore(state, start))
        else:
            self._put_back_between_epochs(state)

    def finish(self, state: Any) -> None:
        """Puts everything back where no epoch was left to do."""
        self._choose_part(state)
        self._put_back_between_epochs(state)

    def prepare_epoch(self, state: Any, trace: EpochTrace) -> None:
        """Lets the loader, which starts next, start in the middle of the epoch."""
        if self._mine is not None and self._batch:
            trace.prepare(state, self._mine["epoch"], self._mine["generators"], self._batch)

    def continue_epoch(self, state: Any, trace: EpochTrace) -> None:
        """Goes to the middle of the epoch, the loader having been started."""
        if self._mine is not None and self._batch:
            trace.continue_at(state, self._mine["epoch"], self._batch)
            self._put_back(state)
            self._put_back_metrics(state, self._mine)
            if self._stops:
                state[torchbearer.STEPS], state[torchbearer.STOP_TRAINING] = 0, True

    def _put_back(self, state: Any) -> None:
        self._together(lambda: self._put_back_here(state))

    def _put_back_here(self, state: Any) -> None:
        contents.load_model(state[torchbearer.MODEL], self._payload[contents.MODEL])
        contents.restore_callbacks(state, self._payload)
        contents.restore_schedulers(state, self._payload)
        own = self._mine["others"] if self._mine else {}
        trained_state.restore(state, self._others, own)
        # After the schedulers: one that was just made has set its first learning rate.
        contents.restore_optimizer(state, {**self._payload, **trained_state.own_optimizer(own)})
        if self._mine is not None:
            model = contents.unwrapped(state[torchbearer.MODEL])
            rank_state.restore_buffers(model, self._mine["buffers"])

    def _put_back_between_epochs(self, state: Any) -> None:
        self._put_back(state)
        if self._mine is not None:
            metrics = state[torchbearer.METRIC_LIST]
            metrics.train()
            metrics.reset(state)  # a metric may get its parts only now
            self._put_back_metrics(state, self._mine)

    def _put_back_metrics(self, state: Any, mine: dict[str, Any]) -> None:
        """The metrics, and then the generators, from which a metric may have drawn."""
        metrics = state[torchbearer.METRIC_LIST]
        changed = metric_state.changes(metrics, mine["metrics"])
        if changed and self._batch and collectives.is_rank_zero():
            warnings.warn(
                f"The metrics are not those of {self.path} ({', '.join(changed)}). The values of "
                "this epoch are of the steps that are left of it.",
                stacklevel=2,
            )

        def put_back() -> None:
            if not changed:  # they are known by their place
                metric_state.restore(metrics, mine["metrics"])
                metric_state.watch(metrics, self.path)
            elif self._batch and not state[torchbearer.STEPS]:
                raise CheckpointError(
                    f"The metrics are not those of the run that saved it ({', '.join(changed)}), "
                    "and no step of its epoch is left. Use the same metrics until the next epoch."
                )
            generators.restore(state, mine["generators"])

        self._together(put_back)

    def _own_part(self, state: Any) -> dict[str, Any]:
        part = self._section[rank_state.PARTS][collectives.rank()]
        with checked.as_error(CheckpointError, f"{self.path}: "):
            return rank_state.unpack(part, state[torchbearer.DEVICE])

    def _choose_part(self, state: Any) -> None:
        """Takes this rank's part, where the ranks and the data are as they were."""
        plan, batch = data_plan(state), self._section["batch"]
        saved = {name: self._section[name] for name in plan}
        if self._own is not None:
            saved["batch_size"] = self._own.get("batch_size", saved["batch_size"])
        changed = {
            name: (saved[name], value)
            for name, value in plan.items()
            if saved[name] != value and (batch or name == "world_size")
        }
        # Of any rank: all must go the same way from here on.
        everyone = collectives.all_gather(changed, "the conditions of a checkpoint")
        changed = next((each for each in everyone if each), {})
        if self._own is not None and not changed:
            self._mine, self._batch = self._own, batch
            self._warn_of_other_device(self._mine["generators"])
            return
        if collectives.is_rank_zero():
            listed = ", ".join(
                f"{name.replace('_', ' ')} {old} then and {new} now"
                for name, (old, new) in changed.items()
            )
            place = "the epoch begins again, and " if batch else ""
            warnings.warn(
                f"{self.path} was saved under other conditions ({listed}). Weights, optimizer, "
                f"history and callbacks carry over; {place}random numbers start anew, so the "
                "run is not bit for bit the one that would have gone on.",
                stacklevel=2,
            )

    def _warn_of_lost_place(self, state: Any) -> None:
        """Says that the iterator of an infinite loader, which is made in epoch 0, is a new one."""
        is_later = self._section["epochs"] > 0
        if state[torchbearer.INF_TRAIN_LOADING] and is_later and collectives.is_rank_zero():
            warnings.warn(
                f"{self.path} was saved after the first epoch, and does not hold the place of a "
                "loader that goes on from epoch to epoch (with_inf_train_loader()). The loader "
                "starts at its beginning, so the run is not bit for bit the one that would have "
                "gone on. Without with_inf_train_loader() it would be.",
                stacklevel=2,
            )

    def _warn_of_other_device(self, saved: dict[str, Any]) -> None:
        then = randomness.device_kinds(saved)
        now = randomness.device_kinds(randomness.rng_state())
        if then != now and collectives.is_rank_zero():
            warnings.warn(
                f"{self.path} was saved by a run on {then}, and continues on {now}. The generators "
                "of one are not those of the other, so random numbers that are drawn on the device "
                "start anew.",
                stacklevel=2,
            )
