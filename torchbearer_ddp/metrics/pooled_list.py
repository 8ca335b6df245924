"""Pooling of torchbearer's metrics: every rank holds the values that one process would report.

What a metric has summed and counted is added up over the ranks, so it does not matter how many
samples each of them saw. Two details make the values those of one process:

- In evaluation the ranks take turns at the batches that one process would take (see
  :class:`~torchbearer_ddp.ShardData`). Their sums are added in that process's order, so the values
  are its values to the last bit, also a mean of batch values, as ``loss`` is in torchbearer.
- In training one step of all ranks is one batch of N times the size. A value that is computed per
  batch is first averaged over the ranks of each step, weighted by batch size, as the loss of that
  batch would be, and then over the steps. (The loss of a criterion with ``reduction='sum'`` is
  summed.)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchbearer
from torchbearer.metrics import (
    LR,
    BatchLambda,
    DefaultAccuracy,
    Epoch,
    EpochLambda,
    Loss,
    Mean,
    Metric,
    MetricList,
    MetricTree,
    RunningMetric,
    TimerMetric,
    ToDict,
    Var,
)
from torchbearer.state import StateKey

from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.data.loaders import Share, share_of
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives, wire
from torchbearer_ddp.metrics.pooling import Ledger, average, empty, in_order, pool

#: torchbearer's decorators hide the class of the metric at the root.
_LOSS = type(Loss().root)
#: These show each rank's own state, or a preview of the epoch so far.
_OWN = (StateKey, RunningMetric, BatchLambda, TimerMetric, type(Epoch().metric), type(LR().metric))


@dataclass(frozen=True)
class Leaf:
    """A metric that reports a value, somewhere in the tree of metrics.

    Args:
        metric: The metric.
        arguments: What its ``process_final`` is called with, given the state.
        of_loss: True if it is fed with the loss of each batch.
    """

    metric: Any
    arguments: Callable[[Any], tuple[Any, ...]]
    of_loss: bool = False


def leaves(
    metric: Any,
    arguments: Callable[[Any], tuple[Any, ...]] = lambda state: (state,),
    of_loss: bool = False,
) -> Iterator[Leaf]:
    """The metrics in a tree that report values.

    Args:
        metric: The tree.
        arguments: What the tree's ``process_final`` is called with, given the state.
        of_loss: True if the tree is fed with the loss of each batch.
    """
    if isinstance(metric, MetricList):
        for each in metric.metric_list:
            yield from leaves(each, arguments, of_loss)
    elif isinstance(metric, MetricTree):

        def below(state: Any) -> tuple[Any, ...]:
            value = metric.root.process_final(*arguments(state))
            return (next(iter(value.values())) if isinstance(value, dict) else value,)

        for child in metric.children:
            yield from leaves(child, below, isinstance(metric.root, _LOSS))
    elif isinstance(metric, ToDict | DefaultAccuracy):
        yield from leaves(metric.metric, arguments, of_loss)
    else:
        yield Leaf(metric, arguments, of_loss)


class PooledMetricList(MetricList):  # type: ignore[misc]
    """A metric list whose final values are those of all ranks together.

    All sums travel in one exchange at the end of a pass; predictions and targets in a second one,
    if there is a metric that needs them. What was pooled never goes back into the metrics, so
    nothing can be pooled twice.
    """

    def __init__(self, metric_list: Any) -> None:
        super().__init__(metric_list)
        self._training = True
        self._warned: set[str] = set()
        self._begin()

    @classmethod
    def over(cls, metrics: MetricList) -> PooledMetricList:
        """The same metrics, as this kind of list.

        Args:
            metrics: The list that torchbearer made.
        """
        pooled = cls([])
        pooled.metric_list = metrics.metric_list
        return pooled

    def _begin(self) -> None:
        found = {id(leaf.metric): leaf for leaf in leaves(self)}.values()
        self._sums = [(leaf, Ledger()) for leaf in found if isinstance(leaf.metric, Mean | Var)]
        self._gathered = [leaf for leaf in found if isinstance(leaf.metric, EpochLambda)]
        known = (Mean, Var, EpochLambda, *_OWN)
        self._averaged = [
            leaf
            for leaf in found
            if not isinstance(leaf.metric, known)
            and type(leaf.metric).process_final is not Metric.process_final
        ]
        self._sizes: list[int] = []
        self._exchanged = False
        #: The pooled attributes of each metric, or None if there is nothing to report.
        self._pooled: list[tuple[Any, dict[str, Any]]] | None = None

    def reset(self, state: Any) -> None:
        """Begins a pass; a metric may change what is inside it here (``acc`` does)."""
        super().reset(state)
        self._begin()

    def train(self) -> None:
        """Puts the metrics in train mode: one step of all ranks is one batch."""
        self._training = True
        super().train()

    def eval(self, data_key: Any = None) -> None:
        """Puts the metrics in eval mode: each batch stands for itself."""
        self._training = False
        super().eval(data_key=data_key)

    @torch.no_grad()
    def process(self, *args: Any) -> Any:
        """Processes a batch, and notes what it added to each sum."""
        for leaf, _ in self._sums:
            empty(leaf.metric)
        values = super().process(*args)
        for leaf, ledger in self._sums:
            ledger.take(leaf.metric)
        self._sizes.append(batch_size(args[0]))
        self._exchanged = False
        return values

    @torch.no_grad()
    def process_final(self, *args: Any) -> Any:
        """The final values of all ranks together; collective."""
        if not self._exchanged:
            self._exchange(args[0], reports=True)
        return self._values(args[0])

    def finish(self, state: Any) -> dict[str, Any]:
        """Takes part in the exchange where torchbearer did not ask this rank for final values.

        torchbearer does so only where there were targets: not on a rank without a batch, nor in
        prediction without targets. Collective, unless :meth:`process_final` was called.

        Args:
            state: The state of the running Trial.

        Returns:
            The final values, if other ranks report any.
        """
        if self._exchanged:
            return {}
        self._exchange(state, reports=False)
        return self._values(state)

    def _exchange(self, state: Any, *, reports: bool) -> None:
        self._exchanged, self._pooled = True, None
        if not self.metric_list:
            return
        mine = {
            "reports": reports,
            "sizes": torch.tensor(self._sizes, dtype=torch.int64),
            "sums": [ledger.entry() for _, ledger in self._sums],
            "averaged": [self._value(leaf, state) for leaf in self._averaged],
        }
        everyone = collectives.all_gather(mine, "the metrics' sums")
        if not any(each["reports"] and len(each["sizes"]) for each in everyone):
            return
        if len({(len(each["sums"]), len(each["averaged"])) for each in everyone}) > 1:
            raise DesyncError(
                "The ranks have different metrics, so they cannot be pooled. Give the Trial the "
                "same metrics on every rank."
            )
        share = share_of(state.get(torchbearer.GENERATOR))
        self._pooled = [
            *self._pool_sums(everyone, state, share),
            *self._pool_gathered(state, share),
            *self._pool_averages([each["averaged"] for each in everyone]),
        ]

    def _pool_sums(
        self, everyone: list[Any], state: Any, share: Share | None
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        by_step = self._training or (share is not None and not share.whole_batches)
        summed = getattr(state.get(torchbearer.CRITERION), "reduction", "mean") == "sum"
        for index, (leaf, _) in enumerate(self._sums):
            attributes = pool(
                [each["sums"][index] for each in everyone],
                [each["sizes"] for each in everyone],
                by_step=by_step,
                of_loss=leaf.of_loss,
                summed=summed,
            )
            if attributes is not None:
                yield leaf.metric, attributes

    def _pool_gathered(
        self, state: Any, share: Share | None
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        if not self._gathered:
            return
        names = ("_y_pred", "_y_true")
        mine = [[getattr(leaf.metric, name) for name in names] for leaf in self._gathered]
        everyone = collectives.all_gather(mine, "predictions and targets for the metrics")
        block = share.block if share is not None and share.block is not None else 1
        for index, leaf in enumerate(self._gathered):
            pooled = {}
            for place, name in enumerate(names):
                rows = in_order([each[index][place] for each in everyone], block)
                pooled[name] = rows if rows is None else rows.to(state[torchbearer.DEVICE])
            yield leaf.metric, pooled

    def _pool_averages(self, everyone: list[list[Any]]) -> Iterator[tuple[Any, dict[str, Any]]]:
        for index, leaf in enumerate(self._averaged):
            value = average([each[index] for each in everyone])
            if value is None:
                continue
            name = leaf.metric.name
            if collectives.is_rank_zero() and name not in self._warned:
                warnings.warn(
                    f"The metric {name} ({type(leaf.metric).__name__}) cannot be pooled, so its "
                    "value is the average of the ranks' values, which need not be the value on "
                    "all of the data. Build it on torchbearer's mean, var, std or EpochLambda.",
                    stacklevel=2,
                )
            self._warned.add(name)
            yield leaf.metric, {"process_final": lambda *_, value=value: value}

    def _value(self, leaf: Leaf, state: Any) -> Any:
        """A rank's own final value of a metric that cannot be pooled."""
        if not self._sizes:
            return None
        value = leaf.metric.process_final(*leaf.arguments(state))
        if type(value).__module__ == "numpy":
            return torch.as_tensor(value)
        try:
            wire.encode(value)
        except TypeError:  # a figure, say: each rank keeps its own
            return None
        return value

    def _values(self, state: Any) -> dict[str, Any]:
        """Asks the metrics for their final values, while they hold what all ranks have seen."""
        values: dict[str, Any] = {}
        if self._pooled is None:
            return values
        with contextlib.ExitStack() as stack:
            for metric, attributes in self._pooled:
                stack.enter_context(_holding(metric, attributes))
            for metric in self.metric_list:
                try:
                    values.update(metric.process_final(state) or {})
                except KeyError:
                    if self._sizes:
                        raise
                    # Without a batch the state has no loss, say, for a metric that only shows it.
        return values


@contextlib.contextmanager
def _holding(metric: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Gives a metric some attributes for a while."""
    before = {name: vars(metric)[name] for name in attributes if name in vars(metric)}
    vars(metric).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(metric)[name]
        vars(metric).update(before)
