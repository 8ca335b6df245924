"""Resuming in mid-epoch reads no item a second time, and gives the bits of the whole run."""

import functools
import os
import random
from pathlib import Path

import numpy
import pytest
import torch
import torchbearer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchbearer.callbacks import on_start_training

from tests.programs import Noisy, Stopped, assert_same, build, failing, outcome
from tests.ranks import RankPool
from tests.resumed import READ, Counted, resumed, run
from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints import memory
from torchbearer_ddp.checkpoints.worker_states import WorkerStates
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives


class AtOnce(Counted):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Pairs(Counted):
    """Each item is a batch."""

    def __getitem__(self, index):
        items = [super(Pairs, self).__getitem__(2 * index + each) for each in range(2)]
        return tuple(map(torch.stack, zip(*items, strict=True)))


class Own(Sampler):
    """Draws its order during the epoch, from a generator that nothing else uses."""

    def __init__(self):
        self.rng = random.Random(4)

    def __len__(self):
        return 20

    def __iter__(self):
        for _ in range(20):
            yield self.rng.randrange(24)


def generator():
    return torch.Generator().manual_seed(5)


def distributed():
    return DistributedSampler(
        Noisy(), collectives.world_size(), collectives.rank(), shuffle=True, seed=3
    )


LOADERS = {
    "in order": lambda: DataLoader(Counted(), batch_size=2),
    "shuffled": lambda: DataLoader(Counted(), batch_size=2, shuffle=True),
    "uneven": lambda: DataLoader(Counted(), batch_size=5, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        Counted(), batch_size=2, shuffle=True, generator=generator()
    ),
    "with replacement": lambda: DataLoader(
        Counted(), 2, sampler=RandomSampler(Noisy(), True, 72, generator=generator())
    ),
    "weighted": lambda: DataLoader(
        Counted(), 2, sampler=WeightedRandomSampler(torch.arange(1.0, 25), 24)
    ),
    "own sampler": lambda: DataLoader(Counted(), 2, sampler=Own()),
    "batches": lambda: DataLoader(
        Counted(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 3, drop_last=True)
    ),
    "at once": lambda: DataLoader(AtOnce(), batch_size=2, shuffle=True),
    "no batches": lambda: DataLoader(Pairs(), batch_size=None, sampler=RandomSampler(range(12))),
    "subset": lambda: DataLoader(Subset(Counted(), range(20)), batch_size=2, shuffle=True),
    "distributed": lambda: DataLoader(Counted(), batch_size=2, sampler=distributed()),
}


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as started:
        yield started


@pytest.mark.parametrize("kind", LOADERS)
def test_no_item_is_read_twice(tmp_path, kind):
    for at in (2, 4, 2 * len(LOADERS[kind]()) - 1):
        read, trained = resumed(tmp_path / str(at), LOADERS[kind], at)
        assert read == trained


@pytest.mark.parametrize("at", [6, 13, 25, 26])
@pytest.mark.parametrize("kind", ["shuffled", "own sampler", "own generator"])
def test_a_loader_that_starts_over_within_an_epoch(tmp_path, kind, at):
    read, trained = resumed(tmp_path, LOADERS[kind], at, steps=30)
    assert read == trained == 2 * (60 - at + 1)


def on_ranks(folder, kind, steps):
    read, trained = resumed(folder, LOADERS[kind], 4 if steps is None else 5, steps=steps)
    assert read == trained


@pytest.mark.parametrize("steps", [None, 17])
@pytest.mark.parametrize("kind", LOADERS)
def test_no_item_is_read_twice_on_ranks(tmp_path, pool, kind, steps):
    pool.run(functools.partial(on_ranks, tmp_path, kind, steps))


def test_accumulated_gradients(tmp_path):
    read, trained = resumed(tmp_path, LOADERS["shuffled"], 8, every_steps=1, accumulate=3)
    assert read == trained < 2 * 24


