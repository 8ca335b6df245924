"""What happens inside of a run, or between two: evaluations, other Trials, skipped batches."""

import pytest
import torch
import torchbearer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback, on_step_training

from tests.callbacks.averaging import (
    UNEVEN,
    Probe,
    assert_close,
    assert_replicas_equal,
    batches,
    joined,
    mine,
    net,
    on_two_ranks,
    run,
    sgd,
    summed,
    sync,
)
from torchbearer_ddp import data_parallel
from torchbearer_ddp.callbacks.metrics import SyncMetrics
from torchbearer_ddp.group import collectives


class Evaluating(Callback):
    """Evaluates in the middle of every step, before others have acted on it."""

    def __init__(self, data):
        self.data = data

    def on_step_training(self, state):
        state[torchbearer.SELF].with_val_generator(self.data).evaluate(verbose=0)


@on_two_ranks
def test_an_evaluation_inside_of_a_run_leaves_its_steps_as_they_were():
    # Rank 0 has two batches to evaluate and rank 1 has one, of other sizes than in training.
    data = batches(9, [4, 5] if collectives.rank() == 0 else [1])
    model, one, ours, ones = net(), net(), Probe(), Probe()
    run(model, [Evaluating(data), *sync(), ours], mine(UNEVEN))
    run(one, [ones], joined(UNEVEN[:2]))
    assert_close(model, one)
    assert_close(ours.layer(), ones.layer())


@on_two_ranks
def test_a_stop_is_agreed_with_an_evaluation_in_every_step():
    steps = []

    @on_step_training
    def stop(state):
        steps.append(state[torchbearer.BATCH])
        if state[torchbearer.BATCH] == 0 and collectives.rank() == 1:
            state[torchbearer.STOP_TRAINING] = True

    run(net(), [stop, Evaluating(batches(9, [2])), *sync()], mine())
    assert steps == [0, 1]


@on_two_ranks
def test_a_trial_inside_of_a_run_is_averaged_by_its_own_callbacks():
    def inner(callbacks, data):
        class Inner(Callback):
            model = net(4)

            def on_step_training(self, state):
                if state[torchbearer.BATCH] == 1:
                    run(self.model, callbacks(), data)

        return Inner()

    model, one = net(), net()
    ours, ones = inner(lambda: sync(loss="mean"), mine()), inner(lambda: [], joined())
    run(model, [*sync(loss="sum"), ours], mine(), criterion=summed)
    run(one, [ones], joined(), criterion=summed)
    assert_close(model, one)
    assert_close(ours.model, ones.model)


def silent(state):
    """A closure that does not call on_backward, and skips the second batch."""
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    loss = functional.mse_loss(state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
    state[torchbearer.LOSS] = loss
    if state[torchbearer.BATCH] != 1:
        loss.backward()


def accumulated(data=None):
    model = net()
    run(model, sync(accumulate=2, loss="mean"), data or mine(), closure=silent)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_gradients_add_up_in_one_process_as_on_several(two_ranks):
    ours = two_ranks.run(accumulated)
    pairs = zip(batches(0), batches(1), strict=True)
    one = accumulated([tuple(map(torch.cat, zip(*pair, strict=True))) for pair in pairs])
    assert torch.equal(ours[0], ours[1])
    assert torch.allclose(ours[0], one, rtol=1e-5, atol=1e-6)


@on_two_ranks
def test_a_sum_that_stays_over_skipped_batches_is_added_up_once():
    def closure(state):
        if state[torchbearer.BATCH] in (1, 2):
            return  # and the optimizer steps on the gradients of the batch before
        state[torchbearer.OPTIMIZER].zero_grad()
        found = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.LOSS] = summed(found, state[torchbearer.Y_TRUE])
        state[torchbearer.LOSS].backward()

    def trained(callbacks, data):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run(model, callbacks, data, optimizer=optimizer, criterion=summed, closure=closure)
        return model

    assert_close(trained(sync(loss="sum"), mine()), trained([], joined()))


