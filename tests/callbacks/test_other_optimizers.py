"""Optimizers, losses and modules beside the Trial's own: as one process, or a sentence."""

import pytest
import torch
import torchbearer
from torch import nn
from torch.nn import functional
from torchbearer import Trial
from torchbearer.callbacks import Callback, on_backward, on_start_epoch, on_step_training

from tests.callbacks.averaging import (
    UNEVEN,
    Probe,
    add_two_batches,
    assert_close,
    assert_replicas_equal,
    joined,
    mine,
    net,
    on_every_transport,
    on_two_ranks,
    run,
    sgd,
    summed,
    sync,
)
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives


class AuxiliaryHead(Callback):
    """A second optimizer for the model and for a head of its own."""

    def __init__(self, model):
        self.model, self.head = model, net(3, (2, 1))
        self.optimizer = torch.optim.SGD([*model.parameters(), *self.head.parameters()], 0.05)

    def on_step_training(self, state):
        self.optimizer.zero_grad()
        predicted = self.head(self.model(state[torchbearer.X]))
        functional.mse_loss(predicted, state[torchbearer.Y_TRUE][:, :1]).backward()
        self.optimizer.step()


@on_every_transport
def test_an_optimizer_that_shares_parameters_with_the_trials():
    model, one = net(), net()
    ours, ones = AuxiliaryHead(model), AuxiliaryHead(one)
    run(model, [*sync(), ours], mine())
    run(one, [ones], joined())
    assert_close(model, one)
    assert_close(ours.head, ones.head)


