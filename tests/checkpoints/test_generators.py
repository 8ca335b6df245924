"""Generators wherever data, models and callbacks hold them: found, saved, put back."""

import functools
import random
import warnings

import numpy
import pytest
import torch
import torchbearer
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, WeightedRandomSampler
from torchbearer.callbacks import Callback

from tests.programs import Stopped, assert_same, failing, outcome
from tests.ranks import RankPool
from torchbearer_ddp import Checkpoint, data_parallel
from torchbearer_ddp.checkpoints import generators
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import collectives, membership, wire


class Jitter(torch.nn.Module):
    """A transform that is a module, as torchvision's are."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Identity()])
        self.inner[0].rng = numpy.random.RandomState(1)

    def forward(self, x):
        return x + 0.1 * float(self.inner[0].rng.randn())


class Slotted:
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = random.Random(2)

    def __call__(self, x):
        return x + 0.1 * self.rng.random()


def shift(x, rng):
    return x + 0.1 * rng.random()


def closure():
    rng = numpy.random.Generator(numpy.random.MT19937(3))
    return lambda x: shift(x, rng)


class Samples(Dataset):
    def __init__(self):
        self.x = torch.arange(24.0).reshape(12, 2) / 24
        self.transforms = {
            "by": [Jitter(), Slotted()],
            "more": {"partial": functools.partial(shift, rng=numpy.random.default_rng(4))},
        }
        self.closure = closure()
        self.rng = {"here": torch.Generator().manual_seed(5)}

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.rand(1, generator=self.rng["here"])
        for transform in [*self.transforms["by"], self.transforms["more"]["partial"], self.closure]:
            x = transform(x)
        return x, x.sum()[None]


class Shuffled(Sampler):
    def __init__(self):
        self.rngs = {"order": numpy.random.RandomState(6)}

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(self.rngs["order"].permutation(12).tolist())


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.rng = torch.Generator().manual_seed(7)

    def forward(self, x):
        return self.layer(x) * (1 + 0.1 * torch.rand(1, generator=self.rng))


class Mixing(Callback):
    def __init__(self):
        super().__init__()
        self.sources = [numpy.random.RandomState(8)]

    def on_sample(self, state):
        state[torchbearer.X] = state[torchbearer.X] * float(self.sources[0].rand())


SAMPLERS = {
    "own": lambda: {"sampler": Shuffled(), "batch_size": 2},
    "batches": lambda: {"batch_sampler": BatchSampler(Shuffled(), 2, drop_last=False)},
    "weighted": lambda: {
        "batch_size": 2,
        "sampler": WeightedRandomSampler(
            torch.arange(1.0, 13), 12, generator=torch.Generator().manual_seed(9)
        ),
    },
}


def build(sampler, *callbacks):
    torch.set_num_threads(1)
    randomness.seed_all(3)
    if (group := membership.current()) is not None:
        group.runs = 0
    model = Noise()
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.nn.MSELoss(),
        callbacks=[*data_parallel(), Mixing(), *callbacks],
        verbose=0,
    )
    return trial.with_train_generator(DataLoader(Samples(), **SAMPLERS[sampler]()))


def check(folder, sampler, at):
    whole = build(sampler)
    whole.run(3)
    with pytest.raises(Stopped):
        build(sampler, failing(at), Checkpoint(folder, every_steps=2)).run(3)
    finish_writing()
    collectives.barrier()
    resumed = build(sampler, Checkpoint(folder))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        resumed.run(3)
    assert_same(outcome(resumed), outcome(whole))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("at", [6, 13])
def test_a_run_with_generators_everywhere_continues_bit_for_bit(tmp_path, sampler, at):
    check(tmp_path, sampler, at)


def test_on_ranks(tmp_path):
    with RankPool(2) as pool:
        for sampler in SAMPLERS:
            pool.run(functools.partial(check, tmp_path / sampler, sampler, 5))


def test_names_are_the_same_in_every_run_and_old_ones_are_kept():
    names = [name for name, _ in generators.find(build("own").state)]
    assert names == [name for name, _ in generators.find(build("own").state)]
    assert len(names) == len(set(names)) == 8
    # As in files of format 2, whose generators were attributes.
    loader = DataLoader(Samples(), batch_size=2, generator=torch.Generator())
    trial = build("own").with_train_generator(loader)
    assert "train_data.generator[0]" in [name for name, _ in generators.find(trial.state)]


def test_a_long_list_is_looked_through_only_where_it_has_generators():
    trial = build("own")
    dataset = trial.state[torchbearer.TRAIN_GENERATOR].dataset
    dataset.many = [random.Random(i) for i in range(100)]
    dataset.samples = [[i] for i in range(10_000)] + [random.Random(1)]
    names = [name for name, _ in generators.find(trial.state)]
    assert sum(".many[" in name for name in names) == 100
    assert not any(".samples[" in name for name in names)


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_every_kind_of_numpy_generator(kind):
    trial = build("own")
    own = numpy.random.Generator(getattr(numpy.random, kind)(3))
    trial.state[torchbearer.TRAIN_GENERATOR].dataset.own = own
    own.random(3)
    saved = wire.decode(wire.encode(generators.collect(trial.state)))
    expected = own.random(4).tolist()
    generators.restore(trial.state, saved)
    assert own.random(4).tolist() == expected


def test_one_that_cannot_be_saved_is_named_once(tmp_path):
    trial = build("own", Checkpoint(tmp_path))
    trial.state[torchbearer.TRAIN_GENERATOR].dataset.system = random.SystemRandom()
    with pytest.warns(
        UserWarning, match=r"dataset\[0\].system\[0\] is a random.SystemRandom"
    ) as found:
        trial.run(2)
    assert len([w for w in found if "SystemRandom" in str(w.message)]) == 1
