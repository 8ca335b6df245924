"""The buckets of a run serve the next one, and nothing else of it does."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torchbearer import CALLBACK_LIST, OPTIMIZER, Trial
from torchbearer.callbacks import on_criterion

from tests.callbacks.averaging import (
    assert_close,
    assert_replicas_equal,
    joined,
    mine,
    net,
    on_every_transport,
    on_two_ranks,
    sgd,
    sync,
)
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.gradients.spare import _Last
from torchbearer_ddp.group import collectives


class Made:
    """Counts the reducers that are made in a block."""

    def __enter__(self):
        self.count, self._init = 0, Reducer.__init__

        def init(reducer, *args, **options):
            self.count += 1
            self._init(reducer, *args, **options)

        Reducer.__init__ = init
        return self

    def __exit__(self, *_):
        Reducer.__init__ = self._init


def trial_of(model, callbacks, data):
    trial = Trial(model, sgd(model), nn.functional.mse_loss, callbacks=callbacks, verbose=0)
    return trial.with_train_generator(data).with_val_generator(data)


def run(trial, *epochs):
    for each in epochs:
        trial.run(each)
        trial.evaluate()
    return trial


def spare_of(trial):
    [gradients] = [c for c in trial.state[CALLBACK_LIST] if isinstance(c, SyncGradients)]
    return gradients._exchange.averager._spare


@on_every_transport
def test_runs_in_a_loop_share_one_set_of_buckets():
    ours, one = net(), net()
    with Made() as made:
        run(trial_of(ours, sync(), mine()), 1, 2, 3)
    assert made.count == 1
    run(trial_of(one, [], joined()), 1, 2, 3)
    assert_close(ours, one)


#: Ways that carry something from step to step, or whose buckets hold no gradients.
OTHERS = [
    {"compress": "int8"},
    {"compress": "bf16", "error_feedback": True},
    {"compress": "powersgd", "rank": 2},
    {"every": 2},
]
#: With them PowerSGD, which begins after ten steps, has begun in the run before the last.
EPOCHS = 1, 2, 3, 4


def check_buckets_serve_the_next_run(callbacks):
    kept, anew = net(), net()
    with Made() as made:
        run(trial_of(kept, callbacks(), mine()), *EPOCHS)
    assert made.count == 1
    trial = trial_of(anew, callbacks(), mine())
    for epochs in EPOCHS:
        run(trial, epochs)
        _Last.drop()
    assert all(map(torch.equal, kept.parameters(), anew.parameters()))
    assert_replicas_equal(kept)


@on_every_transport
def test_buckets_of_fewer_bytes_and_of_local_steps_serve_the_next_run_too():
    for options in OTHERS:
        check_buckets_serve_the_next_run(partial(sync, **options))


@on_two_ranks
def test_buckets_of_a_hook_serve_the_next_run_too():
    def with_powersgd():
        state = PowerSGDState(None, start_powerSGD_iter=2)
        return sync(hook=powerSGD_hook, hook_state=state)

    check_buckets_serve_the_next_run(partial(sync, hook=fp16_compress_hook))
    check_buckets_serve_the_next_run(with_powersgd)


@on_every_transport
def test_gradients_of_a_run_stay_as_they_are_in_the_next():
    model = net()
    trial = run(trial_of(model, sync(), mine()), 1)
    kept = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in kept]
    run(trial, 2)
    assert all(map(torch.equal, kept, values))


@on_every_transport
def test_what_has_changed_on_one_rank_is_made_anew_on_all():
    ours, one = net(), net()
    trial = run(trial_of(ours, sync(), mine()), 1)
    if collectives.rank() == 1:  # the same numbers in another object
        old, ours[0].weight = ours[0].weight, nn.Parameter(ours[0].weight.detach().clone())
        optimizer = trial.state[OPTIMIZER]
        optimizer.param_groups[0]["params"][0] = ours[0].weight
        optimizer.state[ours[0].weight] = optimizer.state.pop(old)
    with Made() as made:
        run(trial, 2)
    assert made.count == 1
    run(trial_of(one, [], joined()), 1, 2)
    assert_close(ours, one)


class Scale(nn.Module):
    """A parameter that may have any size."""

    def __init__(self):
        super().__init__()
        self.factors, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x.mean(1, keepdim=True) * self.factors.mean() + self.bias


@on_every_transport
def test_a_parameter_that_was_given_other_data_gets_other_buckets():
    def trained(callbacks, data):
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = nn.functional.l1_loss
        data = [(x, y.mean(1, keepdim=True)) for x, y in data]
        trial = Trial(model, optimizer, loss, callbacks=callbacks, verbose=0)
        trial.with_train_generator(data).run(1)
        model.factors.data = torch.full((7,), 0.5)
        trial.run(2)
        return model

    assert_close(trained(sync(), mine()), trained([], joined()))


@on_every_transport
def test_a_run_after_one_that_failed_in_backward_makes_its_own():
    ours, one = net(), net()

    @on_criterion
    def fails(state):
        raise KeyError("a bad batch")

    trial = run(trial_of(ours, sync(), mine()), 1)
    broken = trial_of(net(3), [*sync(), fails], mine())
    with pytest.raises(KeyError):
        broken.run(1)
    run(trial, 2)
    run(trial_of(one, [], joined()), 1, 2)
    assert_close(ours, one)


@on_every_transport
def test_only_the_last_of_several_trials_keeps_its_buckets():
    found = []
    for seed in range(3):
        trial = trial_of(net(seed), sync(), mine())
        run(trial, 1)
        found.append((trial, spare_of(trial)))
    assert [spare._kept is not None for _, spare in found] == [False, False, True]
    kept = weakref.ref(found[-1][1]._kept.reducer)
    del found, trial
    gc.collect()
    assert kept() is None
