"""Random interruptions of random trainings: each ends like the one that was not interrupted.

A case is drawn from its number alone. ``TORCHBEARER_DDP_RESUMES=100`` runs so many of each, from
number ``TORCHBEARER_DDP_FIRST_RESUME`` on; to replay a case, give its number and 1.
"""

import functools
import os
import random
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torchbearer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler
from torchbearer.callbacks import EarlyStopping, on_sample

from tests.programs import Noisy, Stopped, assert_same, build, outcome
from tests.ranks import RankPool
from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives, stop_request

CASES = int(os.environ.get("TORCHBEARER_DDP_RESUMES", "6"))
FIRST = int(os.environ.get("TORCHBEARER_DDP_FIRST_RESUME", "0"))


class Counted(Noisy):
    """Counts the items that this process reads outside of the data set."""

    read = 0

    def __getitem__(self, index):
        Counted.read += 1
        return super().__getitem__(index)


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "shuffled": lambda: DataLoader(Counted(), batch_size=3, shuffle=True),
    "in order": lambda: DataLoader(Counted(), batch_size=4),
    "own generator": lambda: DataLoader(
        Counted(), batch_size=3, shuffle=True, generator=generator(), drop_last=True
    ),
    "uneven": lambda: DataLoader(Counted(), batch_size=7, shuffle=True),
    "weighted": lambda: DataLoader(
        Counted(),
        batch_size=3,
        sampler=WeightedRandomSampler(torch.arange(1.0, 25), 24, generator=generator()),
    ),
    "batches": lambda: DataLoader(
        Counted(),
        batch_sampler=BatchSampler(RandomSampler(Noisy(), generator=generator()), 4, False),
    ),
    "workers": lambda: DataLoader(
        Counted(), batch_size=6, shuffle=True, num_workers=1, multiprocessing_context="fork"
    ),
}
#: Steps of an epoch: as many as there are batches, fewer, or so many that the loader starts over.
STEPS = (None, None, 2, 11)


def once(trial):
    trial.run(3)


def in_parts(trial):
    trial.run(1)
    noted = trial.evaluate()
    trial.run(3)
    return noted


def one_by_one(trial):
    return [(trial.run(epochs), trial.evaluate(), float(torch.rand(1)))[1:] for epochs in (1, 2, 3)]


def with_new_rate(trial):
    trial.run(2)
    trial.state[torchbearer.OPTIMIZER].param_groups[0]["lr"] *= 0.5
    trial.run(3)


SCRIPTS = {each.__name__: each for each in (once, in_parts, one_by_one, with_new_rate)}


@dataclass
class Case:
    number: int
    loader: str
    script: str
    steps: int | None
    accumulate: int
    every: dict[str, object]
    background: bool
    stops_early: bool
    kills: list[tuple[str, int]]

    @classmethod
    def draw(cls, number: int) -> "Case":
        draw = random.Random(number)
        every = [{"every_steps": draw.randint(1, 5)}, {}, {"every_seconds": 1e-9}]
        kills = [
            (draw.choice(["raise", "raise", "signal"]), draw.randint(1, 14))
            for _ in range(draw.randint(1, 3))
        ]
        return cls(
            number=number,
            loader=draw.choice(list(LOADERS)),
            script=draw.choice(list(SCRIPTS)),
            steps=draw.choice(STEPS),
            accumulate=draw.choice([1, 1, 2, 3]),
            every=draw.choice(every),
            background=draw.random() < 0.7,
            stops_early=draw.random() < 0.2,
            kills=kills,
        )

    def run(self, *callbacks):
        stopping = [EarlyStopping("loss", min_delta=9.0, patience=1)] if self.stops_early else []
        trained = []

        @on_sample
        def count(state):
            trained.append(len(state[torchbearer.X]))

        Counted.read = 0
        trial = build(*stopping, count, *callbacks, accumulate=self.accumulate)
        trial.with_train_generator(LOADERS[self.loader](), steps=self.steps)
        noted = SCRIPTS[self.script](trial)
        # Whatever was interrupted: only what this process trains on is read by it.
        assert Counted.read == (0 if self.loader == "workers" else sum(trained))
        return {**outcome(trial), "noted": noted}

    def check(self, folder):
        expected = self.run()
        for kill in self.kills:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = self.run(interruption(*kill), self.checkpoint(folder))
                except (Stopped, SystemExit):
                    found = None
            finish_writing()
            stop_request.reset()
            collectives.barrier()
            if found is not None:
                assert_same(found, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(self.run(self.checkpoint(folder)), expected)

    def checkpoint(self, folder):
        return Checkpoint(folder, keep=None, background=self.background, **self.every)


def interruption(kind, at):
    """Fails at the given batch of this process, or asks to stop by a signal and then ends it."""
    left = [at]

    @on_sample
    def interrupt(state):
        left[0] -= 1
        if left[0] == 0 and kind == "signal":
            stop_request.request(15)
        if left[0] == 0 and kind == "raise":
            raise Stopped

    @torchbearer.callbacks.on_end
    def end(state):
        if stop_request.received() is not None:
            raise SystemExit(143)  # as the launcher ends a process that was asked to stop

    interrupt.on_end = end.on_end
    return interrupt


def check(number, folder):
    case = Case.draw(number)
    try:
        case.check(folder)
    except BaseException as error:
        error.add_note(f"{case}") if hasattr(error, "add_note") else None
        raise


@pytest.mark.timeout(60 + 20 * CASES)
def test_interrupted_in_one_process(tmp_path):
    for number in range(FIRST, FIRST + CASES):
        check(number, tmp_path / str(number))


@pytest.mark.timeout(60 + 40 * CASES)
def test_interrupted_on_two_ranks(tmp_path):
    with RankPool(2) as pool:
        for number in range(FIRST, FIRST + CASES):
            pool.run(functools.partial(check, number, tmp_path / str(number)), timeout=120)


if __name__ == "__main__":
    check(FIRST, Path(tempfile.mkdtemp()))
