"""What metrics hold in mid-epoch: data comes back as it was, all else is left alone."""

from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import torch
from torchbearer.bases import Metric

from torchbearer_ddp.checkpoints import metric_state
from torchbearer_ddp.group import wire
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