def peeking(hook):
    """A callback that reads the first batch of each epoch as well."""

    def peek(state):
        next(iter(state[torchbearer.SELF].state[torchbearer.TRAIN_DATA][0]))

    return getattr(torchbearer.callbacks, hook)(peek)


@pytest.mark.parametrize("hook", ["on_start_epoch", "on_start_training"])
@pytest.mark.parametrize("kind", ["shuffled", "own sampler"])
def test_a_callback_that_starts_the_loader_too(tmp_path, kind, hook):
    read, trained = resumed(tmp_path, LOADERS[kind], 5, peeking(hook))
    assert read == trained + 2 * 2


def test_a_callback_that_chooses_other_batches(tmp_path):
    @on_start_training
    def choose(state):
        state[torchbearer.ITERATOR] = iter(list(state[torchbearer.GENERATOR])[::-1])

    resumed(tmp_path, LOADERS["shuffled"], 5, choose)


# Worker processes: their random numbers go on where they were.


class InWorkers(Noisy):
    """Draws in workers from the process's generators and its own; a file says what was read."""

    def __init__(self, log):
        super().__init__()
        self.log = str(log)
        self.rngs = [numpy.random.default_rng(3), random.Random(4)]

    def __getitem__(self, index):
        with Path(self.log).open("a") as log:
            log.write(f"{index}\n")
        x, y = super().__getitem__(index)
        info = get_worker_info()
        return x + float(self.rngs[0].random()) + self.rngs[1].random() + info.id, y


class Plain(InWorkers):
    def __getitem__(self, index):
        with Path(self.log).open("a") as log:
            log.write(f"{index}\n")
        return self.x[index], self.y[index]


class AllInWorkers(InWorkers):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Remembers(InWorkers):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        self.count = getattr(self, "count", 0) + 1
        return x + self.count / 100, y


def seeded(worker):
    random.seed(worker)


def with_workers(dataset, log, count=2, **options):
    options = {"batch_size": 2, "shuffle": True, "multiprocessing_context": "fork"} | options
    return DataLoader(dataset(log), num_workers=count, **options)


@functools.cache
def whole_with_workers(*callbacks, epochs, **options):
    """The outcome with forked workers, which start fastest."""
    options["multiprocessing_context"] = "fork"
    loader = functools.partial(with_workers, log=os.devnull, **options)
    return run(loader, *callbacks, epochs=epochs)[0]


def check_workers(folder, at, *callbacks, again=0, epochs=2, **options):
    """What was read again, by all ranks that share this folder."""
    folder.mkdir(exist_ok=True, parents=True)
    # Two files: workers of the run that failed may still be reading ahead.
    log, log_again = (folder / f"{name}-{collectives.rank()}" for name in ("read", "read-again"))
    loader = functools.partial(with_workers, log=log, **options)
    expected = whole_with_workers(*callbacks, epochs=epochs, **options)
    with pytest.raises(Stopped):
        saving = Checkpoint(folder, every_steps=at - 1)
        run(loader, *callbacks, failing(at), saving, epochs=epochs)
    finish_writing()
    collectives.barrier()
    loader = functools.partial(loader, log=log_again)
    found, _, trained = run(loader, *callbacks, Checkpoint(folder), epochs=epochs)
    assert_same(found, expected)
    assert len(log_again.read_text().split()) == trained + again


@pytest.mark.parametrize("at", [2, 3, 6, 15])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_go_on_with_their_random_numbers(tmp_path, at, count):
    check_workers(tmp_path, at, dataset=InWorkers, count=count)


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": Plain},
        {"dataset": InWorkers, "prefetch_factor": 5},
        {"dataset": InWorkers, "worker_init_fn": seeded},
        {"dataset": InWorkers, "multiprocessing_context": "spawn", "epochs": 1},
        {"dataset": InWorkers, "batch_size": 5, "drop_last": True},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_kinds_of_workers(tmp_path, options):
    check_workers(tmp_path, 4, **options)


