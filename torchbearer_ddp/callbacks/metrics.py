"""Metrics, predictions and progress of all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torchbearer
from torchbearer.callbacks import AggregatePredictions

from torchbearer_ddp.callbacks import progress
from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.data.loaders import share_of
from torchbearer_ddp.gradients.loss import divisor
from torchbearer_ddp.gradients.target_weights import is_class_loss
from torchbearer_ddp.group import collectives
from torchbearer_ddp.metrics import predictions
from torchbearer_ddp.metrics.pooled_list import LossRule, PooledMetricList


class SyncMetrics(OrderedCallback):
    """Gives every rank the metrics and predictions that one process would have reported.

    At the end of each pass the metrics' own sums, counts and gathered predictions are pooled over
    the ranks, so the progress bar, EarlyStopping, checkpoints and schedulers read values of all of
    the data, equal on every rank. This includes metrics that a callback adds during the pass, on
    every rank. The loss is combined as :class:`SyncGradients` combines the gradients. Running
    metrics are not pooled: they are a preview of each rank's own training.

    A metric with state of its own says how its attributes are pooled: with
    ``pooling = {'hits': 'sum', 'scores': 'gather'}`` tensors and numbers are added, and lists and
    the rows of tensors are put in the order of one process. Without that, its values are averaged,
    with a warning that names it.

    ``predict()`` returns the predictions for all of the data, in its order, on every rank. Only
    rank zero shows a progress bar, which counts the samples of all ranks.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import SyncMetrics
        >>> trial = Trial(None, metrics=['acc', 'loss'], callbacks=[SyncMetrics()])

    State Requirements:
        - :attr:`torchbearer.state.METRIC_LIST`: Replaced by one that pools
        - :attr:`torchbearer.state.SELF`: The Trial, whose verbosity is set
        - :attr:`torchbearer.state.METRICS`: Filled in on a rank without data
        - :attr:`torchbearer.state.FINAL_PREDICTIONS`: Replaced by those of all ranks
    """

    only_once: ClassVar[bool] = True
    # First at the end, so that every other callback reads pooled values. Last elsewhere, after the
    # callbacks that may replace the list of metrics.
    order: ClassVar[Mapping[str, int]] = {
        "on_end_validation": FIRST,
        "on_start_training": LAST,
        "on_start_validation": LAST,
        "on_sample": LAST,
        "on_sample_validation": LAST,
        "on_step_training": LAST,
        "on_step_validation": LAST,
    }

    def __init__(self) -> None:
        super().__init__()
        #: The list of the current pass.
        self._current: Any = None
        self._loss_rule = _LossRule()

    def on_init(self, state: Any) -> None:
        """At init: the progress bar reads metrics before any callback, so the list itself pools."""
        super().on_init(state)
        if collectives.world_size() > 1:
            self._pool(state)
            progress.silence(state)

    def on_start(self, state: Any) -> None:
        """The progress bar of this run, and its verbosity, are not known earlier."""
        if collectives.world_size() > 1:
            trial_state = state[torchbearer.SELF].state
            self._pool(trial_state)
            self._loss_rule = _LossRule(state[torchbearer.CALLBACK_LIST])
            pooled = state[torchbearer.METRIC_LIST] = trial_state[torchbearer.METRIC_LIST]
            pooled.loss_rule = self._loss_rule
            progress.replace_injected(state)

    def on_end_validation(self, state: Any) -> None:
        """Every rank calls this hook, also one without data; the predictions are complete here."""
        if collectives.world_size() == 1:
            return
        state[torchbearer.METRICS].update(state[torchbearer.METRIC_LIST].finish(state.data))
        share = share_of(state[torchbearer.GENERATOR])
        for injection in progress.injections(state):
            if isinstance(injection.callback, AggregatePredictions) and share is not None:
                state[torchbearer.FINAL_PREDICTIONS] = predictions.gather(
                    injection.callback.predictions_list, share, state[torchbearer.DEVICE]
                )

    def on_start_training(self, state: Any) -> None:
        """After every callback that may add metrics for this pass; the steps are final here."""
        progress.warn_of_no_steps(state)
        self._begin(state)

    def on_start_validation(self, state: Any) -> None:
        """After every callback that may add metrics for this pass."""
        self._begin(state)

    def on_sample(self, state: Any) -> None:
        """Before the first batch is processed, and after a step that has changed the list."""
        self._continue(state)

    on_sample_validation = on_sample

    def on_step_training(self, state: Any) -> None:
        """The last hook before the final values, in the last step."""
        self._continue(state)

    on_step_validation = on_step_training

    def _pool(self, state: Any) -> None:
        """Replaces the metric list by one that pools, if it is not one already."""
        metrics = state[torchbearer.METRIC_LIST]
        if not isinstance(metrics, PooledMetricList):
            state[torchbearer.METRIC_LIST] = PooledMetricList.over(metrics)

    def _begin(self, state: Any) -> None:
        """Begins a pass with the list that torchbearer has just reset."""
        self._current = state[torchbearer.SELF].state[torchbearer.METRIC_LIST]
        self._continue(state)

    def _continue(self, state: Any) -> None:
        """Continues a pass, in which a callback may have put another list into the state."""
        metrics = state[torchbearer.METRIC_LIST]
        if metrics is self._current or collectives.world_size() == 1:
            return
        if not isinstance(metrics, PooledMetricList):
            previous = self._current if isinstance(self._current, PooledMetricList) else None
            metrics = PooledMetricList.over(metrics, previous)
            state[torchbearer.METRIC_LIST] = metrics
        metrics.loss_rule = self._loss_rule
        self._current = metrics


class _LossRule(LossRule):
    """Combines losses as the gradients are combined."""

    def __init__(self, callbacks: Any = ()) -> None:
        self._gradients = next((c for c in callbacks if isinstance(c, SyncGradients)), None)

    def is_sum(self, state: Any) -> bool:
        """Follows the verdict on the loss; before a first step the criterion itself."""
        kind = self._gradients and self._gradients.loss_kind
        return super().is_sum(state) if kind is None else kind == "sum"

    def weight(self, state: Any) -> float:
        """Follows the verdict on the loss; before a first step the criterion itself."""
        if self._gradients is not None and self._gradients.loss_kind is not None:
            return self._gradients.losses.weight(state, 0)
        criterion = state.get(torchbearer.CRITERION)
        kind = "weighted" if is_class_loss(criterion) else "mean"
        return divisor(criterion, state, kind)
