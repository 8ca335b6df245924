"""torchdata's StatefulDataLoader: by its own state it gives the bits of the whole run."""

import contextlib
import functools
import logging
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torchbearer
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchbearer.callbacks import on_start_training, on_step_training
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from tests.programs import Noisy, Stopped, assert_same, failing
from tests.ranks import RankPool
from tests.resumed import run
from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints import file
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives, wire


class Logged(Noisy):
    """Each item draws from the generators of its process; a file says what was read."""

    def __init__(self, log):
        super().__init__()
        self.log = str(log)

    def __getitem__(self, index):
        with Path(self.log).open("a") as log:
            log.write(f"{index}\n")
        return super().__getitem__(index)


class Pairs(Logged):
    """Each item is a batch."""

    def __getitem__(self, index):
        items = [super(Pairs, self).__getitem__(2 * index + each) for each in range(2)]
        return tuple(map(torch.stack, zip(*items, strict=True)))


class Remembers(Logged):
    """Its items depend on how many were read before."""

    def __init__(self, log):
        super().__init__(log)
        self.count = 1

    def __getitem__(self, index):
        self.count += 1
        x, y = super().__getitem__(index)
        return x + self.count / 100, y


class SavesItself(Remembers):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Fractional(SavesItself):
    """Its state is not plain data."""

    def state_dict(self):
        return {"count": Fraction(self.count)}


class Own(Sampler):
    """Draws during the epoch, from a generator that nothing else uses."""

    def __init__(self):
        self.rng = random.Random(4)

    def __len__(self):
        return 20

    def __iter__(self):
        for _ in range(20):
            yield self.rng.randrange(24)


class OwnThatSaves(Own):
    """Saves its place, and the generator at its start."""

    def __init__(self):
        super().__init__()
        self.start, self.done, self.next = self.rng.getstate(), 0, 0

    def __iter__(self):
        self.done, self.next = self.next, 0
        if not self.done:
            self.start = self.rng.getstate()
        self.rng.setstate(self.start)
        drawn = [self.rng.randrange(24) for _ in range(20)]
        for each in drawn[self.done :]:
            self.done += 1
            yield each

    def state_dict(self):
        version, words, gauss = self.start
        return {"start": [version, list(words), gauss], "done": self.done}

    def load_state_dict(self, state):
        version, words, gauss = state["start"]
        self.start, self.next = (version, tuple(words), gauss), state["done"]


class Stream(IterableDataset):
    """Every worker, and every rank, reads its own items; the state is that of the data set."""

    shards_itself = True

    def __init__(self, log):
        self.data, self.next = Logged(log), 0

    def __iter__(self):
        info, count = get_worker_info(), collectives.world_size()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        mine = range(collectives.rank() * workers + worker, 24, count * workers)
        self.next %= len(mine)  # the last batch is not followed by a look for another
        while self.next < len(mine):
            self.next += 1
            yield self.read(mine[self.next - 1])

    def read(self, index):
        self.data[index]
        return self.data.x[index], self.data.y[index]

    def __len__(self):
        return 24 // collectives.world_size()


class StreamThatSaves(Stream):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Divided(StreamThatSaves):
    """All ranks read the same, and ShardData divides it."""

    shards_itself = False

    def __iter__(self):
        self.next %= 24
        while self.next < 24:
            self.next += 1
            yield self.read(self.next - 1)

    def __len__(self):
        return 24


class NoisyStream(StreamThatSaves):
    def read(self, index):
        return self.data[index]


class Iterated(Stream):
    """The state is that of the iterator."""

    def __iter__(self):
        return Cursor(self)


class Cursor(StreamThatSaves):
    def __init__(self, stream):
        self.data, self.next = stream.data, 0
        self.items = super().__iter__()
        self.rng = random.Random(1)  # a generator that was not there before is no obstacle

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


class Quiet(Stream):
    """It draws nothing."""

    def read(self, index):
        with Path(self.data.log).open("a") as log:
            log.write(f"{index}\n")
        return self.data.x[index], self.data.y[index]


class QuietThatSaves(Quiet, StreamThatSaves):
    pass


class QuietIterated(Quiet, Iterated):
    def __iter__(self):
        found = Cursor(self)
        found.read = self.read
        return found


def generator():
    return torch.Generator().manual_seed(5)


def distributed():
    return DistributedSampler(
        Noisy(), collectives.world_size(), collectives.rank(), shuffle=True, seed=3
    )


def made(dataset, log, workers=0, **options):
    options = {"batch_size": 2, **options}
    if workers:
        options["multiprocessing_context"] = "fork"
    return StatefulDataLoader(dataset(log), num_workers=workers, **options)


