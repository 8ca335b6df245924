"""What metrics hold in mid-epoch: data comes back as it was, all else is left alone."""

from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
import torchbearer
from torchbearer.bases import Metric
from torchbearer.metrics import EpochLambda, MetricList, RunningMean, to_dict

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import metric_state
from torchbearer_ddp.group import wire
from torchbearer_ddp.metrics.pooled_list import PooledMetricList
from torchbearer_ddp.metrics.pooling import Ledger


class Holder(Metric):
    def __init__(self):
        super().__init__("holder")
        self.recent = deque(maxlen=3)
        self.sums = {"a": torch.zeros(2), ("b", 1): [0.0]}
        self.seen = {1}
        self.pair = (1, None)
        self.ordered = OrderedDict(a=1)
        self.counts = Counter()
        self.lists = defaultdict(list)
        self.matrix = numpy.zeros((2, 2))
        self.names = numpy.array(["a"])
        self.functions = {"len": len}
        self.function = len
        self.inner = [Metric("inner"), (1, Ledger())]


def filled():
    holder = Holder()
    holder.recent.extend(torch.tensor(float(i)) for i in range(5))
    holder.sums = {"a": torch.arange(2), ("b", 1): [2.5]}
    holder.seen = {2, 3}
    holder.pair = (2, "x")
    holder.ordered = OrderedDict(a=2)
    holder.counts.update("aab")
    holder.lists["x"].append(1)
    holder.matrix += 3
    holder.inner[0].count = 7
    holder.inner[1][1]._counts = [1.0, 2.0]
    return holder


def test_data_comes_back_as_it_was_and_nothing_else():
    saved = wire.decode(wire.encode(metric_state.collect(filled(), mid_epoch=True)))
    holder = Holder()
    metric_state.restore(holder, saved)
    assert isinstance(holder.recent, deque)
    assert holder.recent.maxlen == 3
    assert [float(each) for each in holder.recent] == [2.0, 3.0, 4.0]
    assert torch.equal(holder.sums["a"], torch.arange(2))
    assert holder.sums["b", 1] == [2.5]
    assert (holder.seen, holder.pair) == ({2, 3}, (2, "x"))
    assert holder.inner[0].count == 7
    assert holder.inner[1][1]._counts == [1.0, 2.0]
    # As the kind of dict that is there.
    assert holder.ordered == OrderedDict(a=2)
    assert holder.counts == Counter("aab")
    assert holder.lists["x"] == [1]
    assert holder.lists["y"] == []
    assert holder.matrix.tolist() == [[3, 3], [3, 3]]
    assert holder.names.tolist() == ["a"]
    assert holder.functions == {"len": len}
    assert holder.function is len


def test_a_ledger_is_left_out_at_the_end_of_an_epoch():
    holder = Holder()
    metric_state.restore(holder, metric_state.collect(filled(), mid_epoch=False))
    assert holder.inner[0].count == 7
    assert holder.inner[1][1]._counts == []


def gathering(batches, kind):
    """A list with sums and gathered rows of so many batches of three."""
    rows = torch.ones(3, 2)
    state = {torchbearer.X: rows, torchbearer.Y_TRUE: rows, torchbearer.Y_PRED: rows}
    state |= {torchbearer.BATCH: 1, torchbearer.LOSS: torch.ones(()), torchbearer.GENERATOR: None}
    rows_of = EpochLambda("rows", lambda *_: 0.0, running=False)
    made = kind(["loss", to_dict(rows_of)])
    made.train()
    made.reset(state)
    for _ in range(batches):
        made.process(state)
    return made


@pytest.mark.parametrize(
    ("kind", "name", "odd", "words"),
    [
        (
            PooledMetricList,
            "_y_pred",
            torch.ones(2, 2),
            "the number of rows in its '_y_pred' is 2, not 6",
        ),
        (PooledMetricList, "_y_true", None, "the number of rows in its '_y_true' is 0, not 6"),
        (MetricList, "_y_true", None, "targets or predictions, and not both"),
        (MetricList, "_sum", torch.ones(2), "'_sum' of the metric Mean is .*, not one number"),
    ],
)
def test_sums_and_rows_that_do_not_go_with_the_batches_are_refused(kind, name, odd, words):
    saved = metric_state.collect(gathering(2, kind), mid_epoch=True)
    metric_state.check(gathering(0, kind), saved)
    next(held for held in saved.values() if name in held)[name] = odd
    with pytest.raises(checked.Unexpected, match=words):
        metric_state.check(gathering(0, kind), saved)


def test_the_ids_of_another_process_are_not_put_back():
    saved = metric_state.collect(gathering(2, PooledMetricList), mid_epoch=True)
    saved[""]["_seen"] = torch.ones(2)
    restored = gathering(0, PooledMetricList)
    seen = list(restored._seen)
    metric_state.restore(restored, saved)
    assert restored._seen == seen
    assert restored._sizes == [3, 3]


def test_a_running_mean_of_several_numbers():
    def made():
        return RunningMean("rows", batch_size=2, step_size=1, dim=0)

    metric = made()
    metric.train()
    metric.reset({})
    metric.process(torch.ones(3, 2))
    saved = wire.decode(wire.encode(metric_state.collect(metric, mid_epoch=True)))
    restored = made()
    restored.reset({})
    metric_state.restore(restored, saved)
    assert restored._result == [1.0, 1.0]