@pytest.mark.parametrize("returned", ["tensor", "number"])
def test_lbfgs_with_a_loss_that_sums(returned, two_ranks):
    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X].double())
        target = state[torchbearer.Y_TRUE].double()
        state[torchbearer.LOSS] = loss = summed(state[torchbearer.Y_PRED], target)
        loss.backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)
        return loss if returned == "tensor" else loss.item()

    def solved(callbacks, data):
        model = net().double()
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.1, line_search_fn="strong_wolfe", max_iter=4
        )
        trial = Trial(model, optimizer, summed, ["loss"], callbacks, verbose=0)
        history = trial.with_closure(closure).with_train_generator(data).run(1)
        return model, history[-1]["loss"]

    def body():
        ours, shown = solved([*sync(loss="sum"), SyncMetrics()], mine())
        one, expected = solved([], joined())
        assert_close(ours, one, tolerance=1e-4)
        assert shown == pytest.approx(expected, rel=1e-4)

    two_ranks.run(body)


def class_batches(rank):
    generator = torch.Generator().manual_seed(30 + rank)
    targets = [torch.full((4,), rank), torch.arange(4) % 2, torch.full((4,), 1 - rank)]
    return [(torch.randn(4, 6, generator=generator), each) for each in targets]


@on_two_ranks
def test_class_weights_that_are_set_in_mid_run_count():
    def trained(callbacks, data):
        model, criterion = net(), nn.CrossEntropyLoss()

        @on_step_training
        def weigh(state):
            criterion.weight = torch.tensor([1.0, 9.0])

        run(model, [*callbacks, weigh], data, criterion=criterion)
        return model

    rank = collectives.rank()
    pairs = zip(class_batches(0), class_batches(1), strict=True)
    together = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in pairs]
    assert_close(trained(sync(), class_batches(rank)), trained([], together))


MASK = torchbearer.state_key("mask_of_the_batch")


@on_two_ranks
def test_a_weight_of_the_users_own_is_not_asked_for_in_an_evaluation():
    @torchbearer.callbacks.on_sample
    def masked(state):
        state[MASK] = torch.ones(len(state[torchbearer.X]))

    model = net()
    callbacks = [masked, *data_parallel(shard=False, weight=lambda state: state[MASK].sum())]
    trial = Trial(model, sgd(model), nn.functional.mse_loss, ["loss"], callbacks, verbose=0)
    found = trial.with_val_generator(mine()).evaluate()
    assert found["val_loss"] > 0


@on_two_ranks
def test_a_window_of_local_steps_without_a_sample_changes_nothing():
    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        if state[torchbearer.BATCH] == 3:
            return
        loss = functional.mse_loss(model(state[torchbearer.X]), state[torchbearer.Y_TRUE])
        state[torchbearer.LOSS] = loss
        loss.backward()

    model, noted = net(), []

    @on_step_training
    def note(state):
        noted.append([p.detach().clone() for p in model.parameters()])

    run(model, [*sync(every=3, loss="mean"), note], mine(), closure=closure)
    assert_replicas_equal(model)
    before = [torch.stack(collectives.all_gather(each, "it")).mean(0) for each in noted[2]]
    for found, expected in zip(model.parameters(), before, strict=True):
        assert torch.allclose(found, expected)
        assert found.abs().sum() > 0


@on_two_ranks
def test_local_steps_that_ended_at_different_batches_go_on_together():
    model = net()
    failing = [True]

    @on_step_training
    def fail(state):
        if failing[0] and state[torchbearer.BATCH] == 3 + collectives.rank():
            raise KeyError("a bad batch")

    callbacks = [fail, *sync(every=3, loss="mean")]
    trial = Trial(model, sgd(model), nn.functional.mse_loss, callbacks=callbacks, verbose=0)
    trial.with_train_generator(mine([[3] * 6] * 2))
    with pytest.raises(KeyError):
        trial.run(1)
    failing[0] = False
    trial.run(1)
    assert_replicas_equal(model)


@on_two_ranks
def test_an_evaluation_shows_the_loss_as_the_run_before_it_did():
    def total(predicted, target):
        return ((predicted - target) ** 2).sum()

    data = TensorDataset(*map(torch.cat, zip(*batches(5), strict=True)))
    dealt = DataLoader(data, 3, sampler=DistributedSampler(data, shuffle=False))
    model = net()
    callbacks = data_parallel(shard=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    trial = Trial(model, optimizer, total, ["loss"], callbacks, verbose=0)
    history = trial.with_train_generator(mine()).with_val_generator(dealt).run(1)
    assert trial.evaluate()["val_loss"] == pytest.approx(history[-1]["val_loss"])
