"""SyncModel: equal replicas at the start whatever happened before, and no silent drift after."""

import contextlib
import io

import pytest
import torch
import torchbearer
from torch import nn
from torchbearer import Trial
from torchbearer.callbacks import on_start_training, on_start_validation, on_step_training
from torchbearer.callbacks.init import KaimingNormal

from tests.ranks import ranks
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives, layouts


def network():
    torch.manual_seed(collectives.rank())
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trial_for(model, callbacks=(), optimizer=None, **kwargs):
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    trial = Trial(
        model,
        optimizer,
        nn.functional.mse_loss,
        ["loss"],
        [SyncModel(), SyncGradients(), *callbacks],
        verbose=0,
    )
    generator = torch.Generator().manual_seed(collectives.rank())
    x, y = torch.randn(16, 3, generator=generator), torch.randn(16, 2, generator=generator)
    trial.with_train_data(x, y, batch_size=4, num_workers=0)
    return trial.with_val_data(x, y, batch_size=4, num_workers=0)


def everybodys(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return collectives.all_gather(state, "state dicts to compare")


def assert_equal(states):
    for name in states[0]:
        assert all(torch.equal(each[name], states[0][name]) for each in states), name


@ranks(2)
def test_parameters_and_buffers_are_rank_zeros_after_init():
    model = network()
    model[1].running_mean += collectives.rank()
    mine = everybodys(model)
    trial_for(model)
    after = everybodys(model)
    assert_equal(after)
    assert torch.equal(after[1]["0.weight"], mine[0]["0.weight"])
    assert torch.equal(after[1]["1.running_mean"], mine[0]["1.running_mean"])


@ranks(2)
def test_weights_loaded_on_rank_zero_alone_reach_all_ranks():
    model = network()
    trial = trial_for(model)
    if collectives.is_rank_zero():
        trained = network()
        donor = Trial(
            trained,
            torch.optim.Adam(trained.parameters()),
            nn.functional.mse_loss,
            ["loss"],
            verbose=0,
        )
        donor.with_train_data(torch.ones(8, 3), torch.ones(8, 2), 4, num_workers=0).run(2)
        state = donor.state_dict()
        state[torchbearer.CALLBACK_LIST] = trial.state[torchbearer.CALLBACK_LIST].state_dict()
        trial.load_state_dict(state)
    history = trial.run(3)
    assert len(history) == 3
    assert_equal(everybodys(model))
    steps = [int(s["step"]) for s in trial.state[torchbearer.OPTIMIZER].state.values()]
    assert steps == [8] * len(steps)  # 2 epochs of 2 steps on rank zero, then one of 4 together


def convolution(channels_last):
    """A Trial whose optimizer reads memory in the order of the parameters."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    callbacks = [SyncModel(), SyncGradients()]
    trial = Trial(model, optimizer, nn.functional.mse_loss, callbacks=callbacks, verbose=0)
    x, y = torch.randn(8, 2, 5, 5), torch.randn(8, 3, 3, 3)
    return trial.with_train_data(x, y, batch_size=4, num_workers=0), model, optimizer


@ranks(2)
def test_an_optimizer_s_state_of_rank_zero_gets_the_strides_of_the_parameters():
    """Other strides would be other numbers for fused Adam."""
    trial, model, optimizer = convolution(channels_last=True)
    if collectives.is_rank_zero():  # a state that only rank zero has loaded, from an old file
        with contextlib.redirect_stderr(io.StringIO()):
            model(torch.randn(2, 2, 5, 5)).square().sum().backward()
            optimizer.step()
        held = optimizer.state[model.weight]
        sent = optimizer.state_dict()
        sent["state"][0] = {**held, "exp_avg": held["exp_avg"].contiguous()}
        layouts.load_optimizer(optimizer, sent)
        optimizer.state_dict = lambda: sent
    trial.run(2)
    assert_equal(everybodys(model))
    held = optimizer.state[model.weight]
    assert held["exp_avg"].stride() == held["exp_avg_sq"].stride() == model.weight.stride()
    averages = collectives.all_gather(held["exp_avg"].contiguous(), "the averages")
    assert torch.equal(*averages)


@ranks(2)
def test_another_memory_format_on_one_rank_is_named():
    trial, _, _ = convolution(channels_last=collectives.rank() == 1)
    found = r"weight .*: \(3, 2, 3, 3\), .* rank 0; .* with strides \(18, 1, 6, 2\), .* rank 1"
    with pytest.raises(DesyncError, match=f"{found}.*memory format"):
        trial.run(1)


@ranks(2)
def test_weights_initialised_by_a_callback_are_equalised_with_a_line():
    model = network()
    trial = trial_for(model, [KaimingNormal()])
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        trial.run(1)
    assert_equal(everybodys(model))
    said = printed.getvalue().count("weight on rank 1 differed from rank 0 at the start")
    assert said == (1 if collectives.is_rank_zero() else 0)


@ranks(2)
def test_moving_to_another_dtype_after_construction():
    model = network()
    trial = trial_for(model).to(torch.float64)
    trial.run(1)
    assert_equal(everybodys(model))


@ranks(2)
def test_drift_during_training_is_named():
    model = network()

    @on_step_training
    def drift(state):
        if collectives.rank() == 1 and state[torchbearer.BATCH] == 1:
            with torch.no_grad():
                model[2].bias += 1

    with pytest.raises(DesyncError, match=r"After epoch 0, 2\.bias on rank 1 differs"):
        trial_for(model, [drift]).run(1)
    assert collectives.world_size() == 2


@ranks(2)
def test_check_zero_compares_nothing():
    model = network()

    @on_step_training
    def drift(state):
        if collectives.rank() == 1:
            with torch.no_grad():
                model[2].bias += 1

    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.functional.mse_loss,
        callbacks=[SyncModel(check=0), SyncGradients(), drift],
        verbose=0,
    )
    trial.with_train_data(torch.ones(8, 3), torch.ones(8, 2), 4, num_workers=0).run(1)
    biases = collectives.all_gather(model[2].bias.detach(), "biases")
    assert not torch.equal(biases[0], biases[1])


@ranks(2)
def test_batch_norm_agrees_before_validation_and_is_the_average():
    model = network()
    ours, means = [], []

    @on_start_training
    def forget(state):
        ours.clear()

    @on_step_training
    def keep(state):
        ours.append(model[1].running_mean.clone())

    @on_start_validation
    def look(state):
        means.append(model[1].running_mean.clone())

    trial_for(model, [forget, keep, look]).run(2)
    assert_equal(everybodys(model))
    last = collectives.all_gather(ours[-1], "means")
    assert not torch.equal(last[0], last[1])
    assert torch.allclose(means[-1], (last[0] + last[1]) / 2, atol=1e-7)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("shape", r"the model.s weight.*\(2, 3\).* rank 0; \(2, 4\)"),
        ("steps", "training steps per epoch.*4 on rank 0; 5 on rank 1"),
        ("epochs", "number of epochs.*1 on rank 0; 2 on rank 1"),
        ("callbacks", "callbacks.*rank 1"),
        ("optimizer", "optimizer.*SGD on rank 0; Adam on rank 1"),
    ],
)
def test_ranks_with_different_plans_all_raise_the_same(difference, message):
    @ranks(2)
    def body():
        odd = collectives.rank() == 1
        model = nn.Linear(3 + (odd and difference == "shape"), 2)
        kind = torch.optim.Adam if odd and difference == "optimizer" else torch.optim.SGD
        extra = [on_step_training(lambda state: None)] if odd and difference == "callbacks" else []
        with pytest.raises(DesyncError, match=message) as caught:
            trial = trial_for(model, extra, optimizer=kind(model.parameters(), lr=0.1))
            if odd and difference == "steps":
                trial.for_train_steps(5)
            trial.run(2 if odd and difference == "epochs" else 1)
        texts = collectives.all_gather(str(caught.value), "messages")
        assert texts[0] == texts[1]

    body()


@ranks(2)
def test_another_version_of_torch_is_refused():
    if collectives.rank() == 1:
        torch.__version__ = "1.0.fake"
    with pytest.raises(DesyncError, match=r"version of torch.*1\.0\.fake on rank 1"):
        trial_for(network()).run(1)


def test_a_plain_process_pays_nothing_and_a_state_dict_still_loads():
    model = network()
    trial = trial_for(model)
    trial.run(1)
    fresh = trial_for(network())
    fresh.load_state_dict(trial.state_dict())
    assert torch.equal(fresh.state[torchbearer.MODEL][0].weight, model[0].weight)
    assert len(fresh.run(2)) == 2
