"""Metrics, predictions and progress of all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torchbearer
from torchbearer.callbacks import AggregatePredictions

from torchbearer_ddp.callbacks import progress
from torchbearer_ddp.callbacks.callback_order import FIRST, OrderedCallback
from torchbearer_ddp.data.loaders import share_of
from torchbearer_ddp.group import collectives
from torchbearer_ddp.metrics import predictions
from torchbearer_ddp.metrics.pooled_list import PooledMetricList


class SyncMetrics(OrderedCallback):
    """Gives every rank the metrics and predictions that one process would have reported.

    At the end of each pass the metrics' own sums, counts and gathered predictions are pooled over
    the ranks, so the progress bar, EarlyStopping, checkpoints and schedulers read values of all of
    the data, equal on every rank. A metric that cannot be pooled is averaged, with a warning that
    names it. Running metrics are not pooled: they are a preview of each rank's own training.

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

    # First, so that every other callback reads pooled values.
    order: ClassVar[Mapping[str, int]] = {"on_end_validation": FIRST}

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
            state[torchbearer.METRIC_LIST] = trial_state[torchbearer.METRIC_LIST]
            progress.replace_injected(state)

    def on_start_training(self, state: Any) -> None:
        """The steps are final here."""
        progress.warn_of_no_steps(state)

    def on_end_validation(self, state: Any) -> None:
        """Every rank calls this hook, also one without data; the predictions are complete here."""
        if collectives.world_size() == 1:
            return
        metrics = state[torchbearer.METRIC_LIST]
        if isinstance(metrics, PooledMetricList):
            state[torchbearer.METRICS].update(metrics.finish(state.data))
        share = share_of(state[torchbearer.GENERATOR])
        for injection in progress.injections(state):
            if isinstance(injection.callback, AggregatePredictions) and share is not None:
                state[torchbearer.FINAL_PREDICTIONS] = predictions.gather(
                    injection.callback.predictions_list, share, state[torchbearer.DEVICE]
                )

    def _pool(self, state: Any) -> None:
        metrics = state[torchbearer.METRIC_LIST]
        if not isinstance(metrics, PooledMetricList):
            state[torchbearer.METRIC_LIST] = PooledMetricList.over(metrics)
