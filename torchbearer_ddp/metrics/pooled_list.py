"""A metric list that pools: every rank holds the values that one process would report.

What a metric has summed and counted is added over the ranks, so ranks may have different numbers of
samples. Two details make the values equal to those of one process:

- In evaluation the ranks divide the batches of one process between them (see
  :class:`~torchbearer_ddp.ShardData`). Sums are added in the order of that process, so the values
  are equal to the last bit. This includes means of batch values, as ``loss`` is in torchbearer.
- In training one step of all ranks is one batch of N times the size. A value that is computed per
  batch is first averaged over the ranks of each step, weighted by batch size, and then over the
  steps. The loss is combined according to its kind (see :mod:`torchbearer_ddp.gradients.loss`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torchbearer
from torchbearer import metrics

from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.data.loaders import share_of
from torchbearer_ddp.group import collectives, wire
from torchbearer_ddp.metrics import declared
from torchbearer_ddp.metrics.combine import GATHERED, BatchOrder, Pooled, check_equal, combined
from torchbearer_ddp.metrics.leaves import Leaf, SortedLeaves, flat
from torchbearer_ddp.metrics.pooling import (
    Ledger,
    added,
    empty,
    from_runs,
    needs_batches,
    to_runs,
)


class LossRule:
    """How the losses of the ranks' batches combine to the loss of one batch, by default a mean."""

    def is_sum(self, state: Any) -> bool:
        """True if the loss of a batch is the sum over its samples."""
        return getattr(state.get(torchbearer.CRITERION), "reduction", "mean") == "sum"

    def weight(self, state: Any) -> float:
        """What the loss of the current batch counts in a mean."""
        return float(batch_size(state))


