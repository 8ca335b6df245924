"""A Trial's method as worker: what the ranks have trained is in the caller's Trial afterwards."""

import functools
import sys

import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset

from tests.programs import launch
from torchbearer_ddp import data_parallel
from torchbearer_ddp.launch.bound_methods import owner_of

DISCRIMINATOR = torchbearer.state_key("discriminator")


def trial_of(model, other):
    x = torch.arange(32.0).reshape(16, 2) / 32
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trial = torchbearer.Trial(
        model,
        optimizer,
        torch.nn.functional.mse_loss,
        metrics=["loss"],
        callbacks=[*data_parallel()],
        verbose=0,
    )
    trial.state[DISCRIMINATOR] = other
    trial.with_train_generator(DataLoader(TensorDataset(x, x), batch_size=4))
    trial.with_val_generator(DataLoader(TensorDataset(x, x), batch_size=4))
    return trial


@torchbearer.callbacks.on_end
def change_the_other(state):
    with torch.no_grad():
        state[DISCRIMINATOR].weight.fill_(7.0)


def test_model_optimizer_and_history_come_back():
    torch.manual_seed(0)
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(1, 1)
    before = model.weight.detach().clone()
    trial = trial_of(model, other)
    trial.state[torchbearer.CALLBACK_LIST].append([change_the_other])
    histories = launch(trial.run, 2)
    assert not torch.equal(model.weight, before)
    assert trial.state[torchbearer.HISTORY] == histories[0]
    assert len(histories) == 2
    momentum = trial.state[torchbearer.OPTIMIZER].state[model.weight]["momentum_buffer"]
    assert momentum.abs().sum() > 0
    assert other.weight.item() == 7.0
    # The caller's Trial goes on with what the ranks have learnt.
    evaluated = trial.evaluate(data_key=torchbearer.VALIDATION_DATA, verbose=0)
    assert abs(evaluated["val_loss"] - histories[0][-1]["val_loss"]) < 1e-6


@torchbearer.callbacks.on_end
def leave(state):
    sys.exit(0)


def test_a_worker_that_exits_with_code_zero_leaves_the_trial_as_it_was():
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    trial = trial_of(model, torch.nn.Linear(1, 1))
    trial.state[torchbearer.CALLBACK_LIST].append([leave])
    assert launch(trial.run, 2) == [None, None]
    assert torch.equal(model.weight, before)


class Counter:
    def __init__(self):
        self.count = 0

    def increase(self, by):
        self.count += by
        return self.count


def test_of_another_object_the_changes_stay_in_the_ranks_with_a_line(caplog):
    counter = Counter()
    assert launch(functools.partial(counter.increase, 3), world_size=1) == [3]
    assert counter.count == 0
    assert "the worker is a method of a Counter: each rank works on a copy" in caplog.text


def test_what_is_a_bound_method():
    counter = Counter()
    assert owner_of(functools.partial(counter.increase, 1)) is counter
    assert owner_of(launch) is owner_of(dict.fromkeys) is owner_of(len) is None
