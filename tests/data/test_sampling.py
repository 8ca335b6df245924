"""How items are divided between ranks, for every rank at once and without processes."""

import itertools
import math
import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchbearer_ddp.data.sampling import (
    Partition,
    Remainder,
    Repeated,
    ShardBatches,
    ShardIterable,
    ShardSampler,
    interleave,
    positions,
)

WORLDS = [1, 2, 3, 5]
TOTALS = [0, 1, 2, 4, 7, 12, 23]


def shares(total, world_size, remainder, block=1):
    partitions = [Partition(r, world_size, remainder, block) for r in range(world_size)]
    return [list(partition.items(range(total))) for partition in partitions]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("block", [1, 3])
def test_kept_shares_are_a_partition_with_known_positions(total, world_size, block):
    parts = shares(total, world_size, Remainder.KEEP, block)
    assert sorted(itertools.chain(*parts)) == list(range(total))
    for rank, mine in enumerate(parts):
        assert positions(len(mine), rank, world_size, block).tolist() == mine


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("total", TOTALS)
def test_padded_shares_are_equal_and_miss_nothing(total, world_size):
    parts = shares(total, world_size, Remainder.PAD)
    assert len({len(mine) for mine in parts}) == 1
    assert set(itertools.chain(*parts)) == set(range(total))
    everything = interleave(parts)
    assert everything[:total] == list(range(total))
    assert everything[total:] == [i % total for i in range(len(everything) - total)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("total", TOTALS)
def test_dropped_shares_are_equal_and_repeat_nothing(total, world_size):
    parts = shares(total, world_size, Remainder.DROP)
    assert interleave(parts) == list(range(total // world_size * world_size))


@pytest.mark.parametrize("remainder", Remainder)
@pytest.mark.parametrize("block", [1, 4])
def test_the_length_is_the_number_of_items(remainder, block):
    for total, world_size in itertools.product(TOTALS, WORLDS):
        for rank, mine in enumerate(shares(total, world_size, remainder, block)):
            assert Partition(rank, world_size, remainder, block).length(total) == len(mine)


def test_the_global_batch_is_the_one_of_a_single_process():
    parts = shares(24, 3, Remainder.PAD)
    for step in range(4):
        together = {i for mine in parts for i in mine[2 * step : 2 * step + 2]}
        assert together == set(range(6 * step, 6 * step + 6))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_have_equally_many_batches_and_repeat_only_what_they_must(world_size, batch):
    for total in range(1, 40):
        partitions = [Partition(r, world_size, Remainder.PAD, 1, batch) for r in range(world_size)]
        parts = [list(partition.items(range(total))) for partition in partitions]
        assert [partition.length(total) for partition in partitions] == list(map(len, parts))
        assert len({math.ceil(len(part) / batch) for part in parts}) == 1
        left = total % (world_size * batch)
        repeats = world_size - left if 0 < left < world_size else 0
        assert sum(map(len, parts)) == total + repeats
        assert {partition.repeats(total) for partition in partitions} == {repeats}
        # Step k of all ranks is batch k of one process.
        for step in range(math.ceil(total / (world_size * batch))):
            together = {i for mine in parts for i in mine[step * batch : (step + 1) * batch]}
            start = step * world_size * batch
            single = set(range(start, min(total, start + world_size * batch)))
            assert together >= single
            assert together == single or (repeats and total in range(start, start + world_size))


def test_an_endless_stream_can_be_divided():
    odd = Partition(1, 2, Remainder.PAD).items(itertools.count())
    assert list(itertools.islice(odd, 3)) == [1, 3, 5]


class PythonSampler:
    """A sampler of the user's own, which draws from python's generator."""

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(random.sample(range(20), 20))


SAMPLERS = {
    "random": lambda: RandomSampler(range(20)),
    "random with a generator": lambda: RandomSampler(
        range(20), generator=torch.Generator().manual_seed(3)
    ),
    "subset": lambda: SubsetRandomSampler(range(20)),
    "custom": PythonSampler,
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_ranks_draw_the_same_order_and_a_new_one_each_epoch(make):
    samplers = []
    for rank in range(3):
        torch.manual_seed(rank)  # the ranks' own streams differ
        random.seed(rank)
        samplers.append(ShardSampler(make(), Partition(rank, 3, Remainder.KEEP), seed=11))
    epochs = []
    for epoch in (0, 1, 0):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order = interleave([list(sampler) for sampler in samplers])
        assert sorted(order) == list(range(20))
        epochs.append(order)
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


def test_a_weighted_sampler_draws_the_same_order_on_every_rank():
    weights = torch.rand(10, generator=torch.Generator().manual_seed(0))
    whole = ShardSampler(
        WeightedRandomSampler(weights, 12), Partition(0, 1, Remainder.KEEP), seed=5
    )
    parts = [
        ShardSampler(WeightedRandomSampler(weights, 12), Partition(r, 2, Remainder.KEEP), seed=5)
        for r in range(2)
    ]
    assert interleave([list(part) for part in parts]) == list(whole)


def test_batches_are_not_split():
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    mine = ShardSampler(batches, Partition(1, 2, Remainder.KEEP), seed=0)
    assert list(mine) == [[3, 4, 5], [9]]
    assert len(mine) == 2


def test_drawing_leaves_every_generator_as_it_was():
    own = torch.Generator().manual_seed(8)
    sampler = ShardSampler(
        RandomSampler(range(9), generator=own), Partition(0, 2, Remainder.PAD), seed=1
    )
    before = torch.get_rng_state(), random.getstate(), own.get_state()
    list(sampler)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert torch.equal(before[2], own.get_state())
    assert own.initial_seed() == 8


def test_a_second_pass_in_an_epoch_has_a_new_order_but_reading_one_item_has_not():
    sampler = ShardSampler(RandomSampler(range(30)), Partition(0, 2, Remainder.PAD), seed=1)
    next(iter(sampler))
    first = list(sampler)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_inner_sampler_gets_the_epoch():
    class Inner(PythonSampler):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    inner = Inner()
    ShardSampler(inner, Partition(0, 2, Remainder.PAD), seed=1).set_epoch(4)
    assert inner.epoch == 4


class Numbers(IterableDataset):
    def __init__(self, stop):
        self.stop = stop

    def __iter__(self):
        return iter(range(self.stop))

    def __len__(self):
        return self.stop


def test_a_stream_is_sharded_and_its_attributes_can_be_used():
    stream = ShardIterable(Numbers(7), Partition(1, 2, Remainder.KEEP), seed=0)
    assert list(stream) == [1, 3, 5]
    assert len(stream) == 3
    stream.stop = 4
    assert stream.stop == 4
    assert list(pickle.loads(pickle.dumps(stream))) == [1, 3]


class Shuffled(IterableDataset):
    """Draws from every generator, at the start and from item to item."""

    def __iter__(self):
        items = random.sample(range(20), 20)
        while items:
            place = int(torch.randint(len(items), (1,))) if numpy.random.rand() < 2 else 0
            yield items.pop(place)

    def __len__(self):
        return 20


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_shuffled_stream_has_one_order_for_all_ranks_and_a_new_one_each_epoch(batch_size):
    streams = [
        ShardIterable(Shuffled(), Partition(r, 2, Remainder.KEEP), 5, batch_size) for r in range(2)
    ]
    orders = []
    for epoch in (0, 1, 0):
        parts = []
        for rank, stream in enumerate(streams):
            torch.manual_seed(rank)
            before = torch.get_rng_state()
            stream.set_epoch(epoch)
            parts.append(list(stream))
            assert torch.equal(before, torch.get_rng_state())
        orders.append(interleave(parts))
        assert sorted(orders[-1]) == list(range(20))
    assert orders[0] == orders[2] != orders[1]


def test_any_loader_is_divided_batch_by_batch():
    class Loader:
        def __iter__(self):
            return iter(random.sample(range(7), 7))

        def __len__(self):
            return 7

    loader, parts = Loader(), []
    for rank in range(3):
        random.seed(rank)
        shared = ShardBatches(loader, Partition(rank, 3, Remainder.PAD), seed=2)
        assert len(shared) == 3
        parts.append(list(shared))
        assert list(shared) != parts[-1]  # a second pass in an epoch has a new order
        shared.set_epoch(0)
        assert list(shared) == parts[-1]
    assert sorted(interleave(parts)[:7]) == list(range(7))


def test_a_loader_that_starts_over():
    assert list(Repeated([1, 2, 3], 7)) == [1, 2, 3, 1, 2, 3, 1]
    assert len(Repeated([1, 2, 3], 7)) == 7


def test_a_loader_that_gives_nothing_is_not_started_over_for_ever():
    class Empty:
        passes = 0

        def __iter__(self):
            self.passes += 1
            assert self.passes < 9
            return iter(())

    assert list(Repeated(Empty(), 7)) == []
