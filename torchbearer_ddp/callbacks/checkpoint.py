"""Checkpoints: a run that is killed at any moment continues bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torchbearer

from torchbearer_ddp import checked
from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback, of_kind
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.checkpoints import folder, source
from torchbearer_ddp.checkpoints.best import Best
from torchbearer_ddp.checkpoints.epoch_trace import EpochTrace
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.checkpoints.resume import load_into
from torchbearer_ddp.checkpoints.runs import Runs
from torchbearer_ddp.checkpoints.save import Moment, Saver
from torchbearer_ddp.checkpoints.schedule import SaveSchedule, require_positive
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import collectives, launcher, stop_request
from torchbearer_ddp.log import announce

_BEST = checked.table(checked.number)


class Checkpoint(OrderedCallback):
    """Saves everything an exact resume needs, and continues from it when the script starts again.

    Besides the model and the optimizer these are all modules, optimizers and schedulers in the
    state and on callbacks, the random generators of each rank, and the place in the epoch and in
    the script.

    Rank zero writes; the file appears under its name only when it is whole. The folder holds
    ``epoch-0007.pt`` (after 7 epochs), ``step-0001234.pt`` (after 1234 steps), ``best-val_loss.pt``
    and ``latest``, which points to the newest of them.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import Checkpoint
        >>> trial = Trial(None, callbacks=[Checkpoint('runs/a', every_seconds=600)])

    Args:
        folder: Where the checkpoints of this run are, and of no other.
        every_epochs: Save after every so many epochs, and after the last; None for not at all.
        every_steps: Save after every so many steps, counted over all epochs.
        every_seconds: Save when so much time has passed since the last save.
        keep: How many of the newest ``epoch-`` and ``step-`` files stay, and of those at the ends
            of earlier calls of ``run()``; None for all.
        monitor: The metric, or metrics, by which the best epoch is kept as well; None for none.
        mode: ``min``, ``max``, or ``auto``, which takes ``max`` for names that contain ``acc`` or
            ``auc``; a dict gives each monitor its own.
        resume: ``'auto'`` continues from the newest whole checkpoint, if there is one; True demands
            one; False demands an empty folder; a path continues from that file.
        background: Write while training goes on. The state is copied first, in memory that is kept
            for the next save.
        file_mode: The permissions of the files.
        folder_mode: The permissions of the folder, if it is made.

    State Requirements:
        - :attr:`torchbearer.state.MODEL`: The model to save
        - :attr:`torchbearer.state.OPTIMIZER`: The optimizer to save
        - :attr:`torchbearer.state.HISTORY`: The epochs done so far
        - :attr:`torchbearer.state.CALLBACK_LIST`: The callbacks whose state is saved
        - :attr:`torchbearer.state.METRIC_LIST`: The metrics whose state is saved
    """

    # At the start before all others, so that they see the weights and the history of the run that
    # continues; after a step or an epoch after all others, so that what they did is in the file.
    order: ClassVar = {
        "on_start": FIRST - 2,
        "on_start_epoch": FIRST - 1,
        "on_start_training": LAST + 10,
        "on_step_training": LAST + 10,
        "on_end_training": FIRST - 1,
        "on_end_validation": FIRST - 1,
        "on_checkpoint": LAST + 10,
        "on_end": FIRST - 1,
    }

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int | None = 3,
        monitor: str | Sequence[str] | None = "val_loss",
        mode: str | Mapping[str, str] = "auto",
        resume: bool | str | os.PathLike[str] = "auto",
        background: bool = True,
        file_mode: int = 0o600,
        folder_mode: int = 0o700,
    ) -> None:
        super().__init__()
        require_positive(keep=keep)
        self._folder = Folder(Path(folder), keep, file_mode, folder_mode)
        self._saver = Saver(self._folder, background=background)
        self._schedule = SaveSchedule(every_epochs, every_steps, every_seconds)
        self._best = Best(monitor, mode)
        self._resume = resume
        #: The state of the run in progress: evaluate() and predict() have one of their own.
        self._run_state: Any = None
        self._opened = False
        self._runs = Runs(self._folder)
        self._trace: EpochTrace | None = None
        self._gradients: SyncGradients | None = None
        self._wish = 0
        self._epoch_steps: int | None = None
        self._cut_short = False
        self._global_step = 0
        self._is_due = False

    @property
    def global_step(self) -> int:
        """The number of training steps done, over all epochs and restarts."""
        return self._global_step

    def state_dict(self) -> dict[str, Any]:
        """The best values so far."""
        return {"best": dict(self._best.values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> Checkpoint:
        """Takes back what :meth:`state_dict` gave."""
        self._best.values = dict(_BEST(state_dict.get("best", {}), "the best values so far"))
        return self

    def on_init(self, state: Any) -> None:
        """At init, where a second Checkpoint can still be refused."""
        super().on_init(state)
        callbacks = of_kind(state, Checkpoint)
        if len(callbacks) > 1:  # a resume would mix what they saved
            folders = " and ".join(str(each._folder.path) for each in callbacks)
            raise ValueError(
                f"Two Checkpoint callbacks write into {folders}, but a run continues from one. "
                "Keep one of them: it can save by epochs, steps, time and several monitors."
            )

    def on_start(self, state: Any) -> None:
        """Before any other callback starts: they are to see the run that continues."""
        is_run = not _has_chosen_data(state)
        _forget_chosen_data(state)
        if not is_run:
            return
        self._run_state = state
        stop_request.current().resumable = True
        self._find_gradients(state)
        if self._opened:  # another run of the same trial: it goes on with what it has
            collectives.from_rank_zero(self._saver.open, "a checkpoint")
            step = self._runs.begin(state, self._global_step)
        else:
            # An attempt of the same launch has saved: what was asked for was done there.
            resume = "auto" if launcher.is_restarted() else self._resume
            step = self._runs.begin_first(state, partial(self._find, resume), resume)
            self._opened = True  # not before: a run after one that was refused asks again
        if step != self._global_step:  # of a checkpoint
            self._global_step = self._schedule.saved_step = step
        self._schedule.restart_clock()

    def on_start_epoch(self, state: Any) -> None:
        """After all have started, and before the epoch's loader is: schedulers exist by now."""
        if state is not self._run_state:
            return
        self._cut_short = False
        self._trace = self._runs.start_epoch(state)

    def leave(self) -> None:
        """A run that fails in its start leaves the loader as it was."""
        if self._trace is not None:
            self._trace.leave()

    def on_start_training(self, state: Any) -> None:
        """The loader has been started and the metrics are empty: go to the middle of the epoch."""
        if state is not self._run_state:
            raise CheckpointError(
                "This run cannot be told from an evaluation, since the one before it failed while "
                "the loader was being started. Make a new Trial for it."
            )
        _forget_chosen_data(state)
        self._epoch_steps = state[torchbearer.STEPS]
        if self._trace is not None:
            self._runs.continue_epoch(state, self._trace)

    def on_step_training(self, state: Any) -> None:
        """After all others: schedulers have stepped, and a stop is agreed."""
        self._global_step += 1
        if self._trace is not None:
            self._trace.stepped(state)
        gradients = self._gradients
        holds_gradients = gradients is not None and gradients.accumulation.holds_gradients
        if collectives.world_size() == 1 and stop_request.requested() is not None:
            state[torchbearer.STOP_TRAINING] = not holds_gradients  # with them, not before
        due = self._is_due or self._schedule.is_due_at_step(self._global_step)
        self._is_due = self._is_wished() or due or self._is_stopped_by_signal(state)
        if self._is_due and not holds_gradients:  # held gradients would not be in the file
            self._save_step(state)

    def on_end_training(self, state: Any) -> None:
        """Before all others: an epoch that had no step left to do has its number of steps again."""
        state[torchbearer.STEPS] = self._epoch_steps

    def on_start_validation(self, state: Any) -> None:
        """The earliest hook after torchbearer has chosen the data of a validation."""
        _forget_chosen_data(state)

    def on_end_validation(self, state: Any) -> None:
        """The last hook where a validation that was cut short differs from a whole one."""
        if state is self._run_state and state[torchbearer.STOP_TRAINING]:
            self._cut_short = state[torchbearer.BATCH] + 1 < state[torchbearer.STEPS]

    def on_checkpoint(self, state: Any) -> None:
        """The epoch is in the history, and every callback is done with it."""
        if collectives.world_size() == 1 and stop_request.requested() is not None:
            state[torchbearer.STOP_TRAINING] = True
        if self._gradients is not None and state[torchbearer.STOP_TRAINING]:  # agreed by now
            self._cut_short = collectives.any_rank(self._cut_short, "a validation cut short")
        self._save(state, lambda: self._names_for_epoch(state), None)

    def on_end(self, state: Any) -> None:
        """The run is not over before its last checkpoint is written."""
        if state is not self._run_state:
            return
        unsaved = self._schedule.saved_step != self._global_step
        epoch_is_open = len(state[torchbearer.HISTORY]) == state[torchbearer.EPOCH]
        if unsaved and epoch_is_open and self._is_stopped_by_signal(state):
            self._save_step(state)  # a signal with the last step of an epoch, before validation
        self._saver.finish()
        self._saver.close()
        self._runs.end(state, self._global_step)
        self._run_state = None
        if collectives.world_size() == 1:
            stop_request.stop_polling()

    def save_now(self, state: Any) -> None:
        """Asks to save at the end of this training step; every rank must call it.

        To be called in ``on_step_training``. The file is written once all callbacks are done with
        the step, and with ``accumulate`` at the next step of the optimizer.

        Args:
            state: The state of the running Trial.
        """
        self._is_due = True

    def _save_step(self, state: Any) -> None:
        self._save(state, lambda: [folder.step_name(self._global_step)], self._trace)

    @staticmethod
    def load(
        trial: torchbearer.Trial, path: str | os.PathLike[str], trust: bool = False
    ) -> torchbearer.Trial:
        """Loads a file into a trial: model, optimizer, history, and callbacks by name.

        Takes our own files, plain ``state_dict`` files and, with ``trust``, what torchbearer's own
        checkpointers wrote. Only rank zero needs to see the file; every rank must call this.

        Args:
            trial: The trial to load into.
            path: The file.
            trust: Also load a file that can run code when it is loaded.

        Raises:
            CheckpointError: If it cannot be read, needs ``trust``, or is of another model.
        """
        payload = collectives.from_rank_zero(
            lambda: source.read_any(Path(path), trust=trust), "a checkpoint"
        )
        collectives.run_together(
            lambda: load_into(trial.state, payload, path), "loading a checkpoint"
        )
        return trial

    def _find_gradients(self, state: Any) -> None:
        """Lets the gradient header carry rank zero's wish to save."""
        found = of_kind(state, SyncGradients)
        if found and found[0] is not self._gradients:
            self._gradients = found[0]
            self._wish = found[0].register_wish(self._wishes_to_save)

    def _find(self, resume: Any) -> tuple[str, Any]:
        self._saver.open()
        return source.find(self._folder, resume)

    def _wishes_to_save(self) -> bool:
        """By rank zero's clock, or because a write has failed: the save then raises its error."""
        if self._run_state is None or not collectives.is_rank_zero():
            return False
        return self._schedule.is_due_by_clock() or self._saver.has_failed

    def _is_wished(self) -> bool:
        """What rank zero wishes, on all ranks alike."""
        if collectives.world_size() == 1:
            return self._wishes_to_save()
        if self._gradients is not None:
            return self._gradients.granted(self._wish)
        if self._schedule.every_seconds is None:
            return False
        return collectives.any_rank(self._wishes_to_save(), "the checkpoint's clock")

    def _is_stopped_by_signal(self, state: Any) -> bool:
        """The same on all ranks, if STOP_TRAINING is."""
        if not state[torchbearer.STOP_TRAINING]:
            return False
        if self._gradients is not None and collectives.world_size() > 1:
            return self._gradients.stop_signal > 0
        return collectives.any_rank(stop_request.received() is not None, "a stop by a signal")

    def _names_for_epoch(self, state: Any) -> list[str]:
        if self._cut_short:
            announce(
                "validation was cut short, so this epoch is not saved; the run continues from the "
                "checkpoint before"
            )
            return []
        epochs = len(state[torchbearer.HISTORY])
        ends = epochs >= state[torchbearer.MAX_EPOCHS] or state[torchbearer.STOP_TRAINING]
        best = [folder.best_name(name) for name in self._best.update(state[torchbearer.METRICS])]
        if self._schedule.is_due_after_epochs(epochs, ends=ends):
            return [folder.epoch_name(epochs), *best]
        return best

    def _save(
        self, state: Any, choose_names: Callable[[], list[str]], trace: EpochTrace | None
    ) -> None:
        has_local_parts = self._gradients is not None and self._gradients.has_local_parts
        moment = Moment(state, self._global_step, trace, self._runs, has_local_parts)
        if self._saver.save(moment, choose_names):
            self._schedule.saved(self._global_step)
            self._is_due = False


# Of run, evaluate and predict, which all call on_start, the last two choose their data before, and
# only call it if there are any. The choice stays in the Trial's state, also when a pass of a run
# made it, so it is removed as soon as a pass has begun: the pass has its own copy.
def _has_chosen_data(state: Any) -> bool:
    """True at ``on_start`` of evaluate and predict, False at that of run."""
    return any(state.get(key) is not None for key in (torchbearer.GENERATOR, torchbearer.STEPS))


def _forget_chosen_data(state: Any) -> None:
    trial = state[torchbearer.SELF].state
    trial[torchbearer.GENERATOR] = trial[torchbearer.STEPS] = None