EXACT = {
    "in order": functools.partial(made, Logged),
    "shuffled": functools.partial(made, Logged, shuffle=True),
    "uneven": functools.partial(made, Logged, shuffle=True, batch_size=5, drop_last=True),
    "own generator": lambda *a: made(Logged, *a, shuffle=True, generator=generator()),
    "with replacement": lambda *a: made(
        Logged, *a, sampler=StatefulRandomSampler(Noisy(), True, 72, generator())
    ),
    "torch's order": lambda *a: made(Logged, *a, sampler=RandomSampler(Noisy())),
    "weighted": lambda *a: made(
        Logged, *a, sampler=WeightedRandomSampler(torch.arange(1.0, 25), 24)
    ),
    "batches": lambda *a: made(
        Logged, *a, batch_size=1, batch_sampler=BatchSampler(RandomSampler(Noisy()), 3, True)
    ),
    "no batches": lambda *a: made(Pairs, *a, batch_size=None, sampler=RandomSampler(range(12))),
    "distributed": lambda *a: made(Logged, *a, sampler=distributed()),
    "own sampler": lambda *a: made(Logged, *a, sampler=OwnThatSaves()),
    "memory": functools.partial(made, SavesItself, shuffle=True),
    "stream": functools.partial(made, QuietThatSaves),
    "iterated": functools.partial(made, QuietIterated),
}


@functools.cache
def whole(make, workers, *callbacks, **options):
    """The outcome of a run that is not interrupted."""
    return run(lambda: make(os.devnull, workers), *callbacks, **options)[0]


def interrupted(folder, make, workers, at, *callbacks, save=None, **options):
    """Runs to a batch and fails there; returns how the next run makes its loader, and a log."""
    folder.mkdir(exist_ok=True, parents=True)
    # Two files: workers of the run that failed may still be reading ahead.
    log, log_again = (folder / f"{name}-{collectives.rank()}" for name in ("read", "read-again"))
    with pytest.raises(Stopped):
        saving = Checkpoint(folder, every_steps=save or at - 1, keep=None)
        run(lambda: make(log, workers), *callbacks, failing(at), saving, **options)
    finish_writing()
    collectives.barrier()
    log_again.write_text("")
    return log_again


def resumed(folder, make, workers, at, *callbacks, resume="auto", **options):
    """How many items the second part of an interrupted run read more than it trained on."""
    expected = whole(make, workers, *callbacks, **options)
    log = interrupted(folder, make, workers, at, *callbacks, **options)
    saving = Checkpoint(folder if resume == "auto" else folder / "next", resume=resume)
    found, _, trained = run(lambda: make(log, workers), *callbacks, saving, **options)
    assert_same(found, expected)
    return len(log.read_text().split()) - trained


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as started:
        yield started


@pytest.fixture
def said(caplog):
    """What the log says of the loader."""
    caplog.set_level(logging.INFO, "torchbearer_ddp")
    return lambda: [m for m in caplog.messages if "StatefulDataLoader" in m]


BY_STATE = "data: the StatefulDataLoader continues by its own state"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", EXACT)
def test_no_item_is_read_twice(tmp_path, said, kind, workers):
    steps = len(EXACT[kind](os.devnull, 0))
    places = (2, 4, 2 * steps - 1)
    for at in places if not workers else places[1:]:
        assert resumed(tmp_path / str(at), EXACT[kind], workers, at) == 0
    assert all(each.startswith(BY_STATE) for each in said())
    assert said()


def on_ranks(folder, kind, workers):
    assert resumed(folder, EXACT[kind], workers, 4) == 0


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(kind, 0) for kind in EXACT] + [(kind, 2) for kind in ("shuffled", "memory", "stream")],
)
def test_no_item_is_read_twice_on_ranks(tmp_path, pool, kind, workers):
    pool.run(functools.partial(on_ranks, tmp_path, kind, workers))


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("shuffled", 0), ("batches", 0), ("stream", 0), ("shuffled", 2), ("batches", 2)],
)
def test_after_the_last_step_of_an_epoch(tmp_path, kind, workers):
    make, steps = EXACT[kind], len(EXACT[kind](os.devnull, 0))
    path = tmp_path / f"step-{steps:07d}.pt"
    assert resumed(tmp_path, make, workers, steps + 1, resume=path) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_interrupted_twice(tmp_path, workers):
    make = EXACT["memory"]
    for at in (6, 2, 2):
        log = interrupted(tmp_path, make, workers, at, save=1)
    found, _, trained = run(lambda: make(log, workers), Checkpoint(tmp_path))
    assert_same(found, whole(make, workers))
    assert len(log.read_text().split()) == trained == 48 - 2 * 7


