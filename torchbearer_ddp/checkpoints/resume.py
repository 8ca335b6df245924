"""Continuing from a checkpoint, in steps that fit the order in which a run starts.

At ``on_start`` the weights and the history, so that every callback sees the run that continues. At
the first ``on_start_epoch``, when all have started, what their start may have changed: a scheduler
that was just made sets its first learning rate, for one. In mid-epoch once more when the loader has
been brought to its place, since the hooks at the start of that epoch have run a second time.

A loader cannot start in the middle, so it is started over: with the generators as they were when it
was first started, the batches that were trained on already are drawn again and dropped. Worker
processes, shuffled orders and data sets with a memory are then in the state that they were in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torchbearer
from torchbearer.callbacks import Tqdm

from torchbearer_ddp.checkpoints import (
    contents,
    generators,
    metric_state,
    rank_state,
    trained_state,
)
from torchbearer_ddp.checkpoints.contents import SECTION
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


class EpochTrace:
    """The generators at the start of the epoch, and where torchbearer last started the loader over.

    It does so within an epoch that has more steps than the loader has batches; then a new order is
    drawn, in between the draws of training. To be made before the loader is started.
    """

    def __init__(self, state: Any) -> None:
        self._start = generators.collect(state)
        self._again_at = 0
        self._again: dict[str, Any] | None = None

    def stepped(self, state: Any) -> None:
        """Notes the generators if the loader is at its end after this step, and not the epoch."""
        generator, done = state[torchbearer.GENERATOR], state[torchbearer.BATCH] + 1
        if generator is None or state[torchbearer.STEPS] == done:
            return
        if done % max(1, len(generator)) == 0:
            self._again_at, self._again = done, generators.collect(state)

    def collect(self, state: Any) -> dict[str, Any]:
        """Plain data for :meth:`replay`, after a step."""
        return {
            "start": self._start,
            "again_at": self._again_at,
            "again": self._again,
            "values": metric_state.collect_values(state[torchbearer.METRICS]),
        }

    def replay(self, state: Any, saved: dict[str, Any], done: int) -> None:
        """Brings the loader to its place after ``done`` steps, and the loop to the step after.

        For ``on_start_training``, the loader having been started with the generators at the start
        of this trace.
        """
        sampler, steps = state[torchbearer.SAMPLER], state[torchbearer.STEPS]
        self._again_at, self._again = saved["again_at"], saved["again"]
        for state[torchbearer.BATCH] in range(done):
            if self._again is not None and state[torchbearer.BATCH] == self._again_at:
                generators.restore(state, self._again)
            sampler(state)
        state[torchbearer.METRICS] = saved["values"]
        state[torchbearer.SAMPLER] = _resumed(sampler, done, steps)
        if steps != -1:
            state[torchbearer.STEPS] = steps - done
        _show_progress(state, done, on_epoch=False)


def _resumed(sampler: Any, done: int, steps: int) -> Callable[[Any], None]:
    """Makes torchbearer's loop, which counts from 0, count from the batch where it continues.

    torchbearer calls the sampler right after it has set the number of the batch, before any
    callback can see the smaller number.
    """

    def sample(state: Any) -> None:
        state[torchbearer.STEPS] = steps
        state[torchbearer.BATCH] += done
        sampler(state)

    return sample


def _show_progress(state: Any, done: int, *, on_epoch: bool) -> None:
    """Moves torchbearer's progress bars, of epochs or of steps, to where the run continues."""
    callbacks = state[torchbearer.CALLBACK_LIST]
    # torchbearer's own printer is not in the list but in front of it.
    for printer in [getattr(callbacks, "callback", None), *callbacks]:
        if isinstance(printer, Tqdm) and printer._on_epoch == on_epoch and printer._loader:
            samples = getattr(printer, "samples", None)  # on several ranks the bar counts these
            printer._loader.initial = printer._loader.n = samples.after(done) if samples else done
            printer._loader.refresh()


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
        _show_progress(state, self._section["epochs"], on_epoch=True)
        if collectives.is_rank_zero():
            contents.warn_of_changed_callbacks(state, self._payload)

    def _start(self, state: Any) -> None:
        contents.restore(state, self._payload)
        contents.restore_callbacks(state, self._payload)
        own: trained_state.States = {}
        if self._section["world_size"] == collectives.world_size():
            # A callback that derives a seed at its start (the order of the data, the streams of the
            # ranks) must get the same.
            mine = self._own_part(state)
            generators.restore(state, mine.get("started") or mine["generators"])
            state[torchbearer.HISTORY][:] = mine["history"]
            own = mine["others"]
        trained_state.restore(state, self._others, own)

    def _together(self, action: Callable[[], None]) -> None:
        """Puts something back; what does not fit on one rank is an error on all."""
        error: Exception | None = None
        try:
            action()
        except CheckpointError as caught:
            error = CheckpointError(f"{self.path}: {caught}")
        except Exception as caught:  # of a callback's load_state_dict, say
            error = caught
        collectives.raise_together(error, "continuing from a checkpoint")

    def announce(self) -> None:
        """Says where the run continues."""
        announce(
            f"continuing from {self.path} ({self._section['epochs']} epochs and "
            f"{self.global_step} steps done); to start afresh, give another folder or remove the "
            "checkpoints there"
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
        trained_state.warn_of_changes(state, self._others)
        if self._mine is not None and self._batch:
            self._put_back(state)
            generators.restore(state, self._mine["epoch"]["start"])
        else:
            self._put_back_between_epochs(state)

    def finish(self, state: Any) -> None:
        """Puts everything back where no epoch was left to do."""
        self._choose_part(state)
        self._put_back_between_epochs(state)

    def continue_epoch(self, state: Any, trace: EpochTrace) -> None:
        """Goes to the middle of the epoch, the loader having been started."""
        if self._mine is not None and self._batch:
            trace.replay(state, self._mine["epoch"], self._batch)
            self._put_back(state)
            self._put_back_metrics(state, self._mine)
            if self._stops:
                state[torchbearer.STEPS], state[torchbearer.STOP_TRAINING] = 0, True

    def _put_back(self, state: Any) -> None:
        self._together(lambda: self._put_back_here(state))

    def _put_back_here(self, state: Any) -> None:
        contents.restore_callbacks(state, self._payload)
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
        metric_state.restore(state[torchbearer.METRIC_LIST], mine["metrics"])
        generators.restore(state, mine["generators"])

    def _own_part(self, state: Any) -> dict[str, Any]:
        part = self._section[rank_state.PARTS][collectives.rank()]
        return rank_state.unpack(part, state[torchbearer.DEVICE])

    def _choose_part(self, state: Any) -> None:
        """Takes this rank's part, where the ranks and the data are as they were."""
        plan, batch = data_plan(state), self._section["batch"]
        saved = {name: self._section[name] for name in plan}
        if saved["world_size"] == plan["world_size"]:
            saved["batch_size"] = self._own_part(state).get("batch_size", saved["batch_size"])
        changed = {
            name: (saved[name], value)
            for name, value in plan.items()
            if saved[name] != value and (batch or name == "world_size")
        }
        # Of any rank: all must go the same way from here on.
        everyone = collectives.all_gather(changed, "the conditions of a checkpoint")
        changed = next((each for each in everyone if each), {})
        if not changed:
            self._mine, self._batch = self._own_part(state), batch
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
