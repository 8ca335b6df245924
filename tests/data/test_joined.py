"""One process with the batches of all ranks: step by step the samples of their shares."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from torchbearer_ddp.data import loaders
from torchbearer_ddp.data.joined import concatenate, join_own, take_joined

SAMPLES = torch.arange(50)


class Stream(IterableDataset):
    def __len__(self):
        return 50

    def __iter__(self):
        return iter(torch.randperm(50).tolist())


def batches_of(loader):
    return [batch.tolist() for batch in loader]


LOADERS = {
    "shuffled": lambda: DataLoader(SAMPLES, 6, shuffle=True),
    "drop_last": lambda: DataLoader(SAMPLES, 6, shuffle=True, drop_last=True),
    "one_left": lambda: DataLoader(SAMPLES[:49], 6),
    "batch_sampler": lambda: DataLoader(
        SAMPLES, batch_sampler=BatchSampler(SequentialSampler(SAMPLES), 6, False)
    ),
    "stream": lambda: DataLoader(Stream(), 6),
    "list": lambda: list(SAMPLES.split(6)),
    "whole_items": lambda: DataLoader(SAMPLES.view(10, 5), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_each_step_has_the_samples_of_all_ranks(name, world_size):
    options = {"seed": 3, "training": True}
    make = LOADERS[name]
    shares = [
        batches_of(loaders.take_share(make(), rank, world_size, **options))
        for rank in range(world_size)
    ]
    loader, parts = take_joined(make(), world_size, seed=3)
    steps = 0
    for batch, *theirs in zip(loader, *shares, strict=True):
        rows = parts.take(len(batch))
        assert [batch[each].tolist() for each in rows] == theirs
        steps += 1
    assert steps == len(loader) > 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_size_of_all_ranks_stays(world_size):
    loader, _ = take_joined(DataLoader(SAMPLES, 6), world_size, seed=0, global_batch=True)
    # The last step may need a sample twice, where there are fewer than ranks.
    assert batches_of(loader)[:8] == [each.tolist() for each in SAMPLES[:48].split(6)]


def test_the_replicas_of_a_distributed_sampler_are_joined():
    def loader(replicas, rank):
        sampler = DistributedSampler(SAMPLES, replicas, rank)
        sampler.set_epoch(2)
        return DataLoader(SAMPLES, 6, sampler=sampler)

    joined, _ = join_own(loader(1, 0), 2)
    loaders.set_epoch(joined, 2)
    found = [sorted(batch) for batch in batches_of(joined)]
    pairs = zip(batches_of(loader(2, 0)), batches_of(loader(2, 1)), strict=True)
    assert found == [sorted([*one, *other]) for one, other in pairs]


def test_batches_of_other_shapes_are_refused():
    pair = {"x": torch.ones(2, 3), "y": [torch.ones(2)]}
    joined = concatenate([pair, pair])
    assert joined["x"].shape == (4, 3)
    assert joined["y"][0].shape == (4,)
    with pytest.raises(ValueError, match=r"cannot be joined into one.*\(2, 3\), \(2, 4\)"):
        concatenate([torch.ones(2, 3), torch.ones(2, 4)])
