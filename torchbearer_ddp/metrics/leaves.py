"""The metrics in a tree of metrics that report values, and how each of them is pooled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchbearer import metrics
from torchbearer.state import StateKey

#: torchbearer's decorators hide the class of the metric at the root.
_LOSS = type(metrics.Loss().root)
_SUMMED = (metrics.Mean, metrics.Var)
#: These show each rank's own state, or a preview of the epoch so far.
_NOT_POOLED = (
    StateKey,
    metrics.RunningMetric,
    metrics.BatchLambda,
    metrics.TimerMetric,
    type(metrics.Epoch().metric),
    type(metrics.LR().metric),
)
#: A metric's own declaration of how its attributes are pooled.
_DECLARATION = "pooling"


@dataclass(frozen=True)
class Leaf:
    """A metric that reports a value, somewhere in the tree of metrics.

    Attributes:
        arguments: The arguments of its ``process_final``, as a function of the state.
        of_loss: True if its input is the loss of each batch.
    """

    metric: Any
    arguments: Callable[[Any], tuple[Any, ...]]
    of_loss: bool = False

    @property
    def title(self) -> str:
        """What messages call the metric."""
        return f"{self.metric.name} ({type(self.metric).__name__})"


def leaves(
    metric: Any,
    arguments: Callable[[Any], tuple[Any, ...]] = lambda state: (state,),
    of_loss: bool = False,
) -> Iterator[Leaf]:
    """The metrics in a tree that report values, and those that declare how they are pooled."""
    if isinstance(metric, metrics.MetricList):
        for each in metric.metric_list:
            yield from leaves(each, arguments, of_loss)
    elif isinstance(metric, metrics.MetricTree):

        def of_child(state: Any) -> tuple[Any, ...]:
            value = metric.root.process_final(*arguments(state))
            return (next(iter(value.values())) if isinstance(value, dict) else value,)

        if declared(metric.root):
            yield Leaf(metric.root, arguments, of_loss)
        for child in metric.children:
            yield from leaves(child, of_child, isinstance(metric.root, _LOSS))
    elif isinstance(metric, metrics.ToDict | metrics.DefaultAccuracy):
        yield from leaves(metric.metric, arguments, of_loss)
    else:
        yield Leaf(metric, arguments, of_loss)


def flat(metric_list: Any) -> list[Any]:
    """The metrics of a list, and of the lists inside it."""
    found: list[Any] = []
    for metric in metric_list.metric_list:
        found += flat(metric) if isinstance(metric, metrics.MetricList) else [metric]
    return found


def declared(metric: Any) -> dict[str, str]:
    """How a metric of the user's own says that its attributes are pooled."""
    return getattr(metric, _DECLARATION, None) or {}


@dataclass
class SortedLeaves:
    """The leaves of a list of metrics by the way they are pooled.

    Attributes:
        summed: They sum and count, as :class:`torchbearer.metrics.Mean` does.
        gathered: They keep the predictions and targets of a pass.
        declaring: They say themselves how they are pooled.
        averaged: Nothing is known of them, so their values are averaged.
    """

    summed: list[Leaf] = field(default_factory=list)
    gathered: list[Leaf] = field(default_factory=list)
    declaring: list[Leaf] = field(default_factory=list)
    averaged: list[Leaf] = field(default_factory=list)

    @classmethod
    def of(cls, metric_list: Any) -> SortedLeaves:
        """Sorts the leaves of a list; a metric that is in it twice counts once."""
        found = cls()
        for leaf in {id(leaf.metric): leaf for leaf in leaves(metric_list)}.values():
            kind = _kind(leaf.metric)
            if kind is not None:
                getattr(found, kind).append(leaf)
        return found

    def titles(self) -> list[str]:
        """The leaves that are pooled, for a comparison between ranks."""
        kinds = (self.summed, self.gathered, self.declaring, self.averaged)
        return [leaf.title for kind in kinds for leaf in kind]


def _kind(metric: Any) -> str | None:
    """How a metric is pooled; None if it is not."""
    if declared(metric):
        return "declaring"
    if isinstance(metric, _SUMMED):
        return "summed"
    if isinstance(metric, metrics.EpochLambda):
        return "gathered"
    silent = type(metric).process_final is metrics.Metric.process_final
    return None if silent or isinstance(metric, _NOT_POOLED) else "averaged"