def test_a_worker_that_reads_batches_at_once_has_its_turn(tmp_path):
    check_workers(tmp_path, 4, again=2, dataset=AllInWorkers)


def test_workers_with_a_memory_are_replayed(tmp_path):
    check_workers(tmp_path, 5, again=8, dataset=Remembers)


def test_workers_of_a_run_that_is_interrupted_twice(tmp_path):
    loader = functools.partial(with_workers, InWorkers, tmp_path / "read")
    expected, *_ = run(loader)
    for at in (6, 2, 2):
        with pytest.raises(Stopped):
            run(loader, failing(at), Checkpoint(tmp_path / "runs", every_steps=1))
        finish_writing()
    found, _, trained = run(loader, Checkpoint(tmp_path / "runs"))
    assert trained == 48 - 2 * 7
    assert_same(found, expected)


def test_a_start_that_fails_leaves_the_loader_as_it_was(tmp_path):
    loader = with_workers(InWorkers, tmp_path / "read")
    own = [loader.collate_fn, loader.worker_init_fn, loader.batch_sampler]
    with pytest.raises(Stopped):
        run(lambda: loader, failing(5), Checkpoint(tmp_path / "runs", every_steps=1))
    finish_writing()
    seen = []

    @on_start_training
    def fail(state):
        seen.extend([loader.collate_fn, loader.worker_init_fn, loader.batch_sampler])
        raise Stopped

    with pytest.raises(Stopped):
        run(lambda: loader, fail, Checkpoint(tmp_path / "runs"))
    assert not any(stand_in is mine for stand_in, mine in zip(seen, own, strict=True))
    assert [loader.collate_fn, loader.worker_init_fn, loader.batch_sampler] == own


@pytest.mark.parametrize("at", [2, 4])
def test_workers_on_ranks(tmp_path, pool, at):
    pool.run(functools.partial(check_workers, tmp_path, at, dataset=InWorkers))


@pytest.mark.parametrize("hook", ["on_start_epoch", "on_start_training"])
def test_a_callback_that_starts_the_workers_too(tmp_path, hook):
    """What each worker has drawn is then not known, so the batches are read again."""
    loader = functools.partial(with_workers, InWorkers, tmp_path / "read")
    resumed(tmp_path / "runs", loader, 4, peeking(hook))


def test_a_new_callback_that_starts_the_workers_too(tmp_path):
    """It comes after the loader of the training has drawn the order."""
    loader = functools.partial(with_workers, InWorkers, os.devnull)
    with pytest.raises(Stopped):
        run(loader, failing(4), Checkpoint(tmp_path, every_steps=3), epochs=1)
    finish_writing()
    found, *_ = run(loader, peeking("on_start_training"), Checkpoint(tmp_path), epochs=1)
    assert_same(found, whole_with_workers(dataset=InWorkers, epochs=1))


def other_collate(items):
    return torch.utils.data.default_collate(items)


def test_functions_that_are_set_during_a_run_stay(tmp_path):
    loader = with_workers(Plain, os.devnull)

    @torchbearer.callbacks.on_end_epoch
    def change(state):
        loader.collate_fn, loader.worker_init_fn = other_collate, seeded

    run(lambda: loader, change, Checkpoint(tmp_path), epochs=1)
    assert [loader.collate_fn, loader.worker_init_fn] == [other_collate, seeded]


# After three batches the first of two workers has an empty one that only gives it its turn.
@pytest.mark.parametrize(("done", "first"), [(0, 0), (3, None)])
def test_a_batch_without_items_is_collated_in_a_worker(done, first):
    loader = DataLoader(
        range(4),
        batch_sampler=[[], [0, 1], [], [2, 3]],
        collate_fn=len,
        num_workers=2,
        multiprocessing_context="fork",
    )
    WorkerStates(loader, [None] * 2, done).install(loader)
    assert list(loader) == [first, 2, 0, 2]


