"""Checkpoints that keep their promise: killed at any moment, resumed bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torchbearer

from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback
from torchbearer_ddp.checkpoints import contents, file, finding, folder, position, rank_state
from torchbearer_ddp.checkpoints.best import Best
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.checkpoints.resume import Resume, data_plan
from torchbearer_ddp.checkpoints.schedule import Answer, SaveSchedule
from torchbearer_ddp.checkpoints.snapshot import Snapshot
from torchbearer_ddp.checkpoints.writer import Writer, finish_writing
from torchbearer_ddp.group import collectives, stop_request
from torchbearer_ddp.group.join import versions
from torchbearer_ddp.log import announce


class Checkpoint(OrderedCallback):
    """Saves everything an exact resume needs, and continues from it when the script starts again.

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
        keep: How many of the newest ``epoch-`` and ``step-`` files stay; None for all.
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

    # At the start before everybody, so that they see the weights and the history of the run that
    # continues; after a step or an epoch behind everybody, so that what they did is in the file.
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
        _require_positive(
            every_epochs=every_epochs,
            every_steps=every_steps,
            every_seconds=every_seconds,
            keep=keep,
        )
        self._folder = Folder(Path(folder), keep, file_mode=file_mode, folder_mode=folder_mode)
        self._every_epochs = every_epochs
        self._every_steps = every_steps
        self._best = Best(monitor, mode)
        self._resume = resume
        self._background = background
        self._writer = Writer()
        self._snapshot = Snapshot(borrow=not background)
        self._schedule = SaveSchedule(every_seconds)
        self._opened = False
        self._running = False
        self._resumed: Resume | None = None
        self._trace: position.Trace | None = None
        self._epoch_steps: int | None = None
        self._cut_short = False
        self._global_step = 0
        self._saved_step = -1
        self._is_due = False
        self._serial = 0

    @property
    def global_step(self) -> int:
        """The number of training steps done, over all epochs and restarts."""
        return self._global_step

    def state_dict(self) -> dict[str, Any]:
        """The best values so far."""
        return {"best": dict(self._best.values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> Checkpoint:
        """Takes back what :meth:`state_dict` gave."""
        self._best.values = dict(state_dict.get("best", {}))
        return self

    def on_init(self, state: Any) -> None:
        """At init, where a second callback on the same folder can still be refused."""
        super().on_init(state)
        for other in state[torchbearer.CALLBACK_LIST]:
            if other is self or not isinstance(other, Checkpoint):
                continue
            if other._folder.path.resolve() == self._folder.path.resolve():
                raise ValueError(
                    f"Two Checkpoint callbacks write into {self._folder.path}: each needs a folder "
                    "of its own."
                )

    def on_start(self, state: Any) -> None:
        """Before any other callback starts: they are to see the run that continues."""
        self._running = _is_run()
        if not self._running:
            return
        if self._opened:  # another run of the same trial: it goes on with what it has
            collectives.from_rank_zero(self._open, "a checkpoint")
        else:
            self._opened = True
            path, payload = collectives.from_rank_zero(self._find, "a checkpoint")
            if payload is not None:
                self._resumed = Resume(path, payload)
                self._resumed.start(state)
                self._global_step = self._saved_step = self._resumed.global_step
        self._schedule.begin(self._global_step, writing=False)

    def on_start_epoch(self, state: Any) -> None:
        """After all have started, and before the epoch's loader is: schedulers exist by now."""
        if not self._running:
            return
        self._cut_short = False
        if self._resumed is not None:
            self._resumed.start_epoch(state)
        self._trace = position.Trace(state)

    def on_start_training(self, state: Any) -> None:
        """The loader has been started and the metrics are empty: go to the middle of the epoch."""
        self._epoch_steps = state[torchbearer.STEPS]
        if self._resumed is not None and self._trace is not None:
            self._resumed.continue_epoch(state, self._trace)
            self._resumed = None

    def on_step_training(self, state: Any) -> None:
        """Behind everybody: schedulers have stepped, and a stop is agreed."""
        self._global_step += 1
        if self._trace is not None:
            self._trace.stepped(state)
        if collectives.world_size() == 1 and stop_request.requested() is not None:
            state[torchbearer.STOP_TRAINING] = not _holds_gradients(state)  # with them, not before
        due = self._every_steps is not None and self._global_step % self._every_steps == 0
        if self._schedule.is_due(self._global_step):
            due = self._ask() or due
        self._is_due = self._is_due or due or self._is_stopped_by_signal(state)
        if self._is_due and not _holds_gradients(state):
            self.save_now(state)

    def on_end_training(self, state: Any) -> None:
        """Before everybody: an epoch that had no step left to do has its number of steps again."""
        state[torchbearer.STEPS] = self._epoch_steps

    def on_end_validation(self, state: Any) -> None:
        """Here a validation that was cut short can still be told from a whole one."""
        if self._running and state[torchbearer.STOP_TRAINING]:
            self._cut_short = state[torchbearer.BATCH] + 1 < state[torchbearer.STEPS]

    def on_checkpoint(self, state: Any) -> None:
        """The epoch is in the history, and every callback is done with it."""
        if collectives.world_size() == 1 and stop_request.requested() is not None:
            state[torchbearer.STOP_TRAINING] = True
        self._raise_write_error()
        names = self._names_for_epoch(state) if collectives.is_rank_zero() else []
        names = collectives.all_gather(names, "the checkpoints of this epoch")[0]
        if names:
            self._save(state, names, mid_epoch=False)

    def on_end(self, state: Any) -> None:
        """The run is not over before its last checkpoint stands."""
        if not self._running:
            return
        if self._resumed is not None:  # there was no epoch left to do
            self._resumed.start_epoch(state)
        self._resumed = None
        unsaved = self._saved_step != self._global_step
        epoch_is_open = len(state[torchbearer.HISTORY]) == state[torchbearer.EPOCH]
        if unsaved and epoch_is_open and self._is_stopped_by_signal(state):
            self.save_now(state)  # a signal with the last step of an epoch, before validation
        if collectives.is_rank_zero():
            self._writer.wait()
        self._raise_write_error()
        self._running = False
        self._folder.close()
        if collectives.world_size() == 1:
            stop_request.stop_polling()

    def save_now(self, state: Any) -> None:
        """Saves after a training step, whatever the schedule says; every rank must call it.

        To be called in ``on_step_training``, and not between batches whose gradients are added up.

        Args:
            state: The state of the running Trial.
        """
        self._save(state, [folder.step_name(self._global_step)], mid_epoch=True)

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
            lambda: finding.read_any(Path(path), trust=trust), "a checkpoint"
        )
        contents.restore(trial.state, payload)
        if "callbacks" in payload.get(SECTION, {}):
            if collectives.is_rank_zero():
                contents.warn_of_changed_callbacks(trial.state, payload)
            contents.restore_callbacks(trial.state, payload)
        return trial

    # Finding, on rank zero.

    def _open(self) -> None:
        finish_writing()  # a run of this process that failed may still be at it
        self._folder.open()
        self._serial = self._folder.next_serial()

    def _find(self) -> tuple[str, Any]:
        self._open()
        return finding.find(self._folder, self._resume)

    # Saving.

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
        if self._every_epochs is not None and (epochs % self._every_epochs == 0 or ends):
            return [folder.epoch_name(epochs), *best]
        return best

    def _save(self, state: Any, names: list[str], *, mid_epoch: bool) -> None:
        """Every rank gives its part, rank zero copies the rest; the writing may come later."""
        mine: dict[str, Any] = {}
        payload: dict[str, Any] = {}
        error: Exception | None = None
        try:
            if collectives.is_rank_zero():
                self._writer.wait()  # its copies are written over now
                if (failure := self._writer.take_error()) is not None:
                    raise failure
                payload = contents.collect(state, self._snapshot)
            mine = rank_state.collect(state, mid_epoch=mid_epoch)
            if mid_epoch and self._trace is not None:
                mine["epoch"] = self._trace.collect(state)
        except Exception as caught:
            error = caught
        collectives.raise_together(error, "saving a checkpoint")
        ranks = collectives.all_gather(mine, "every rank's part of a checkpoint")
        own, averaged = rank_state.differing_buffers(contents.unwrapped(state[torchbearer.MODEL]))
        if collectives.is_rank_zero():
            payload[contents.MODEL].update(averaged)
            payload[SECTION].update(self._describe(state, mid_epoch=mid_epoch))
            payload[SECTION]["ranks"] = [
                {**rank, "buffers": buffers} for rank, buffers in zip(ranks, own, strict=True)
            ]
            label = file.Label(self._serial, payload[SECTION]["epochs"], self._global_step)
            self._serial += 1
            self._writer.start(lambda: self._write(payload, names, label))
        self._saved_step = self._global_step
        self._is_due = False
        self._schedule.begin(self._global_step, writing=self._background)
        if not self._background:
            if collectives.is_rank_zero():
                self._writer.wait()
            self._raise_write_error()
            if collectives.is_rank_zero():  # nobody need wait for that
                self._writer.start(self._folder.remove_old)

    def _write(self, payload: dict[str, Any], names: list[str], label: file.Label) -> None:
        self._folder.put(payload, names, label)
        if self._background:
            self._folder.remove_old()  # only now: the new one stands

    def _describe(self, state: Any, *, mid_epoch: bool) -> dict[str, Any]:
        epochs = len(state[torchbearer.HISTORY])
        batch = state[torchbearer.BATCH] + 1 if mid_epoch else 0
        return {
            "format": finding.FORMAT,
            "epochs": epochs,
            "batch": batch,
            "global_step": self._global_step,
            "sampler": {"epoch": epochs, "position": batch},
            **data_plan(state),
            "versions": {"python": sys.version.split()[0], **versions()},
        }

    def _ask(self) -> bool:
        """Asks rank zero whether a save is due; raises on all ranks if a write has failed."""
        answer = None
        if collectives.is_rank_zero():
            busy, failed = self._writer.busy, self._writer.has_failed
            answer = asdict(self._schedule.answer(self._global_step, busy=busy, failed=failed))
        said = Answer(**collectives.all_gather(answer, "the checkpoint's clock")[0])
        self._schedule.heard(said)
        if said.failed:
            self._raise_write_error()
        return said.save

    def _raise_write_error(self) -> None:
        error = self._writer.take_error() if collectives.is_rank_zero() else None
        collectives.raise_together(error, "writing a checkpoint")

    def _is_stopped_by_signal(self, state: Any) -> bool:
        """Asked only where all ranks leave the loop at this step, so that all of them ask."""
        if not state[torchbearer.STOP_TRAINING]:
            return False
        return collectives.any_rank(stop_request.received() is not None, "a stop by a signal")


def _require_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}: give a number above 0, or None.")


def _holds_gradients(state: Any) -> bool:
    """True between batches that make one step: their gradients would not be in the file."""
    callbacks = state[torchbearer.CALLBACK_LIST]
    return any(getattr(callback, "holds_gradients", False) for callback in callbacks)


def _is_run() -> bool:
    """True within ``Trial.run``; ``on_start`` is called by ``evaluate`` and ``predict`` as well.

    The state does not tell them apart: after one call it holds what that call has left there.
    """
    frame = sys._getframe()
    run = torchbearer.Trial.run.root.__code__
    while frame.f_back is not None and frame.f_code is not run:
        frame = frame.f_back
    return frame.f_code is run