class SparseLater(nn.Module):
    """An embedding that is absent, or dense, at the first step, and sparse afterwards."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Parameter(torch.randn(12, 2)), nn.Linear(6, 2)
        self.first, self.calls = first, 0

    def forward(self, x):
        self.calls += 1
        found = self.layer(x)
        if self.calls == 1 and self.first == "absent":
            return found
        is_sparse = self.calls > 1
        if self.first == "mixed" and self.calls > 1:
            is_sparse = collectives.rank() == 0  # of one process the sum would be dense
        indices = (x[:, :2] * 100).long().abs() % 12
        return found + functional.embedding(indices, self.table, sparse=is_sparse).sum(1)


@pytest.mark.parametrize("first", ["absent", "dense", "mixed"])
def test_gradients_that_become_sparse_later(first, transport_ranks):
    @on_every_transport
    def body():
        model, one = SparseLater(first), SparseLater("dense")
        one.first = first if first == "absent" else "dense"
        run(model, sync(), mine(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
        run(one, [], joined(), optimizer=torch.optim.SGD(one.parameters(), 0.1))
        assert model.table.grad.is_sparse == (first != "mixed")
        assert_close(model, one)

    body(transport_ranks)


@on_every_transport
def test_a_gradient_that_a_callback_sets_by_hand():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = net(), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.inner(x)

    @on_backward
    def set_by_hand(state):
        model = state[torchbearer.MODEL]
        model.scale.grad = state[torchbearer.Y_TRUE].mean(0)

    model, one = Scaled(), Scaled()
    run(model, [*sync(), set_by_hand], mine(UNEVEN))
    run(one, [set_by_hand], joined(UNEVEN[: collectives.world_size()]))
    assert_close(model, one)


class SummingProbe(Probe):
    """Trains its layer with a loss that sums."""

    def on_step_training(self, state):
        predicted = self.layer()(state[torchbearer.Y_PRED].detach())
        self.zero()
        summed(predicted, state[torchbearer.Y_TRUE][:, :1]).backward()
        self.step()


@on_two_ranks
def test_what_is_said_of_losses_holds_for_every_optimizer():
    probe, one = SummingProbe(), SummingProbe()
    run(net(), [*sync(loss="sum"), probe], mine(), criterion=summed)
    run(net(), [one], joined(), criterion=summed)
    assert_close(probe.layer(), one.layer())


@on_two_ranks
def test_steps_before_the_first_batch_and_in_evaluation():
    class Early(Probe):
        def on_step_training(self, state):
            pass

        def on_start_epoch(self, state):
            x, y = data[0]
            self.zero()
            functional.mse_loss(self.layer()(x[:, :2]), y[:, :1]).backward()
            self.step()

    data = mine()
    probe, one = Early(), Early()
    run(net(), [*sync(), probe], data)
    data = joined()
    run(net(), [one], data)
    assert_close(probe.layer(), one.layer())


@on_two_ranks
def test_a_criterion_that_is_exchanged_between_epochs():
    @on_start_epoch
    def exchange(state):
        losses = functional.mse_loss, summed
        state[torchbearer.CRITERION] = losses[state[torchbearer.EPOCH] % 2]

    model, one = net(), net()
    run(model, [*sync(), exchange], mine(), epochs=3)
    run(one, [exchange], joined(), epochs=3)
    assert_close(model, one)


@on_two_ranks
def test_a_closure_with_a_loss_of_its_own_is_not_taken_for_the_criterion():
    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        predicted = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.LOSS] = summed(predicted, state[torchbearer.Y_TRUE])
        state[torchbearer.LOSS].backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)

    gradients = sync()
    kinds = []

    @on_step_training
    def look(state):
        kinds.append(gradients[1].loss_kind)

    run(net(), [*gradients, look], mine(), closure=closure)
    assert set(kinds) == {"unknown"}
    told, one = net(), net()
    run(told, sync(loss="sum"), mine(), closure=closure)
    run(one, [], joined(), closure=closure)
    assert_close(told, one)


@on_two_ranks
def test_a_module_that_only_one_rank_has_is_named():
    class Copy(Callback):
        def on_step_training(self, state):
            if collectives.rank() == 0 and state[torchbearer.BATCH] == 2:
                self.average = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))

    with pytest.raises(DesyncError, match=r"disagree on .*callbacks\[2\]\.average.*RankZeroOnly"):
        run(net(), [*sync(), Copy()], mine())


@on_two_ranks
def test_other_layers_frozen_on_each_rank_are_named():
    @on_step_training
    def freeze(state):
        if state[torchbearer.BATCH] == 1:
            state[torchbearer.MODEL][2 * collectives.rank()].requires_grad_(False)

    with pytest.raises(DesyncError, match=r"disagree on .*requires_grad"):
        run(net(), [*sync(), freeze], mine())


@on_two_ranks
def test_a_layer_that_is_replaced_in_the_optimizer():
    @on_step_training
    def replace(state):
        if state[torchbearer.BATCH] == 1:
            model = state[torchbearer.MODEL]
            model[0] = net(9, (6, 5))[0]
            state[torchbearer.OPTIMIZER].param_groups[0]["params"][:] = model.parameters()

    model, one = net(), net()
    run(model, [*sync(), replace], mine(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    run(one, [replace], joined(), optimizer=torch.optim.SGD(one.parameters(), 0.1))
    assert_close(model, one)


@on_two_ranks
def test_sums_that_a_callback_has_replaced_are_refused_too():
    @on_backward
    def halve(state):
        for parameter in state[torchbearer.MODEL].parameters():
            parameter.grad = parameter.grad * 0.5

    with pytest.raises(DesyncError, match="The loss is a sum"):
        run(net(), [*sync(loss="sum"), halve], mine(), closure=add_two_batches)


@on_two_ranks
def test_one_list_of_callbacks_for_a_trial_inside_a_run():
    callbacks = sync()

    class Inner(Callback):
        def on_step_training(self, state):
            other = net(8)
            Trial(other, sgd(other), functional.mse_loss, callbacks=callbacks, verbose=0).evaluate()

    with pytest.raises(ValueError, match="another Trial with it was started inside that run"):
        run(net(), [*callbacks, Inner()], mine())
    with pytest.raises(ValueError, match="SyncGradients is in the list of callbacks 2 times"):
        Trial(net(), callbacks=[sync()[1], sync()[1]])
    with pytest.raises(ValueError, match=r"skip has '0\.weight'"):
        sync(skip=["0.weight"])


@on_two_ranks
def test_lbfgs_with_a_closure_that_returns_a_number():
    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        predicted = state[torchbearer.MODEL](state[torchbearer.X].double())
        loss = functional.mse_loss(predicted, state[torchbearer.Y_TRUE].double())
        loss.backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)
        return loss.item()

    model = net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=5)
    run(model, sync(loss="mean"), mine(), optimizer=optimizer, closure=closure)
    assert_replicas_equal(model)


@on_two_ranks
def test_a_lazy_layer_and_accumulation_with_a_second_optimizer_are_refused():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        run(model, sync(), mine(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    model = net()
    with pytest.raises(ValueError, match=r"callbacks\[2\]\.optimizer trains parameters of the"):
        run(model, [*sync(accumulate=2), AuxiliaryHead(model)], mine())
