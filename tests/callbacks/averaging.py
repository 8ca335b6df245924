"""What tests of SyncGradients share: ranks of each transport, data, models and the runs of both."""

import itertools
from typing import Any, ClassVar

import torch
import torchbearer
from torch import nn
from torchbearer import Trial
from torchbearer.bases import base_closure
from torchbearer.callbacks import Callback

from tests.gradients.transport_cases import option
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.group import collectives

STEPS, SIZE = 4, 3
UNEVEN = [[5, 3, 4, 1], [3, 3, 1, 4], [1, 6, 2, 2], [3, 1, 2, 5]]


def on_every_transport(body, timeout=60.0):
    """Runs a test on the ranks of each transport; its callbacks use that one and no other.

    A bucket holds but a few numbers: what is done from hooks, during backward, needs several.
    """

    def on_a_rank(transport):
        Chosen.options = {"transport": option(transport), "bucket_mb": 1e-4}
        body()

    def test(transport_ranks):
        transport, pool = transport_ranks
        pool.run(on_a_rank, (transport,), timeout=timeout)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


def on_two_ranks(body):
    """Runs a test on two ranks of one host, with the defaults."""

    def test(two_ranks):
        two_ranks.run(body)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


class Chosen:
    """The options of this rank's callbacks, unless a test gives others."""

    options: ClassVar[dict[str, Any]] = {}


def sync(**options):
    return [SyncModel(), SyncGradients(**{**Chosen.options, **options})]


def train(model, callbacks, *, steps=3, optimizer=None, data=None, closure=None, epochs=1):
    """Trains on this rank's own data; returns the trial."""
    rank = collectives.rank()
    generator = torch.Generator().manual_seed(100 + rank)
    x, y = data or (
        torch.randn(steps * 4, 6, generator=generator),
        torch.randn(steps * 4, 2, generator=generator),
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    trial = Trial(model, optimizer, nn.functional.mse_loss, ["loss"], callbacks, verbose=0)
    if closure:
        trial.with_closure(closure)
    trial.with_train_generator(loader).run(epochs)
    return trial


def flat(model):
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def assert_replicas_equal(model):
    everyone = collectives.all_gather(flat(model), "parameters to compare")
    assert all(torch.equal(each, everyone[0]) for each in everyone)


class Branches(nn.Module):
    """Layers that are used by all, some or no ranks, frozen, shared, empty, scalar, mixed dtype."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.again = self.shared
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.some = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.fine = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.conv = nn.Conv2d(2, 3, (1, 2)).to(memory_format=torch.channels_last)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        x = self.again(self.shared(x)) + self.frozen(x)
        if collectives.rank() == 1:
            x = self.some(x)
        picture = self.conv(x.view(-1, 2, 1, 3).to(memory_format=torch.channels_last))
        x = self.out(x) * self.scalar + picture.mean() + self.empty.sum()
        return x * self.fine.float() * self.coarse.float()


def batches(rank, sizes=None):
    """The batches of a rank: by default as many samples in each."""
    generator = torch.Generator().manual_seed(7 + rank)
    return [
        (torch.randn(n, 6, generator=generator), torch.randn(n, 2, generator=generator))
        for n in sizes or [SIZE] * STEPS
    ]


def joined(sizes=None):
    """The batches of one process: at each step those of all ranks together."""
    world = collectives.world_size()
    per_rank = [batches(rank, sizes[rank] if sizes else None) for rank in range(world)]
    return [tuple(map(torch.cat, zip(*step, strict=True))) for step in zip(*per_rank, strict=True)]


def net(seed=0, widths=(6, 5, 2)):
    torch.manual_seed(seed)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))[:-1]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def run(model, callbacks, data, *, optimizer=None, criterion=nn.functional.mse_loss, **more):
    """Trains a Trial on batches; the callbacks are those of one process or of N ranks."""
    trial = Trial(model, optimizer or sgd(model), criterion, callbacks=callbacks, verbose=0)
    for key, value in more.get("state", {}).items():
        trial.state[key] = value
    if "closure" in more:
        trial.with_closure(more["closure"])
    trial.with_train_generator(data).run(more.get("epochs", 1))
    return trial


def mine(sizes=None):
    return batches(collectives.rank(), sizes[collectives.rank()] if sizes else None)


def assert_close(ours, one, tolerance=1e-5):
    for (name, a), b in zip(ours.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance / 10), name
    assert_replicas_equal(ours)


DISC, DISC_OPT, DISC_LOSS, DISC_PRED = map(
    torchbearer.state_key, ("judge", "judge_optimizer", "judge_loss", "judge_prediction")
)


def adversaries(freeze=False):
    """A generator and a discriminator, and the closure of one step of each."""
    generator, discriminator = net(1), net(2, (2, 4, 1))

    def fake_loss(state):
        made = state[torchbearer.Y_PRED]
        return nn.functional.softplus(-state[DISC](made)).mean()

    def real_or_fake(state):
        with torch.no_grad():
            made = state[torchbearer.MODEL](state[torchbearer.X])
        real = nn.functional.softplus(-state[DISC](state[torchbearer.Y_TRUE])).mean()
        return real + nn.functional.softplus(state[DISC](made)).mean()

    key = torchbearer.state_key("judge_criterion")
    one = base_closure(
        torchbearer.Y_TRUE, DISC, DISC_PRED, torchbearer.Y_TRUE, key, DISC_LOSS, DISC_OPT
    )
    other = base_closure(
        *(torchbearer.X, torchbearer.MODEL, torchbearer.Y_PRED, torchbearer.Y_TRUE),
        *(torchbearer.CRITERION, torchbearer.LOSS, torchbearer.OPTIMIZER),
    )

    def closure(state):
        one(state)
        state[DISC_OPT].step()
        if freeze:
            discriminator.requires_grad_(False)
        other(state)
        if freeze:
            discriminator.requires_grad_(True)

    state = {DISC: discriminator, DISC_OPT: torch.optim.Adam(discriminator.parameters(), 0.01)}
    state[key] = real_or_fake
    return generator, discriminator, fake_loss, {"closure": closure, "state": state}


class Probe(Callback):
    """Trains a layer of its own on what the model gives, with an optimizer of its own."""

    def __init__(self, keep=True):
        self._layer = [net(3, (2, 1))]
        optimizer = torch.optim.Adam(self._layer[0].parameters(), 0.05)
        self.optimizers = {"probe": optimizer} if keep else {}
        self.step = optimizer.step if keep else lambda: optimizer.step()
        self.zero = lambda: optimizer.zero_grad()
        if not keep:
            layer = self._layer.pop()
            self.layer = lambda: layer
        else:
            self.layer = lambda: self._layer[0]

    def on_step_training(self, state):
        predicted = self.layer()(state[torchbearer.Y_PRED].detach())
        self.zero()
        nn.functional.mse_loss(predicted, state[torchbearer.Y_TRUE][:, :1]).backward()
        self.step()


def summed(predicted, target):
    return ((predicted - target) ** 2).sum() / 4


def add_two_batches(state):
    """A closure that clears the gradients at every second batch only."""
    if state[torchbearer.BATCH] % 2 == 0:
        state[torchbearer.OPTIMIZER].zero_grad()
    predicted = state[torchbearer.MODEL](state[torchbearer.X])
    state[torchbearer.LOSS] = summed(predicted, state[torchbearer.Y_TRUE])
    state[torchbearer.LOSS].backward()
    state[torchbearer.CALLBACK_LIST].on_backward(state)


class Failed(RuntimeError):
    """What a test raises, and a script catches."""


class Fails(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Failed("no memory left")
