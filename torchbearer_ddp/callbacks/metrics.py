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
    the ranks (see :mod:`torchbearer_ddp.metrics`), so the printer, EarlyStopping, checkpoints and
    schedulers read the values of all of the data, the same on every rank. A metric that cannot be
    pooled is averaged, with a warning that names it. Running metrics are a preview of each rank's
    own training and stay that.

    ``predict()`` returns the predictions for all of the data, in its order, on every rank. The
    progress bar is rank zero's, and counts the samples of all ranks.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import SyncMetrics
        >>> trial = Trial(None, metrics=['acc', 'loss'], callbacks=[SyncMetrics()])

    State Requirements:
        - :attr:`torchbearer.state.METRIC_LIST`: Replaced by one that pools
        - :attr:`torchbearer.state.SELF`: The Trial, whose verbosity is set
        - :attr:`torchbearer.state.METRICS`: Completed on a rank without data
        - :attr:`torchbearer.state.FINAL_PREDICTIONS`: Replaced by those of all ranks
    """

    # First, so that every other callback reads the values of all ranks.
    order: ClassVar[Mapping[str, int]] = {"on_end_validation": FIRST}

    def on_init(self, state: Any) -> None:
        """At init: the printer comes before every callback, so the metrics must pool themselves."""
        super().on_init(state)
        if collectives.world_size() > 1:
            self._pool(state)
            progress.silence(state)

    def on_start(self, state: Any) -> None:
        """The printer of this run, and its verbosity, are known only now."""
        if collectives.world_size() > 1:
            trial_state = state[torchbearer.SELF].state
            self._pool(trial_state)
            state[torchbearer.METRIC_LIST] = trial_state[torchbearer.METRIC_LIST]
            progress.take_over(state)

    def on_end_validation(self, state: Any) -> None:
        """Every rank comes here, also one without data; torchbearer has its predictions ready."""
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