# What cannot be left out at the sampler is loaded again.


class Counting(Counted):
    """Its items depend on how many were read before."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __getitem__(self, index):
        self.count += 1
        x, y = super().__getitem__(index)
        return x + self.count / 100, y


class Marked(Counted):
    resumes_by_replay = True


class Stream(IterableDataset):
    def __iter__(self):
        data = Counted()
        return (data[index] for index in range(24))

    def __len__(self):
        return 24


class Eager(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__()))


REPLAYED = {
    "memory": lambda: DataLoader(Counting(), batch_size=2, shuffle=True),
    "marked": lambda: DataLoader(Marked(), batch_size=2, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
}


@pytest.mark.parametrize("kind", REPLAYED)
def test_what_cannot_be_skipped_is_replayed(tmp_path, kind):
    read, trained = resumed(tmp_path, REPLAYED[kind], 5, epochs=1)
    assert read == trained + 8


def test_a_loader_of_the_users_own_is_replayed(tmp_path):
    read, _ = resumed(tmp_path, lambda: Eager(Counted(), batch_size=2), 5)
    assert read == 48


class FromProcess(Sampler):
    """Draws during the epoch from the generator of the process, from which the items draw too."""

    def __init__(self):
        self.left = []

    def __len__(self):
        return 24

    def __iter__(self):
        self.left = list(range(24))
        while self.left:
            yield self.left.pop(random.randrange(len(self.left)))


def test_a_sampler_that_draws_in_between_the_items_is_replayed(tmp_path):
    read, trained = resumed(tmp_path, lambda: DataLoader(Counted(), 2, sampler=FromProcess()), 5)
    assert read == trained + 8


def test_a_batch_function_of_the_users_own_is_replayed(tmp_path):
    def run_twice(*callbacks):
        READ.clear()
        trial = build(*callbacks).with_train_generator(LOADERS["shuffled"](), steps=6)
        trial.with_val_generator(DataLoader(Noisy(), 2), steps=6)
        trial.with_loader(two_batches).run(1)
        return outcome(trial)

    expected = run_twice()
    with pytest.raises(Stopped):
        run_twice(failing(3), Checkpoint(tmp_path, every_steps=1))
    finish_writing()
    assert_same(run_twice(Checkpoint(tmp_path)), expected)
    assert len(READ) == 24


def two_batches(state):
    parts = [next(state[torchbearer.ITERATOR]) for _ in range(2)]
    state[torchbearer.X], state[torchbearer.Y_TRUE] = map(torch.cat, zip(*parts, strict=True))


class Remembering:
    def __init__(self):
        self.file = None
        self.nothing = None
        self.counts = {"here": [0]}
        self.array = numpy.zeros(3)
        self.tensor = torch.zeros(3)
        self.note = lambda: self.counts


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.counts["here"].append(1),
        lambda it: it.counts.update(there=1),
        lambda it: it.note()["here"].__setitem__(0, 2),
        lambda it: it.array.__setitem__(1, 3),
        lambda it: it.tensor.add_(1),
        lambda it: setattr(it, "nothing", 3),
        lambda it: setattr(it, "more", [3]),
    ],
)
def test_what_is_remembered_is_seen(change):
    it = Remembering()
    before = memory.of_parts(it)
    it.tensor.sum()  # to read is not to write
    assert not memory.has_changed(before, memory.of_parts(it))
    change(it)
    assert memory.has_changed(before, memory.of_parts(it))


def test_a_file_that_is_opened_when_it_is_needed_is_no_memory(tmp_path):
    it = Remembering()
    before = memory.of_parts(it)
    it.file = Remembering()
    it.file.file = (tmp_path / "file").open("w")
    assert not memory.has_changed(before, memory.of_parts(it))
    it.file.file.close()
    it.counts["here"].append(1)
    assert memory.has_changed(before, memory.of_parts(it))