def test_batches_since_the_last_snapshot_are_made_again(tmp_path, said):
    make = functools.partial(made, Logged, shuffle=True, snapshot_every_n_steps=3)
    assert resumed(tmp_path, make, 2, 6) == 2 * (5 - 3)
    assert said() == [BY_STATE]


def test_its_state_is_that_of_the_whole_run_afterwards(tmp_path):
    """Users may save it as well."""

    def states(*callbacks):
        seen = {}

        @on_step_training
        def note(state):
            loader = state[torchbearer.GENERATOR]
            place = state[torchbearer.EPOCH], state[torchbearer.BATCH]
            seen[place] = wire.encode(loader.state_dict()).tolist()

        with contextlib.suppress(Stopped):
            run(lambda: EXACT["memory"](os.devnull, 0), note, *callbacks)
        finish_writing()
        return seen

    expected = states()
    states(failing(5), Checkpoint(tmp_path, every_steps=4))
    found = states(Checkpoint(tmp_path))
    assert len(found) == 20
    for place, state in found.items():
        assert state == expected[place], place


def test_validation_data_of_this_kind(tmp_path):
    def make(log, workers):
        return made(Logged, log, workers, shuffle=True)

    def with_validation(*callbacks):
        @torchbearer.callbacks.on_init
        def choose(state):
            loader = make(os.devnull, 0)
            state[torchbearer.SELF].with_val_generator(loader)

        return run(lambda: make(os.devnull, 0), choose, *callbacks)[0]

    expected = with_validation()
    with pytest.raises(Stopped):
        with_validation(failing(15), Checkpoint(tmp_path, every_steps=1))
    finish_writing()
    assert_same(with_validation(Checkpoint(tmp_path)), expected)


# What would not be exact is replayed.


REPLAYED = {
    "sampler": (lambda *a: made(Logged, *a, sampler=Own()), "Own has no state_dict"),
    "memory": (functools.partial(made, Remembers, shuffle=True), "what its data set remembers"),
    "not plain": (functools.partial(made, Fractional, shuffle=True), "its state was not saved"),
    "stream": (functools.partial(made, Stream), "what its data set remembers"),
    "marked": (
        functools.partial(made, type("Marked", (Logged,), {"resumes_by_replay": True})),
        "resumes_by_replay = True",
    ),
    "own class": (
        lambda *a: type(
            "Eager",
            (StatefulDataLoader,),
            {"__iter__": lambda s: iter([*super(type(s), s).__iter__()])},
        )(Logged(a[0]), 2),
        "has methods of its own",
    ),
}


@pytest.mark.parametrize("kind", REPLAYED)
def test_what_is_not_exact_is_replayed(tmp_path, said, kind):
    make, why = REPLAYED[kind]
    expected = 24 - 2 * 8 if kind == "own class" else 8
    assert resumed(tmp_path, make, 0, 5, epochs=1) == expected
    assert said()[-1].startswith("data: the StatefulDataLoader loads 4 batches again, because ")
    assert why in said()[-1]
    assert any("holds a fractions.Fraction" in each for each in said()) == (kind == "not plain")


@pytest.mark.parametrize("dataset", [Remembers, NoisyStream, Stream])
def test_workers_that_are_not_exact_are_replayed(tmp_path, said, dataset):
    make = functools.partial(made, dataset)
    assert resumed(tmp_path, make, 2, 5, epochs=1) == 8
    assert "loads 4 batches again" in said()[-1]


def test_persistent_workers_are_replayed(tmp_path):
    make = functools.partial(made, Logged, persistent_workers=True)
    assert resumed(tmp_path, make, 2, 5, epochs=1) == 8


@pytest.mark.parametrize(("at", "again"), [(6, 0), (13, 0), (14, 2 * 13)])
def test_a_loader_that_starts_over_within_an_epoch_is_replayed(tmp_path, at, again):
    assert resumed(tmp_path, EXACT["shuffled"], 0, at, steps=15) == again


def test_workers_of_a_loader_that_starts_over_within_an_epoch(tmp_path):
    for at in (6, 14):
        resumed(tmp_path / str(at), EXACT["shuffled"], 2, at, steps=15)


def divided(folder):
    assert resumed(folder, functools.partial(made, Divided), 0, 4, epochs=1) > 0


def test_a_stream_that_is_divided_between_ranks_is_replayed(tmp_path, pool):
    pool.run(functools.partial(divided, tmp_path))


@pytest.mark.parametrize("then", [0, 2])
def test_another_number_of_workers(tmp_path, said, then):
    make = functools.partial(made, Quieter, shuffle=True)
    log = interrupted(tmp_path, make, then, 5)
    found, *_ = run(lambda: make(log, 1), Checkpoint(tmp_path))
    # Only what is drawn in the training process differs: a seed for workers is.
    assert len(found["history"]) == 2
    assert "workers then and has 1 now" in said()[-1] or "was not saved" in said()[-1]


