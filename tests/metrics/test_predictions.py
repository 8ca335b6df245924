"""predict() returns all predictions, in the order of the data set, on every rank."""

import pytest
import torch
import torchbearer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)
from torchbearer import Trial

from tests.ranks import ranks, run_ranks
from torchbearer_ddp.callbacks.data import ShardData, shard
from torchbearer_ddp.callbacks.metrics import SyncMetrics
from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.group import collectives


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "tensor":
            return x * 2
        if self.kind == "tuple":
            return x * 2, {"sum": x.sum(1)}
        if self.kind == "ragged":
            return x[:, : len(x)]
        return _Opaque()


class _Opaque:
    pass


def rows(count):
    return torch.arange(count * 3, dtype=torch.float32).view(count, 3)


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))

    def __len__(self):
        return self.count


def make_loader(kind, count):
    batches = BatchSampler(SequentialSampler(range(count)), 2, drop_last=False)
    return {
        "plain": lambda: DataLoader(rows(count), batch_size=2),
        "drop_last": lambda: DataLoader(rows(count), batch_size=2, drop_last=True),
        "targets": lambda: DataLoader(TensorDataset(rows(count), rows(count) * 2), batch_size=2),
        "batch sampler": lambda: DataLoader(rows(count), batch_sampler=batches),
        "no batches": lambda: DataLoader(list(rows(count).split(2)), batch_size=None),
        "stream": lambda: DataLoader(Stream(count), batch_size=2),
    }[kind]()


def predict(kind, count, output="tensor"):
    trial = Trial(
        Model(output),
        None,
        torch.nn.MSELoss(),
        ["loss"],
        [ShardData(), SyncMetrics()],
        verbose=0,
    )
    loader = make_loader(kind, count)
    trial.with_test_generator(loader).with_val_generator(loader)
    first = trial.predict()
    again = trial.predict(data_key=torchbearer.VALIDATION_DATA)
    return first, again


def same(found, expected):
    assert type(found) is type(expected)
    if torch.is_tensor(expected):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@pytest.mark.parametrize(
    "kind", ["plain", "drop_last", "targets", "batch sampler", "no batches", "stream"]
)
def test_predictions_are_those_of_one_process(kind):
    expected = predict(kind, 9)
    assert torch.equal(expected[0], rows(8 if kind == "drop_last" else 9) * 2)
    for found in run_ranks(predict, 2, (kind, 9)):
        same(found, expected)


@pytest.mark.parametrize("output", ["tensor", "tuple", "ragged"])
@pytest.mark.filterwarnings("ignore:Failed to format predictions")
def test_every_kind_of_output_with_an_empty_rank(output):
    expected = predict("plain", 3, output)
    for found in run_ranks(predict, 3, ("plain", 3, output)):
        same(found, expected)


@ranks(2)
def test_predictions_of_loaders_that_the_user_sharded_are_put_in_order():
    sampler = DistributedSampler(rows(5), shuffle=False)
    for loader in (
        DataLoader(rows(5), batch_size=2, sampler=sampler),
        shard(DataLoader(rows(5), batch_size=2), training=True),
    ):
        trial = Trial(Model("tensor"), callbacks=[SyncMetrics(), ShardData()], verbose=0)
        predictions = trial.with_test_generator(loader).predict()
        assert torch.equal(predictions, rows(5) * 2)


@ranks(2)
def test_without_sharding_each_rank_keeps_its_own_predictions():
    loader = DataLoader(rows(4) + collectives.rank(), batch_size=2)
    trial = Trial(Model("tensor"), callbacks=[ShardData(test=False), SyncMetrics()], verbose=0)
    predictions = trial.with_test_generator(loader).predict()
    assert torch.equal(predictions, (rows(4) + collectives.rank()) * 2)


@ranks(2)
def test_what_cannot_be_sent_raises_on_every_rank():
    trial = Trial(Model("opaque"), callbacks=[ShardData(), SyncMetrics()], verbose=0)
    trial.with_test_generator(DataLoader(rows(2), batch_size=2))  # rank 1 has nothing to send
    with pytest.raises((TypeError, DistributedError), match="_Opaque"):
        trial.predict()
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]
