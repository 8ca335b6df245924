"""A metric list that pools: every rank holds the values that one process would report.

What a metric has summed and counted is added over the ranks, so ranks may have different numbers of
samples. Two details make the values equal to those of one process:

- In evaluation the ranks divide the batches of one process between them (see
  :class:`~torchbearer_ddp.ShardData`). Sums are added in the order of that process, so the values
  are equal to the last bit. This includes means of batch values, as ``loss`` is in torchbearer.
- In training one step of all ranks is one batch of N times the size. A value that is computed per
  batch is first averaged over the ranks of each step, weighted by batch size, and then over the
  steps. (The loss of a criterion with ``reduction='sum'`` is summed over the ranks.)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchbearer
from torchbearer import metrics
from torchbearer.state import StateKey

from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.data.loaders import Share, share_of
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives, wire
from torchbearer_ddp.metrics.pooling import Ledger, average, empty, in_order, pool

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
#: What an EpochLambda gathers.
_GATHERED = ("_y_pred", "_y_true")
#: A metric, and the attributes that it has while it computes its final value.
_Pooled = tuple[Any, dict[str, Any]]


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


def leaves(
    metric: Any,
    arguments: Callable[[Any], tuple[Any, ...]] = lambda state: (state,),
    of_loss: bool = False,
) -> Iterator[Leaf]:
    """The metrics in a tree that report values."""
    if isinstance(metric, metrics.MetricList):
        for each in metric.metric_list:
            yield from leaves(each, arguments, of_loss)
    elif isinstance(metric, metrics.MetricTree):

        def of_child(state: Any) -> tuple[Any, ...]:
            value = metric.root.process_final(*arguments(state))
            return (next(iter(value.values())) if isinstance(value, dict) else value,)

        for child in metric.children:
            yield from leaves(child, of_child, isinstance(metric.root, _LOSS))
    elif isinstance(metric, metrics.ToDict | metrics.DefaultAccuracy):
        yield from leaves(metric.metric, arguments, of_loss)
    else:
        yield Leaf(metric, arguments, of_loss)


class PooledMetricList(metrics.MetricList):  # type: ignore[misc]
    """A metric list whose final values are those of all ranks together.

    One pass over the data is: :meth:`reset`, :meth:`process` for each batch, one exchange, and the
    final values. Pooled sums are not written back to the metrics, so they cannot be pooled twice.
    """

    def __init__(self, metric_list: Any) -> None:
        super().__init__(metric_list)
        self._training = True
        self._warned: set[str] = set()
        self._begin_pass()

    @classmethod
    def over(cls, metric_list: metrics.MetricList) -> PooledMetricList:
        """A list of this kind with the same metrics."""
        pooled = cls([])
        pooled.metric_list = metric_list.metric_list
        return pooled

    def train(self) -> None:
        """Puts the metrics in train mode: one step of all ranks is one batch."""
        self._training = True
        super().train()

    def eval(self, data_key: Any = None) -> None:
        """Puts the metrics in eval mode: each batch is one of a single process."""
        self._training = False
        super().eval(data_key=data_key)

    def reset(self, state: Any) -> None:
        """Begins a pass; a metric may change its inner metrics here (``acc`` does)."""
        super().reset(state)
        self._begin_pass()

    def _begin_pass(self) -> None:
        found = list({id(leaf.metric): leaf for leaf in leaves(self)}.values())
        self._summed = [leaf for leaf in found if isinstance(leaf.metric, _SUMMED)]
        # A checkpoint in mid-epoch holds the ledgers, which it finds in this list.
        self._ledgers = [Ledger() for _ in self._summed]
        self._gathered = [leaf for leaf in found if isinstance(leaf.metric, metrics.EpochLambda)]
        known = (*_SUMMED, metrics.EpochLambda, *_NOT_POOLED)
        self._averaged = [
            leaf
            for leaf in found
            if not isinstance(leaf.metric, known)
            and type(leaf.metric).process_final is not metrics.Metric.process_final
        ]
        self._sizes: list[int] = []
        self._exchanged = False
        #: None if no rank has final values to report.
        self._pooled: list[_Pooled] | None = None

    @torch.no_grad()
    def process(self, *args: Any) -> Any:
        """Processes a batch, and records what it added to each sum."""
        for leaf in self._summed:
            empty(leaf.metric)
        values = super().process(*args)
        for leaf, ledger in zip(self._summed, self._ledgers, strict=True):
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
        """Takes part in the exchange if torchbearer did not call :meth:`process_final`.

        torchbearer does not call it without targets: on a rank without a batch, and in prediction
        without targets. Returns the final values that are new on this rank.
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
            "reports": reports and bool(self._sizes),
            "sizes": torch.tensor(self._sizes, dtype=torch.int64),
            "sums": [ledger.entry() for ledger in self._ledgers],
            "rows": [[getattr(leaf.metric, n) for n in _GATHERED] for leaf in self._gathered],
            "values": [self._own_value(leaf, state) for leaf in self._averaged],
        }
        everyone = collectives.all_gather(mine, "the metrics")
        if not any(each["reports"] for each in everyone):
            return
        if len({tuple(len(each[n]) for n in ("sums", "rows", "values")) for each in everyone}) > 1:
            raise DesyncError(
                "The ranks have different metrics, so they cannot be pooled. Give the Trial the "
                "same metrics on every rank."
            )
        share = share_of(state.get(torchbearer.GENERATOR))
        self._pooled = [
            *self._pool_sums(everyone, state, share),
            *self._pool_rows(everyone, state, share),
            *self._average_values(everyone),
        ]

    def _pool_sums(
        self, everyone: list[dict[str, Any]], state: Any, share: Share | None
    ) -> Iterator[_Pooled]:
        by_step = self._training or (share is not None and not share.whole_batches)
        summed = getattr(state.get(torchbearer.CRITERION), "reduction", "mean") == "sum"
        for index, leaf in enumerate(self._summed):
            attributes = pool(
                [each["sums"][index] for each in everyone],
                [each["sizes"] for each in everyone],
                by_step=by_step,
                of_loss=leaf.of_loss,
                summed=summed,
            )
            if attributes is not None:
                yield leaf.metric, attributes

    def _pool_rows(
        self, everyone: list[dict[str, Any]], state: Any, share: Share | None
    ) -> Iterator[_Pooled]:
        block = share.block if share is not None and share.block is not None else 1
        for index, leaf in enumerate(self._gathered):
            pooled = {}
            for place, name in enumerate(_GATHERED):
                rows = in_order([each["rows"][index][place] for each in everyone], block)
                pooled[name] = rows if rows is None else rows.to(state[torchbearer.DEVICE])
            yield leaf.metric, pooled

    def _average_values(self, everyone: list[dict[str, Any]]) -> Iterator[_Pooled]:
        for index, leaf in enumerate(self._averaged):
            value = average([each["values"][index] for each in everyone])
            if value is None:
                continue
            name = leaf.metric.name
            if collectives.is_rank_zero() and name not in self._warned:
                warnings.warn(
                    f"The metric {name} ({type(leaf.metric).__name__}) cannot be pooled, so its "
                    "value is the average of the ranks' values, which can differ from the value on "
                    "all of the data. Build it on torchbearer's mean, var, std or EpochLambda.",
                    stacklevel=2,
                )
            self._warned.add(name)
            yield leaf.metric, {"process_final": lambda *_, value=value: value}

    def _own_value(self, leaf: Leaf, state: Any) -> Any:
        """This rank's final value of a metric that cannot be pooled, if it can be sent."""
        if not self._sizes:
            return None
        value = leaf.metric.process_final(*leaf.arguments(state))
        if type(value).__module__ == "numpy":
            return torch.as_tensor(value)
        try:
            wire.encode(value)
        except TypeError:  # each rank keeps its own, for example a figure
            return None
        return value

    def _values(self, state: Any) -> dict[str, Any]:
        """The final values, computed while the metrics hold what all ranks have seen."""
        values: dict[str, Any] = {}
        if self._pooled is None:
            return values
        with _holding(self._pooled):
            for metric in self.metric_list:
                try:
                    values.update(metric.process_final(state) or {})
                except KeyError:
                    # Without a batch the state lacks the value that a metric shows, e.g. the loss.
                    if self._sizes:
                        raise
        return values


@contextlib.contextmanager
def _holding(pooled: Iterable[_Pooled]) -> Iterator[None]:
    """Gives metrics their pooled attributes, and later the previous ones back."""
    with contextlib.ExitStack() as stack:
        for metric, attributes in pooled:
            held: dict[str, Any] = metric.__dict__
            stack.callback(held.update, {n: held[n] for n in attributes if n in held})
            for name in attributes.keys() - held:
                stack.callback(held.pop, name)
            held.update(attributes)
        yield
