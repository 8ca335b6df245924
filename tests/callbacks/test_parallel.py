"""The standard list of callbacks, and what happens if it is used wrongly."""

import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

from tests.ranks import run_ranks
from torchbearer_ddp import (
    ShardData,
    SyncGradients,
    SyncMetrics,
    SyncModel,
    data_parallel,
)


def test_the_list_is_a_list_of_the_four():
    kinds = [type(callback) for callback in data_parallel()]
    assert kinds == [SyncModel, ShardData, SyncGradients, SyncMetrics]
    assert ShardData not in map(type, data_parallel(shard=False))
    assert len(data_parallel() + [torchbearer.callbacks.Callback()]) == 5  # noqa: RUF005


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [*data_parallel(), *data_parallel()],
        lambda: [SyncGradients(weighted=False), *data_parallel()],
        lambda: [*data_parallel(), ShardData(global_batch=True)],
    ],
    ids=["the list", "SyncGradients", "ShardData"],
)
def test_twice_is_refused(callbacks):
    with pytest.raises(ValueError, match=r"is in the list of callbacks 2 times\. data_parallel"):
        Trial(None, callbacks=callbacks())


def test_without_the_star_is_refused():
    with pytest.raises(ValueError, match=r"Write a star before it: callbacks=\[\*data_parallel"):
        Trial(None, callbacks=[data_parallel()])


def test_a_global_batch_cannot_be_divided_without_sharding():
    with pytest.raises(ValueError, match="shard=False leaves them as they are"):
        data_parallel(shard=False, global_batch=True)


def train(count, **options):
    """The parameters and the history after two epochs."""
    torch.manual_seed(0)
    x, y = torch.randn(count, 3), torch.randn(count, 1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    callbacks = [*data_parallel(**options)]
    trial = Trial(model, optimizer, torch.nn.MSELoss(), ["loss"], callbacks, verbose=0)
    trial.with_train_generator(DataLoader(TensorDataset(x, y), batch_size=6))
    losses = [epoch["loss"] for epoch in trial.run(2)]
    return [p.detach().flatten().tolist() for p in model.parameters()], losses


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_global_batch_keeps_the_numbers_of_one_process(world_size):
    # The last batch is smaller.
    parameters, losses = train(18 + world_size, global_batch=True)
    for found, shown in run_ranks(train, world_size, (18 + world_size,), {"global_batch": True}):
        assert shown == pytest.approx(losses, rel=1e-5)
        for mine, single in zip(found, parameters, strict=True):
            assert mine == pytest.approx(single, rel=1e-5)
