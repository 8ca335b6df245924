"""SyncGradients(every=k): steps of each rank's own, and their average; against a loop by hand."""

from __future__ import annotations

import pytest
import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback

from tests.callbacks.averaging import on_two_ranks
from tests.callbacks.killed import KillAt, Killed
from torchbearer_ddp import (
    Checkpoint,
    MixedPrecision,
    SyncGradients,
    SyncMetrics,
    SyncModel,
)
from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.group import collectives

BATCH, STEPS = 4, 7
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


class Net(nn.Module):
    """A layer for all, one that is frozen, and one that only rank 1 uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.frozen = nn.Linear(6, 8), nn.Linear(8, 8)
        self.extra, self.out = nn.Linear(8, 8), nn.Linear(8, 2)
        self.frozen.requires_grad_(False)
        self.uses_extra = False

    def forward(self, x):
        hidden = torch.tanh(self.frozen(self.first(x)))
        if self.uses_extra:
            hidden = hidden + self.extra(hidden)
        return self.out(hidden)


def samples(rank, steps=STEPS, size=BATCH):
    generator = torch.Generator().manual_seed(70 + rank)
    return torch.randn(steps * size, 6, generator=generator), torch.randn(
        steps * size, 2, generator=generator
    )


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def loader(rank, size=BATCH):
    return DataLoader(TensorDataset(*samples(rank, size=size)), size)


def make_trial(
    every=3, optimizer="momentum", callbacks=(), *, size=BATCH, uses_extra=False, **options
):
    model = Net()
    model.uses_extra = uses_extra
    trial = Trial(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        nn.functional.mse_loss,
        ["loss"],
        callbacks=[SyncModel(), SyncGradients(every=every, **options), SyncMetrics(), *callbacks],
        verbose=0,
    )
    return model, trial.with_train_generator(loader(collectives.rank(), size))


def averages(batch, every, accumulate=1):
    return batch % (every * accumulate) == 0 or batch == STEPS


def by_hand(every, optimizer, epochs, sizes=(BATCH, BATCH), accumulate=1, extra_on=()):
    """Every rank's steps in one process, with an average of parameters and states."""
    models = [Net() for _ in sizes]
    for rank in extra_on:
        models[rank].uses_extra = True
    steppers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    loaders = [loader(rank, size) for rank, size in enumerate(sizes)]
    weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    for _ in range(epochs):
        for batch, parts in enumerate(zip(*loaders, strict=True), 1):
            for model, stepper, (x, y) in zip(models, steppers, parts, strict=True):
                if accumulate == 1 or (batch - 1) % accumulate == 0:
                    stepper.zero_grad()
                rest = min(accumulate, STEPS - (batch - 1) // accumulate * accumulate)
                (nn.functional.mse_loss(model(x), y) / rest).backward()
                if batch % accumulate == 0 or batch == STEPS:
                    stepper.step()
            if averages(batch, every, accumulate):
                average_models(models, steppers, weights)
    return flat(models[0])


@torch.no_grad()
def average_models(models, steppers, weights):
    for copies in zip(*(model.parameters() for model in models), strict=True):
        average_tensors(copies, weights)
        states = [stepper.state.get(p, {}) for stepper, p in zip(steppers, copies, strict=True)]
        for key in set.intersection(*(set(each) for each in states)):
            if torch.is_tensor(states[0][key]):
                average_tensors([each[key] for each in states], weights)


def average_tensors(copies, weights):
    mean = sum(float(w) * each.double() for w, each in zip(weights, copies, strict=True))
    for each in copies:
        each.copy_(mean)


def assert_near(model, expected):
    assert torch.allclose(flat(model), expected, rtol=1e-5, atol=1e-6)
    everyone = collectives.all_gather(flat(model), "parameters")
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("every", [2, 3, 50])
def test_local_steps_are_a_loop_by_hand(two_ranks, optimizer, every):
    def body():
        model, trial = make_trial(every, optimizer)
        history = trial.run(2)
        assert_near(model, by_hand(every, optimizer, 2))
        losses = collectives.all_gather([each["loss"] for each in history], "losses")
        assert losses[0] == losses[1]

    two_ranks.run(body)


@on_two_ranks
def test_a_layer_that_one_rank_alone_uses():
    uses = collectives.rank() == 1
    model, trial = make_trial(3, "Adam", uses_extra=uses)
    trial.run(2)
    assert_near(model, by_hand(3, "Adam", 2, extra_on=[1]))


@on_two_ranks
def test_ranks_count_by_their_samples():
    sizes = (6, 2)
    model, trial = make_trial(3, size=sizes[collectives.rank()])
    trial.run(2)
    assert_near(model, by_hand(3, "momentum", 2, sizes))


@on_two_ranks
def test_steps_on_several_batches():
    model, trial = make_trial(2, accumulate=2)
    trial.run(2)
    assert_near(model, by_hand(2, "momentum", 2, accumulate=2))


@on_two_ranks
def test_between_two_averages_the_ranks_differ():
    seen = []

    @torchbearer.callbacks.on_step_training
    def note(state):
        mine = flat(state[torchbearer.MODEL])
        everyone = collectives.all_gather(mine, "parameters")
        seen.append(torch.equal(everyone[0], everyone[1]))

    class Last(Callback):
        def on_sample(self, state):
            note.on_step_training(state)

    _, trial = make_trial(3, callbacks=[Last()])
    trial.run(1)
    assert seen == [True, False, False, True, False, False, True]


@on_two_ranks
def test_a_stop_travels_with_the_next_average():
    seen = []

    @torchbearer.callbacks.on_step_training
    def ask(state):
        seen.append(state[torchbearer.BATCH])
        if collectives.rank() == 1 and state[torchbearer.BATCH] == 3:
            state[torchbearer.STOP_TRAINING] = True

    model, trial = make_trial(3, callbacks=[ask])
    trial.run(1)
    assert seen == [0, 1, 2, 3, 4, 5]
    everyone = collectives.all_gather(flat(model), "parameters")
    assert torch.equal(everyone[0], everyone[1])


class UsesExtraAt(Callback):
    """Lets the model use its extra layer in one batch of an epoch only."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch

    def on_sample(self, state):
        here = state[torchbearer.EPOCH], state[torchbearer.BATCH]
        state[torchbearer.MODEL].uses_extra = here == self.at


@pytest.mark.parametrize("batch", [1, 3, 5, 6])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_checkpoint_between_two_averages_resumes_exactly(
    two_ranks, batch, epoch, every, tmp_path
):
    def body(folder):
        def saving():
            return Checkpoint(folder, every_steps=1, background=False, monitor=None)

        def make(*callbacks):
            size = 5 - 2 * collectives.rank()
            # A layer that is not touched again before the next average.
            extra = UsesExtraAt(epoch, batch - 1)
            return make_trial(every, "Adam", [extra, *callbacks], size=size)

        expected, trial = make()
        trial.run(3)
        _, trial = make(saving(), KillAt(epoch, batch))
        with pytest.raises(Killed):
            trial.run(3)
        model, trial = make(saving())
        trial.run(3)
        assert torch.equal(flat(model), flat(expected))
        everyone = collectives.all_gather(flat(model), "parameters")
        assert torch.equal(everyone[0], everyone[1])

    two_ranks.run(body, (str(tmp_path),))


@on_two_ranks
def test_a_run_after_one_that_failed_begins_with_an_average():
    model, trial = make_trial(3, "SGD", [KillAt(0, 2)])
    with pytest.raises(Killed):
        trial.run(1)
    everyone = collectives.all_gather(flat(model), "parameters")
    assert not torch.equal(everyone[0], everyone[1])
    mean = (everyone[0] + everyone[1]) / 2
    first = []

    @torchbearer.callbacks.on_sample
    def note(state):
        first.append(flat(state[torchbearer.MODEL]))

    trial.state[torchbearer.CALLBACK_LIST].append([note])
    trial.run(1)
    assert torch.allclose(first[0], mean, atol=1e-7)


@on_two_ranks
def test_ranks_at_different_batches_are_found_out():
    rank = collectives.rank()
    _, trial = make_trial(3)
    steps = STEPS if rank == 0 else STEPS - 1
    trial.with_train_generator(loader(rank), steps=steps)
    with pytest.raises(DistributedError, match=r"different|out of step|training steps"):
        trial.run(1)


@on_two_ranks
def test_what_cannot_be_averaged_is_refused():
    model, trial = make_trial(3)
    lbfgs = torch.optim.LBFGS(model.parameters())
    trial.state[torchbearer.OPTIMIZER] = lbfgs
    with pytest.raises(ValueError, match=r"every does not work with LBFGS"):
        trial.run(1)
    _, trial = make_trial(3, callbacks=[MixedPrecision("fp16")])
    with pytest.raises(ValueError, match=r"every is 3.*MixedPrecision\('bf16'\)"):
        trial.run(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"every is 0: give the number of steps"),
        ({"every": 2, "compress": "int8"}, r"every is 2 and gradients travel as int8"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        SyncGradients(**options)


@on_two_ranks
def test_a_rank_that_makes_no_step_of_a_window_takes_part_in_its_average():
    class Skips(Callback):
        def on_backward(self, state):
            if collectives.rank() == 1 and state[torchbearer.BATCH] < 2:
                for parameter in state[torchbearer.MODEL].parameters():
                    parameter.grad = None

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [SyncModel(), SyncGradients(every=2), Skips()]
    trial = Trial(model, optimizer, nn.functional.mse_loss, callbacks=callbacks, verbose=0)
    trial.with_train_generator(loader(collectives.rank())).run(1)
    everyone = collectives.all_gather(flat(model), "the models")
    assert torch.equal(everyone[0], everyone[1])
