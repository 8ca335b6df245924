"""The calls of ``run()`` in a script: where a restarted script continues, and what was over.

A script that is started again makes all of its calls again. Those that had ended when the newest
checkpoint was saved train nothing: each is given the state at its own end, so that what the script
does next (evaluate, change a learning rate) finds what it found then. The call during which the
checkpoint was saved continues from it; later calls go on with what the trial has.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torchbearer
from torchbearer.callbacks import EarlyStopping

from torchbearer_ddp.checkpoints import contents, generators, rank_state, source
from torchbearer_ddp.checkpoints.epoch_trace import EpochTrace
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.checkpoints.resume import Resume
from torchbearer_ddp.data import randomness
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import collectives
from torchbearer_ddp.log import announce

_A_CALLBACK = "a callback"
#: How many older checkpoints are tried where the newest cannot be put back.
_OLDER_TRIED = 3


class Runs:
    """The calls of ``run()`` of one trial, in this process.

    Args:
        folder: The checkpoints; only rank zero reads it.

    Attributes:
        log: For each call: the epochs it asked for, and the epochs and steps done at its end (of
            the call in progress: at its start).
        started: The generators at the start of the call, before any callback drew from them.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.log: list[list[int]] = []
        self.started: dict[str, Any] = {}
        #: True from the start of a call until its end, which one that fails does not have.
        self._is_open = False
        #: The newest checkpoint, until the call has come that continues from it.
        self._pending: Resume | None = None
        #: What the call in progress continues from, until it is where the checkpoint was saved.
        self._current: Resume | None = None

    def begin_first(self, state: Any, find: Callable[[], tuple[str, Any]], resume: Any) -> int:
        """Begins the first call, from the newest checkpoint that can be put back.

        ``find`` gives the path and the contents of the newest on rank zero, and ``resume`` is what
        :class:`~torchbearer_ddp.Checkpoint` was given: if that is a path, no other file is used.
        """
        refused: list[tuple[str, CheckpointError]] = []
        self._pending = None  # of an earlier call that was refused
        while True:
            try:
                path, payload = rank_state.sent_by_rank_zero(find, "a checkpoint")
            except CheckpointError:
                if refused:  # each rank has its own
                    raise refused[0][1] from None
                raise
            if payload is not None:
                self._pending = Resume(path, payload)
            try:
                step = self.begin(state, 0)
                break
            except CheckpointError as error:  # on all ranks
                if not (isinstance(resume, bool) or resume == "auto"):
                    raise
                refused.append((path, error))
                find = partial(self._find_older, refused)
        if collectives.is_rank_zero():
            for _, problem in refused:
                warnings.warn(f"{problem} Instead, {path} is used.", stacklevel=2)
        return step

    def _find_older(self, refused: list[tuple[str, CheckpointError]]) -> tuple[str, Any]:
        """The newest checkpoint that was not refused; without one, raises the first refusal."""
        self._folder.pass_over(Path(refused[-1][0]))
        if len(refused) <= _OLDER_TRIED:
            with contextlib.suppress(CheckpointError):  # none of the others is whole
                path, payload = source.find(self._folder, "auto")
                if payload is not None:
                    return path, payload
        raise refused[0][1]

    def begin(self, state: Any, global_step: int) -> int:
        """Begins a call, and returns the number of steps done: in this process, or before it."""
        self._current = None
        if self._is_open:  # the call before failed: this one goes on with what it left
            self.log.pop()
        self._is_open = True
        self.log.append([int(state[torchbearer.MAX_EPOCHS]), _epochs(state), global_step])
        if (pending := self._pending) is not None:
            ended = pending.ended_run(len(self.log), self.log[-1][0])
            if ended is None:
                self._continue(state, pending)
            else:
                self._pass_over(state, pending, ended)
            global_step = (self._current or pending).global_step
        self.started = generators.collect(state)
        return global_step

    def _continue(self, state: Any, pending: Resume) -> None:
        self._current = pending
        pending.start(state)
        pending.announce(self.log[-1][0])
        self.log[-1][1:] = [_epochs(state), pending.global_step]
        # Only rank zero may have the callback that stopped it.
        if pending.stopped and collectives.from_rank_zero(
            lambda: _is_still_stopped(state, pending), "whether the run was over"
        ):
            asked = state[torchbearer.MAX_EPOCHS]
            patience = "" if pending.stopped == _A_CALLBACK else "raise its patience, "
            announce(
                f"the run was stopped by {pending.stopped} after {_epochs(state)} of {asked} "
                f"epochs, so there is nothing to train; to train on, {patience}remove it, or ask "
                f"for more than {asked} epochs"
            )
            pending.stop(state)

    def _pass_over(self, state: Any, pending: Resume, ended: list[int]) -> None:
        """Brings the trial to the end of a call that had ended when the checkpoint was saved."""
        number, self.log[-1] = len(self.log), list(ended)
        if number == 1:
            announce(
                f"{pending.path} was saved in run() number {pending.run_number} of this script: "
                "the epochs of the calls before it are not trained again"
            )
        _, epochs, step = ended
        path, payload = rank_state.sent_by_rank_zero(
            lambda: self._folder.find_end_of_run(number, epochs, step), "the end of an earlier run"
        )
        if payload is not None:
            self._current = Resume(path, payload)
            self._current.start(state)
            self._current.stop(state)
        else:
            if collectives.is_rank_zero():
                warnings.warn(
                    f"The checkpoint at the end of run() number {number} is gone. Until the call "
                    f"that continues from {pending.path}, the script sees the weights of that "
                    "file, not those of that time. With a larger keep, or None, more files stay.",
                    stacklevel=2,
                )
            # The order of the data comes from the seed in force at the first call; that of a later
            # call, which is in this file, is another one. The model may only get its parts later.
            with contextlib.suppress(CheckpointError), randomness.preserved():
                pending.start(state)
            del state[torchbearer.HISTORY][epochs:]
            state[torchbearer.MAX_EPOCHS] = epochs  # none is left to do

    def start_epoch(self, state: Any) -> EpochTrace:
        """For ``on_start_epoch``, before the loader is started."""
        if self._current is not None:
            self._current.start_epoch(state)
        trace = EpochTrace(state)
        if self._current is not None:
            self._current.prepare_epoch(state, trace)
        return trace

    def continue_epoch(self, state: Any, trace: EpochTrace) -> None:
        """For ``on_start_training``: from here on the run is where the checkpoint was saved."""
        trace.started()
        if self._current is not None:
            self._current.continue_epoch(state, trace)
            self._reached()

    def end(self, state: Any, global_step: int) -> None:
        """Ends a call; where no epoch was left to do, all is as at the checkpoint."""
        if self._current is not None:
            self._current.finish(state)
            self._reached()
        self.log[-1][1:] = [_epochs(state), global_step]
        self._is_open = False

    def _reached(self) -> None:
        """The call is where its checkpoint was saved; one that asked for less leaves it pending."""
        current, self._current = self._current, None
        if current is not None and current.can_be_of(self.log[-1][0]) and current is self._pending:
            self._pending = None