class Quieter(Logged):
    def __getitem__(self, index):
        super().__getitem__(index)
        return self.x[index], self.y[index]


def save_on_ranks(folder):
    interrupted(folder, EXACT["memory"], 0, 4)


def test_another_number_of_ranks_begins_the_epoch_again(tmp_path, pool, said):
    pool.run(functools.partial(save_on_ranks, tmp_path))
    saving = Checkpoint(tmp_path / "next", resume=tmp_path / "step-0000003.pt")
    with pytest.warns(UserWarning, match="world size 2 then and 1 now"):
        run(lambda: EXACT["memory"](tmp_path / "log", 0), saving, epochs=1)
    assert len((tmp_path / "log").read_text().split()) == 24
    assert not said()


def peeking(hook):
    """A callback that reads the first batch of each epoch as well."""

    def peek(state):
        next(iter(state[torchbearer.SELF].state[torchbearer.TRAIN_DATA][0]))

    return getattr(torchbearer.callbacks, hook)(peek)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("hook", ["on_start_epoch", "on_start_training"])
@pytest.mark.parametrize("kind", ["shuffled", "torch's order"])
def test_a_callback_that_starts_the_loader_too(tmp_path, kind, hook, workers):
    again = resumed(tmp_path, EXACT[kind], workers, 5, peeking(hook))
    assert workers or again == 2 * 2


def test_a_new_callback_that_starts_the_workers_too(tmp_path):
    """It gets the state, so the batches are read again."""
    make = EXACT["shuffled"]
    log = interrupted(tmp_path, make, 2, 4, epochs=1)
    found, *_ = run(
        lambda: make(log, 2), peeking("on_start_training"), Checkpoint(tmp_path), epochs=1
    )
    assert_same(found, whole(make, 2, epochs=1))


def test_a_callback_that_chooses_other_batches(tmp_path):
    @on_start_training
    def choose(state):
        state[torchbearer.ITERATOR] = iter(list(state[torchbearer.GENERATOR])[::-1])

    resumed(tmp_path, EXACT["shuffled"], 0, 5, choose)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_start_that_fails_leaves_the_loader_as_it_was(tmp_path, workers):
    make = EXACT["in order"]
    interrupted(tmp_path, make, workers, 5)
    loader = make(tmp_path / "log", workers)

    @torchbearer.callbacks.on_start_epoch
    def fail(state):
        raise Stopped

    with pytest.raises(Stopped):
        run(lambda: loader, fail, Checkpoint(tmp_path))
    assert len(list(loader)) == 12


def changed(path, change):
    """Writes a checkpoint again with another state of the loader."""
    payload, label = file.read(path), file.read_label(path)
    part = payload[SECTION]["ranks"][0]
    mine = wire.decode(part["packed"])
    change(mine["epoch"])
    part["packed"] = wire.encode(mine)
    file.write(path, payload, label)


def of_another_batch(epoch):
    epoch["loader"]["_num_yielded"] += 1


def without_a_part(epoch):
    del epoch["loader"]["dataset_state"]


def of_another_kind(epoch):
    epoch["loader"]["dataset_state"] = {"count": "seven"}


def a_generator_that_is_none(epoch):
    state = epoch["loader"]["_sampler_iter_state"]["sampler_iter_state"]
    state["generator"] = state["generator"][:9]


@pytest.mark.parametrize(
    "damage", [of_another_batch, without_a_part, of_another_kind, a_generator_that_is_none]
)
def test_if_the_state_is_damaged_the_older_file_is_used(tmp_path, damage):
    make = EXACT["memory"]
    log = interrupted(tmp_path, make, 0, 6, save=1)
    changed(tmp_path / "step-0000005.pt", damage)
    with pytest.warns(UserWarning, match=r"step-0000004\.pt is used"):
        found, _, trained = run(lambda: make(log, 0), Checkpoint(tmp_path))
    assert_same(found, whole(make, 0))
    assert len(log.read_text().split()) == trained == 48 - 2 * 4


def test_a_file_without_the_state_is_replayed(tmp_path, said):
    make = EXACT["shuffled"]
    log = interrupted(tmp_path, make, 0, 5)
    changed(tmp_path / "step-0000004.pt", lambda epoch: epoch.pop("loader"))
    found, _, trained = run(lambda: make(log, 0), Checkpoint(tmp_path))
    assert_same(found, whole(make, 0))
    assert len(log.read_text().split()) == trained + 8
    assert said()[-1].endswith("because its state was not saved")


def test_torchdata_is_not_imported():
    script = "import sys, torchbearer_ddp; sys.exit('torchdata' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