class PooledMetricList(metrics.MetricList):  # type: ignore[misc]
    """A metric list whose final values are those of all ranks together.

    One pass over the data is: :meth:`reset`, :meth:`process` for each batch, one exchange, and the
    final values. Pooled sums are not written back to the metrics, so they cannot be pooled twice.
    """

    def __init__(self, metric_list: Any) -> None:
        super().__init__(metric_list)
        self.loss_rule = LossRule()
        self._training = True
        self._warned: set[str] = set()
        self._begin_pass()

    @classmethod
    def over(
        cls, metric_list: metrics.MetricList, previous: PooledMetricList | None = None
    ) -> PooledMetricList:
        """A list of this kind with the same metrics.

        If it takes the place of another one in mid-pass, it continues with what that has recorded.
        """
        pooled = cls([])
        pooled.metric_list = flat(metric_list)
        if previous is None:
            pooled._begin_pass()
        else:
            kept = ("loss_rule", "_training", "_warned", "_sizes", "_weights")
            pooled.__dict__.update({name: getattr(previous, name) for name in kept})
            pooled._find_leaves(previous)
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
        self._sizes: list[int] = []
        self._weights: list[float] = []
        self._find_leaves(None)

    def _find_leaves(self, previous: PooledMetricList | None) -> None:
        """Sorts the metrics, and keeps what was recorded for those that were there before."""
        ledgers, lengths = ({}, {}) if previous is None else previous._records()
        self._seen = [id(metric) for metric in self.metric_list]
        self._leaves = SortedLeaves.of(self)
        # A checkpoint in mid-epoch holds these, which it finds in lists.
        self._ledgers = [ledgers.get(id(leaf.metric)) or Ledger() for leaf in self._leaves.summed]
        self._lengths: list[dict[str, list[int]]] = [
            lengths.get(id(leaf.metric)) or {name: [] for name in names}
            for leaf, names in self.with_rows()
        ]
        self._exchanged = False
        #: None if no rank has final values to report.
        self._pooled: list[Pooled] | None = None

    def _records(self) -> tuple[dict[int, Ledger], dict[int, dict[str, list[int]]]]:
        summed = zip(self._leaves.summed, self._ledgers, strict=True)
        rows = zip(self.with_rows(), self._lengths, strict=True)
        return (
            {id(leaf.metric): ledger for leaf, ledger in summed},
            {id(leaf.metric): lengths for (leaf, _), lengths in rows},
        )

    def with_rows(self) -> list[tuple[Leaf, Iterable[str]]]:
        """The metrics that gather rows, with the attributes that hold them."""
        declaring = [
            (leaf, declared.gathered_names(leaf.metric)) for leaf in self._leaves.declaring
        ]
        return [*((leaf, GATHERED) for leaf in self._leaves.gathered), *declaring]

    @torch.no_grad()
    def process(self, *args: Any) -> Any:
        """Processes a batch, and records what it added to each sum."""
        if self._seen != [id(metric) for metric in self.metric_list]:  # one was added in mid-pass
            self._find_leaves(self)
        for leaf in self._leaves.summed:
            empty(leaf.metric)
        values = super().process(*args)
        for leaf, ledger in zip(self._leaves.summed, self._ledgers, strict=True):
            ledger.take(leaf.metric)
        for (leaf, _), lengths in zip(self.with_rows(), self._lengths, strict=True):
            for name, recorded in lengths.items():
                rows: Any = getattr(leaf.metric, name, None)
                recorded.append(len(rows) if hasattr(rows, "__len__") else 0)
        size = batch_size(args[0])
        self._sizes.append(size)
        self._weights.append(self.loss_rule.weight(args[0]) if self._by_step(args[0]) else size)
        self._exchanged = False
        return values

    def _by_step(self, state: Any) -> bool:
        """True if the batches of a step count by what their losses divide by."""
        if self._training:
            return True
        return BatchOrder.of(share_of(state.get(torchbearer.GENERATOR)), training=False).by_step

    @torch.no_grad()
    def process_final(self, *args: Any) -> Any:
        """The final values of all ranks together; collective."""
        if self._exchanged:
            return self._values(args[0])
        self._exchange(args[0], reports=True)
        return self._values_of_all(args[0])

    def finish(self, state: Any) -> dict[str, Any]:
        """Takes part in the exchange if torchbearer did not call :meth:`process_final`.

        torchbearer does not call it without targets: on a rank without a batch, and in prediction
        without targets. Returns the final values that are new on this rank.
        """
        if self._exchanged:
            return {}
        self._exchange(state, reports=False)
        return self._values_of_all(state)

    def _exchange(self, state: Any, *, reports: bool) -> None:
        self._exchanged, self._pooled = True, None
        share = share_of(state.get(torchbearer.GENERATOR))
        order = BatchOrder.of(share, training=self._training)
        error: Exception | None = None
        try:
            mine = wire.encode(self._held(state, order, reports=reports))
        except Exception as caught:  # raised after the exchange, so that no rank waits
            error, mine = caught, None
        found = collectives.all_gather((collectives.describe_error(error), mine), "the metrics")
        if error is not None:
            raise error
        collectives.raise_first([described for described, _ in found])
        everyone = [wire.decode(held) for _, held in found]
        check_equal([each["titles"] for each in everyone])
        if not any(each["reports"] for each in everyone):
            return
        self._complete(everyone, order)
        device = state.get(torchbearer.DEVICE, "cpu")
        self._pooled = list(combined(self._leaves, everyone, order=order, device=device))
        averaged = {id(metric) for metric, held in self._pooled if "process_final" in held}
        for leaf in self._leaves.averaged:
            if id(leaf.metric) in averaged:
                self._warn(leaf)

    def _complete(self, everyone: list[dict[str, Any]], order: BatchOrder) -> None:
        """Brings in what was left out of the first exchange; collective if anything was needed.

        That is each batch's sums of metrics for which only some ranks could add up theirs.
        """
        by_rank = [each["sums"] for each in everyone]
        indices = [
            index
            for index, entries in enumerate(zip(*by_rank, strict=True))
            if needs_batches(entries, by_step=order.by_step)
        ]
        if indices:
            mine = [self._ledgers[index].entry() for index in indices]
            found = collectives.all_gather(mine, "the metrics of each batch")
            for entries, whole in zip(by_rank, found, strict=True):
                for index, entry in zip(indices, whole, strict=True):
                    entries[index] = entry
        for each in everyone:
            each |= {name: from_runs(each[name]) for name in ("sizes", "weights")}

    def _held(self, state: Any, order: BatchOrder, *, reports: bool) -> dict[str, Any]:
        """What this rank contributes to the final values."""
        found = self._leaves
        return {
            "titles": found.titles(),
            "reports": reports and bool(self._sizes),
            "sizes": to_runs(torch.tensor(self._sizes, dtype=torch.int64, device="cpu")),
            "weights": to_runs(torch.tensor(self._weights, dtype=torch.float64, device="cpu")),
            "loss is a sum": self.loss_rule.is_sum(state),
            "sums": [added(each.entry(), by_step=order.by_step) for each in self._ledgers],
            "lengths": self._lengths,
            "rows": [
                *({n: getattr(each.metric, n) for n in GATHERED} for each in found.gathered),
                *(declared.held_values(each.metric) for each in found.declaring),
            ],
            "values": [self._own_value(leaf, state) for leaf in found.averaged],
        }

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

    def _warn(self, leaf: Leaf) -> None:
        """Says once that a metric is averaged."""
        if collectives.is_rank_zero() and leaf.metric.name not in self._warned:
            warnings.warn(
                f"The metric {leaf.title} cannot be pooled, so its value is the average of the "
                "ranks' values, which can differ from the value on all of the data. Build it on "
                "torchbearer's mean, var, std or EpochLambda, or declare what it holds: "
                "pooling = {'attribute': 'sum' or 'gather'}.",
                stacklevel=2,
            )
        self._warned.add(leaf.metric.name)

    def _values_of_all(self, state: Any) -> dict[str, Any]:
        """The final values, on every rank or on none."""
        if self._pooled is None:
            return {}
        return collectives.run_together(lambda: self._values(state), "the final metrics")

    def _values(self, state: Any) -> dict[str, Any]:
        """The final values, computed while the metrics hold what all ranks have seen."""
        values: dict[str, Any] = {}
        with _holding(self._pooled or ()):
            for metric in self.metric_list if self._pooled is not None else ():
                try:
                    values.update(metric.process_final(state) or {})
                except KeyError:
                    # Without a batch the state lacks the value that a metric shows, e.g. the loss.
                    if self._sizes:
                        raise
        return values


@contextlib.contextmanager
def _holding(pooled: Iterable[Pooled]) -> Iterator[None]:
    """Gives metrics their pooled attributes, and later the previous ones back."""
    with contextlib.ExitStack() as stack:
        for metric, attributes in pooled:
            held: dict[str, Any] = metric.__dict__
            stack.callback(held.update, {n: held[n] for n in attributes if n in held})
            for name in attributes.keys() - held:
                stack.callback(held.pop, name)
            held.update(attributes)
        yield
