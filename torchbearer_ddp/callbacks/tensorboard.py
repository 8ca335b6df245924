"""Write curves for TensorBoard on rank zero, over a global step that a resumed run continues."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torchbearer
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, TaggedRunMetadata
from tensorboardX.proto.summary_pb2 import Summary
from torchbearer.callbacks import Callback

from torchbearer_ddp.callbacks.event_file import EventFile
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.rank_times import RankTimes
from torchbearer_ddp.checkpoints import contents
from torchbearer_ddp.data import randomness
from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.gradients.timing import Timing
from torchbearer_ddp.group import collectives

_GLOBAL_STEP = "global_step"


class TensorBoard(Callback):  # type: ignore[misc]
    """Writes metrics, learning rates, speed and the parts of the step time for TensorBoard.

    Rank zero writes, the other ranks only count steps: no :class:`.RankZeroOnly` is needed. The
    x-axis is the global step, the number of training steps since the first epoch. A resumed run
    continues at its step, and TensorBoard hides what the interrupted run wrote after that step.

    If the folder cannot be written to, or the disk is full, there is one warning and training
    continues.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import TensorBoard, data_parallel
        >>> trial = Trial(None, callbacks=[*data_parallel(), TensorBoard('runs/a')])

    Args:
        log_dir: The folder of this run; TensorBoard shows one run per folder.
        write_graph: True to write the model's graph (which needs the ``tensorboard`` package).
        write_summary: True to write the Trial's description as text.
        write_batch_metrics: True to write rank zero's metrics of single steps.
        write_epoch_metrics: True to write the metrics of each epoch, pooled over all ranks if
            :class:`.SyncMetrics` is in the list.
        batch_step_size: The number of steps between points of batch metrics, learning rates, speed
            and times.

    State Requirements:
        - :attr:`torchbearer.state.METRICS`: The metrics to write
        - :attr:`torchbearer.state.OPTIMIZER`: Its learning rates are written
        - :attr:`torchbearer.state.X`: Its first dimension is the batch size
        - :attr:`torchbearer.state.MODEL`: The model whose graph is written
        - :attr:`torchbearer.state.HISTORY`: The steps of epochs that this callback has not seen
        - :attr:`torchbearer.state.SELF`: The Trial to describe
        - :attr:`torchbearer.state.FINAL_PREDICTIONS`: Distinguishes ``predict`` from ``evaluate``
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "./logs",
        *,
        write_graph: bool = True,
        write_summary: bool = True,
        write_batch_metrics: bool = True,
        write_epoch_metrics: bool = True,
        batch_step_size: int = 10,
    ) -> None:
        super().__init__()
        if batch_step_size < 1:
            raise ValueError(f"batch_step_size is {batch_step_size}: write every 1 step or more.")
        self.log_dir = Path(log_dir)
        self._write_graph = write_graph
        self._write_summary = write_summary
        self._write_batch_metrics = write_batch_metrics
        self._write_epoch_metrics = write_epoch_metrics
        self._batch_step_size = batch_step_size
        self._step = 0
        #: The state of the run in progress; an evaluation inside of it has its own.
        self._run_state: Any = None
        self._file = EventFile(self.log_dir)
        self._unwritten: set[str] = set()
        self._speed = _Speed()

    def state_dict(self) -> dict[str, Any]:
        """The global step: the same on every rank, so any rank's checkpoint has it."""
        return {_GLOBAL_STEP: self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> TensorBoard:
        """Continues at that step; TensorBoard hides what the folder holds after it.

        Args:
            state_dict: What :meth:`state_dict` returned.
        """
        self._step = int(state_dict.get(_GLOBAL_STEP, 0))
        self._file.close()
        self._file = EventFile(self.log_dir)
        return self

    def on_start(self, state: Any) -> None:
        """Resets at the start: a previous run may have ended in an exception, before ``on_end``."""
        if self._run_state is None:  # else an evaluation inside of a run
            self._speed = _Speed()

    def on_start_epoch(self, state: Any) -> None:
        """Starts the clock before the loader's iterator is made: loading is part of the time."""
        self._speed.start()

    def on_start_training(self, state: Any) -> None:
        """Callbacks load checkpoints in ``on_start``, so the first step is known here."""
        if self._run_state is not None:
            return
        self._run_state = state
        # Without a saved state of this callback, the history still has the completed epochs.
        self._step = self._step or _steps_of(state[torchbearer.HISTORY])
        if collectives.is_rank_zero() and not self._file.in_session:
            # Points at the current step are valid: a previous run wrote them before its last
            # checkpoint, or this callback wrote them in an evaluation.
            self._file.begin_session(self._step + 1 if self._step or self._file.has_events else 0)
            if self._write_summary:
                text = "\n".join(f"    {line}" for line in str(state[torchbearer.SELF]).split("\n"))
                self._file.write(Event(step=self._step, summary=summary.text("trial", text)))

    def on_sample(self, state: Any) -> None:
        """Counts a step when it begins, so that a checkpoint at its end has the right number."""
        self._step += 1

    def on_step_training(self, state: Any) -> None:
        """The step is complete here: its metrics and its time are known."""
        if not collectives.is_rank_zero():
            return
        self._speed.stop(state)
        if self._step == 1 and self._write_graph:
            self._add_graph(state)
        self._speed.start()
        if self._step % self._batch_step_size:
            return
        values = self._speed.read()
        for index, group in enumerate(getattr(state[torchbearer.OPTIMIZER], "param_groups", [])):
            values[f"learning_rate/group_{index}"] = group["lr"]
        if self._write_batch_metrics:
            values.update(_tagged("batch", state[torchbearer.METRICS]))
        self._add(values)

    def on_end_epoch(self, state: Any) -> None:
        """The epoch's metrics are final here, including those of the validation.

        ``evaluate`` also ends with this hook; its results have tags of their own. ``predict`` does
        too, but has no results to write.
        """
        is_run = state is self._run_state
        if torchbearer.FINAL_PREDICTIONS in state and not is_run:
            return
        if self._write_epoch_metrics and collectives.is_rank_zero():
            kind = "epoch" if is_run else "evaluate"
            self._step = self._step or _steps_of(state[torchbearer.HISTORY])
            metrics = state[torchbearer.METRICS].items()
            # Running metrics are previews on this rank's data, which the steps have written.
            final = {name: value for name, value in metrics if not name.startswith("running_")}
            self._add(_tagged(kind, final))

    def on_end(self, state: Any) -> None:
        """Closes the file; a later run or evaluation of this Trial appends to it."""
        if self._run_state is None or state is self._run_state:
            self._run_state = None
            self._file.close()

    def leave(self) -> None:
        """A run may end in an exception, before ``on_end``."""
        self._run_state = None

    def _add(self, values: dict[str, Any]) -> None:
        found: list[Any] = []
        for tag, value in values.items():
            try:
                for name, number in _numbers(tag, value):
                    found += summary.scalar(name, number).value
            except (TypeError, ValueError) as error:
                if tag not in self._unwritten:
                    self._unwritten.add(tag)
                    warnings.warn(
                        f"TensorBoard has no curve for {tag}: {error}.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        if found:
            self._file.write(Event(step=self._step, summary=Summary(value=found)))

    def _add_graph(self, state: Any) -> None:
        try:
            graph, statistics = _graph_of(state[torchbearer.MODEL], state[torchbearer.X])
        except Exception as error:  # a user's model may raise anything when it is traced
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"TensorBoard has no graph of the model: {reason}. Training continues; "
                "write_graph=False leaves the graph out.",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._file.write(Event(graph_def=graph.SerializeToString()))
        metadata = statistics.SerializeToString()
        profile = TaggedRunMetadata(tag="profiler", run_metadata=metadata)
        self._file.write(Event(tagged_run_metadata=profile))


class _Speed:
    """Adds up the time and the samples of the steps since the last reading."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._timing: Timing | None = None
        self._ranks = RankTimes()
        self._clear()

    def _clear(self) -> None:
        self._steps = self._samples = 0
        self._seconds = self._waiting = self._moving = 0.0
        self._exchanges = False

    def start(self) -> None:
        """Starts the clock of a step."""
        self._since = time.perf_counter()

    def stop(self, state: Any) -> None:
        """Adds the step that has just ended."""
        seconds = time.perf_counter() - self._since
        self._seconds += seconds
        self._steps += 1
        self._samples += collectives.world_size() * batch_size(state)
        for callback in state[torchbearer.CALLBACK_LIST]:
            if isinstance(callback, SyncGradients):
                self._exchanges = True
                timing = callback.timing
                if timing is not self._timing:  # a step that only accumulates exchanges nothing
                    self._timing = timing
                    self._ranks.add(callback.times or [seconds])
                    moving = min(timing.moving, seconds)
                    self._moving += moving
                    # Measured on other ranks' clocks, so it may exceed this rank's time.
                    self._waiting += min(timing.waiting, seconds - moving)

    def read(self) -> dict[str, Any]:
        """The averages since the last reading; the three parts of a step add up to its time."""
        values = {"speed/samples_per_second": self._samples / max(self._seconds, 1e-9)}
        if self._exchanges:
            compute = self._seconds - self._waiting - self._moving
            parts = {"compute": compute, "waiting": self._waiting, "moving": self._moving}
            for part, seconds in parts.items():
                values[f"step_time_ms/{part}"] = 1000 * seconds / self._steps
            values |= self._ranks.read()
        self._clear()
        return values


def _steps_of(history: list[dict[str, Any]]) -> int:
    return sum(max(0, epoch.get(str(torchbearer.TRAIN_STEPS)) or 0) for epoch in history)


def _tagged(kind: str, metrics: dict[str, Any]) -> dict[str, Any]:
    return {f"{kind}/{name}": value for name, value in metrics.items()}


def _numbers(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a metric, which may be a list, dict or tensor, each with its own tag."""
    if torch.is_tensor(value) or isinstance(value, numpy.ndarray):
        value = value.item() if value.reshape(-1).shape[0] == 1 else value.tolist()
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(f"{tag}_{key}", each)
    else:
        yield tag, float(value)


def _graph_of(model: Any, x: Any) -> tuple[Any, Any]:
    """The model's graph, traced on a copy: neither the model nor the random numbers change."""
    # Only this function needs the tensorboard package, and not every run needs the graph.
    from torch.utils.tensorboard._pytorch_graph import graph

    with randomness.preserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of values that it treats as constants
        # What torch.compile made cannot be traced, but what is inside can.
        plain = contents.without_wrappers(copy.deepcopy(contents.unwrapped(model)))
        # In evaluation mode no layer exchanges data with other ranks, which do not trace.
        traced: tuple[Any, Any] = graph(plain.eval(), (x,))  # type: ignore[no-untyped-call]
    return traced
