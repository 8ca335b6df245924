"""The arithmetic of pooling, for every rank at once and without processes."""

import functools
import itertools

import pytest
import torch
import torchbearer
from torchbearer import metrics
from torchbearer.metrics import Mean, Std, Var

from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.data.loaders import Share
from torchbearer_ddp.data.sampling import Partition, Remainder
from torchbearer_ddp.metrics.leaves import leaves
from torchbearer_ddp.metrics.pooled_list import PooledMetricList
from torchbearer_ddp.metrics.pooling import (
    Ledger,
    added,
    average,
    empty,
    from_runs,
    in_order,
    needs_batches,
    pool,
    to_runs,
)
from torchbearer_ddp.metrics.predictions import assemble

KINDS = [
    lambda: Mean("m"),
    lambda: Var("m"),
    lambda: Std("m", unbiased=False),
    lambda: Mean("m", dim=0),
    lambda: Std("m", dim=0),
]


def ledger_of(metric, batches):
    ledger = Ledger()
    for batch in batches:
        empty(metric)
        metric.process(batch)
        ledger.take(metric)
    return ledger.entry()


def final(metric, attributes):
    vars(metric).update(attributes)
    return metric.process_final()


def sizes_of(batches):
    return torch.tensor([len(batch) for batch in batches], dtype=torch.int64)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_batches_of_one_process_add_up_to_its_value_to_the_last_bit(make, world_size):
    generator = torch.Generator().manual_seed(1)
    batches = [torch.rand(size, 3, generator=generator) for size in (5, 5, 5, 5, 5, 5, 2)]
    single = make()
    for batch in batches:
        single.process(batch)
    shares = [
        list(Partition(r, world_size, Remainder.KEEP).items(batches)) for r in range(world_size)
    ]
    pooled = pool(
        [ledger_of(make(), share) for share in shares],
        [sizes_of(share) for share in shares],
        by_step=False,
    )
    assert final(make(), pooled) == single.process_final()


@pytest.mark.parametrize("make", KINDS[:3])
def test_a_long_pass_is_added_up_like_a_short_one(make):
    values = torch.rand(700, generator=torch.Generator().manual_seed(2))
    single = make()
    for value in values:
        single.process(value)
    shares = [values[rank::2] for rank in range(2)]
    sizes = [torch.full((350,), 4)] * 2
    pooled = pool([ledger_of(make(), share) for share in shares], sizes, by_step=False)
    assert final(make(), pooled) == single.process_final()