def stopped_by(state: Any, *, mid_epoch: bool, by_signal: bool) -> str | None:
    """Which callback has ended the run; None for one that goes on, or does after a restart."""
    if not state[torchbearer.STOP_TRAINING]:
        return None
    for name, callback in contents.named_callbacks(state[torchbearer.CALLBACK_LIST]).items():
        # One that asks at the end of an epoch has not asked in the middle of the next.
        if _has_no_patience(callback) and _inner(callback).step_on_batch == mid_epoch:
            return name
    return None if by_signal else _A_CALLBACK


def _is_still_stopped(state: Any, resume: Resume) -> bool:
    """Whether the user left everything as it was when the run was stopped."""
    callbacks = contents.named_callbacks(state[torchbearer.CALLBACK_LIST])
    if state[torchbearer.MAX_EPOCHS] != resume.epochs_asked:
        return False
    if resume.stopped == _A_CALLBACK:
        return all(name in callbacks for name in resume.callbacks)
    return resume.stopped in callbacks and _has_no_patience(callbacks[resume.stopped])


def _has_no_patience(callback: Any) -> bool:
    inner = _inner(callback)
    return isinstance(inner, EarlyStopping) and inner.wait >= inner.patience


def _inner(callback: Any) -> Any:
    """What is inside RankZeroOnly, or the callback itself."""
    return getattr(callback, "callback", callback)


def _epochs(state: Any) -> int:
    return len(state[torchbearer.HISTORY])