@pytest.mark.parametrize("make", KINDS[:3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_a_batch_weigh_as_much_as_they_have_samples(make, world_size):
    samples = torch.rand(23, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    single = make()
    for batch in samples.split(2 * world_size):
        single.process(batch.mean())
    shares = [samples[rank::world_size].split(2) for rank in range(world_size)]
    pooled = pool(
        [ledger_of(make(), [part.mean() for part in share]) for share in shares],
        [sizes_of(share) for share in shares],
        by_step=True,
    )
    assert final(make(), pooled) == pytest.approx(single.process_final(), abs=1e-12)


def test_a_summed_loss_is_summed_over_the_ranks():
    samples = torch.arange(10, dtype=torch.float64)
    shares = [samples[rank::2].split(3) for rank in range(2)]
    pooled = pool(
        [ledger_of(Mean("loss"), [part.sum() for part in share]) for share in shares],
        [sizes_of(share) for share in shares],
        by_step=True,
        of_loss=True,
        summed=True,
    )
    assert final(Mean("loss"), pooled) == (sum(range(6)) + sum(range(6, 10))) / 2


def test_values_of_samples_do_not_depend_on_how_they_were_batched():
    samples = torch.rand(11, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    shares = [samples[rank::2].split(1) for rank in range(2)]  # one sample a batch, shape (1,)
    entries = [ledger_of(Mean("acc"), share) for share in shares]
    pooled = pool(entries, [sizes_of(share) for share in shares], by_step=True)
    assert final(Mean("acc"), pooled) == pytest.approx(samples.mean().item(), abs=1e-15)


def column(values, *, counts=32.0):
    """The entry of a mean with these sums of batches."""
    ledger = Ledger()
    ledger._columns, ledger._counts = {"_sum": [values]}, [counts] * len(values)
    return ledger.entry()


def one_by_one(columns):
    """The sum that one process would compute: batch after batch, rank after rank in each step."""
    longest = max(map(len, columns))
    batches = [c[step] for step in range(longest) for c in columns if step < len(c)]
    return functools.reduce(torch.add, batches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (40,)])
def test_batches_are_added_in_the_order_and_precision_of_one_process(dtype, shape):
    generator = torch.Generator().manual_seed(5)
    random = functools.partial(torch.rand, generator=generator, dtype=torch.float64)
    values = [random(n, *shape).to(dtype) for n in (30, 30, 29)]
    pooled = pool([column(each) for each in values], [torch.full((30,), 32)] * 3, by_step=False)
    assert pooled["_sum"].dtype == dtype
    assert torch.equal(pooled["_sum"], one_by_one(values))
    # Of so many sums another order would change some.
    assert not shape or not torch.equal(pooled["_sum"], one_by_one([torch.cat(values)]))


@pytest.mark.parametrize("by_step", [False, True])
def test_whole_numbers_are_added_on_each_rank_with_the_same_result(by_step):
    generator = torch.Generator().manual_seed(6)
    values = [torch.randint(0, 33, (50,), generator=generator).float() for _ in range(4)]
    entries = [column(each) for each in values]
    sums = [added(each, by_step=by_step) for each in entries]
    assert all(len(each["_sum"]) == 0 for each in sums)
    assert not needs_batches([*sums, None], by_step=by_step)
    sizes = [torch.full((50,), 32)] * 5
    assert pool([*sums, None], sizes, by_step=by_step) == pool(
        [*entries, None], sizes, by_step=by_step
    )


@pytest.mark.parametrize("odd", [0.5, -1.0, -0.0, float("nan"), float("inf")])
def test_other_numbers_are_not_added_on_each_rank(odd):
    whole, other = column(torch.ones(3)), column(torch.tensor([1.0, odd]))
    assert added(other, by_step=False) is other
    assert needs_batches([added(whole, by_step=False), other], by_step=False)
    assert not needs_batches([whole, other], by_step=False)


def test_whole_numbers_that_a_sum_would_round_are_added_in_order():
    values = [torch.tensor([2.0**24 - 1, 1.0]), torch.tensor([1.0, 1.0])]
    sums = [added(column(each), by_step=False) for each in values]
    assert needs_batches(sums, by_step=False)
    assert one_by_one(values) == 2**24  # one process loses the last two
    assert not needs_batches([added(column(each), by_step=True) for each in values], by_step=True)
    assert not needs_batches([added(column(values[1]), by_step=False)], by_step=False)


def test_one_value_for_each_step_is_not_added_up():
    entry = column(torch.ones(3), counts=1.0)
    assert added(entry, by_step=True) is entry
    assert added(entry, by_step=False) is not entry


@pytest.mark.parametrize("values", [[], [4], [32, 32, 32, 7], [1, 2, 1]])
def test_runs_are_the_values_again(values):
    assert from_runs(to_runs(torch.tensor(values, dtype=torch.int64))).tolist() == values


def test_nothing_pools_to_nothing():
    assert pool([None, None], [torch.zeros(0), torch.zeros(0)], by_step=True) is None


@pytest.mark.parametrize("block", [1, 2, 4])
def test_rows_come_back_in_order(block):
    for total, world_size in itertools.product((0, 1, 5, 12, 13), (1, 2, 3)):
        rows = torch.arange(total)
        parts = [
            list(Partition(r, world_size, Remainder.KEEP, block).items(rows))
            for r in range(world_size)
        ]
        found = in_order([torch.stack(part) if part else None for part in parts], block)
        assert total == 0 or torch.equal(found, rows)


def test_averages():
    assert average([1, None, 2]) == 1.5
    assert average([None, None]) is None
    assert average([{"a": 1.0, "b": [1, 3]}, {"a": 2.0, "b": [3, 5]}]) == {"a": 1.5, "b": [2, 4]}
    assert torch.equal(average([torch.ones(2), torch.zeros(2)]), torch.full((2,), 0.5))
    assert average(["same", "same"]) == "same"


def test_the_leaves_of_a_tree():
    tree = metrics.MetricList(["acc", "loss", "epoch", metrics.std(metrics.Loss)()])
    found = [(type(leaf.metric).__name__, leaf.of_loss) for leaf in leaves(tree)]
    assert found == [
        ("Mean", False),
        ("RunningMean", False),
        ("Mean", True),
        ("RunningMean", True),
        ("Epoch", False),
        ("Mean", True),
        ("RunningMean", True),
        ("Std", True),
    ]


def test_the_batch_size_is_that_of_the_first_input():
    state = torchbearer.State()
    assert batch_size(state) == 1
    for value, size in [(torch.rand(3, 2), 3), ({"a": (torch.rand(4), 1)}, 4), (None, 1), ([], 1)]:
        state[torchbearer.X] = value
        assert batch_size(state) == size


def test_a_pooled_list_of_one_rank_is_an_ordinary_list():
    y_pred, y_true = torch.eye(3)[[0, 1, 2, 2]], torch.tensor([0, 1, 1, 2])
    state = torchbearer.State()
    state.update(
        {
            torchbearer.CRITERION: torch.nn.CrossEntropyLoss(),
            torchbearer.X: torch.rand(4, 2),
            torchbearer.Y_PRED: y_pred,
            torchbearer.Y_TRUE: y_true,
            torchbearer.LOSS: torch.tensor(0.7),
            torchbearer.DEVICE: "cpu",
            torchbearer.BATCH: 0,
        }
    )
    count = metrics.ToDict(metrics.EpochLambda("rows", lambda p, t: len(t), running=False))
    pooled = PooledMetricList.over(metrics.MetricList(["acc", "loss", count]))
    pooled.train()
    pooled.reset(state)
    for _ in range(2):
        pooled.process(state)
    values = pooled.process_final(state)
    assert (values["acc"], values["loss"], values["rows"]) == (0.75, pytest.approx(0.7), 8)
    assert pooled.process_final(state) == values
    pooled.process(state)
    assert pooled.process_final(state)["rows"] == 12
    pooled.reset(state)
    assert pooled.finish(state) == {}


def test_predictions_are_put_in_order():
    rows = torch.arange(7.0)
    whole = Share(None, 0, whole_batches=True)
    assert torch.equal(assemble([[rows[:2], rows[4:6]], [rows[2:4], rows[6:]]], whole), rows)
    assert assemble([[(1, 2)], [(3, 4)]], whole) == [(1, 2), (3, 4)]
    assert assemble([[], []], whole) == []
    dealt = Share(None, 0, whole_batches=False, total=7)
    padded = [[rows[[0, 2]], rows[[4, 6]]], [rows[[1, 3]], rows[[5, 0]]]]
    assert torch.equal(assemble(padded, dealt), rows)
