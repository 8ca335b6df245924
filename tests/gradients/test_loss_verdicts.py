"""The kind of a loss is looked at again: the first batch may not show it, and it may change."""

import pytest
import torch
import torch.nn.functional as F
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.bases import base_closure, standard_closure
from torchbearer.callbacks import Callback, on_end_epoch, on_step_training

from tests.log_lines import LogLines
from tests.ranks import ranks
from torchbearer_ddp import Checkpoint, data_parallel
from torchbearer_ddp.gradients import loss_verdicts
from torchbearer_ddp.gradients.loss import Verdict
from torchbearer_ddp.gradients.loss_verdicts import LossVerdicts, _differs
from torchbearer_ddp.gradients.weights import Average
from torchbearer_ddp.group import collectives

SAMPLES, BATCH = 48, 12
TOLD = "the kind of the loss is {!r} on this batch, but was {!r} on the first one"


def trained(criterion, *callbacks, model=None, epochs=2, closure=None, state=(), **options):
    """Trains on all ranks; returns the Trial, and what was said."""
    draws = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(SAMPLES, 6, generator=draws), torch.randint(3, (SAMPLES,), generator=draws)
    )
    torch.manual_seed(0)
    model = model or nn.Linear(6, 3)
    parallel = data_parallel(global_batch=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trial = Trial(model, optimizer, criterion, ["loss"], [*callbacks, *parallel], verbose=0)
    for key, value in state:
        trial.state[key] = value
    if closure is not None:
        trial.with_closure(closure)
    trial.with_train_generator(DataLoader(data, batch_size=BATCH))
    with LogLines() as lines:
        trial.run(epochs)
    return trial, lines


def parameters(trial):
    return torch.cat([p.detach().flatten() for p in trial.state[torchbearer.MODEL].parameters()])


def zero_head():
    model = nn.Linear(6, 3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def masked(y_pred, y_true):
    """A mean over some classes: with zeros as predictions every sample has the same loss."""
    kept = y_true != 2
    return (F.cross_entropy(y_pred, y_true, reduction="none") * kept).sum() / kept.sum()


def root(y_pred, y_true):
    return F.cross_entropy(y_pred, y_true).sqrt()


@pytest.mark.parametrize("criterion", [masked, root])
def test_samples_of_equal_loss_do_not_hide_that_they_are_coupled(criterion):
    @ranks(2)
    def body():
        _, lines = trained(criterion, model=zero_head(), epochs=1)
        if collectives.rank() == 0:
            assert sum(TOLD.format("coupled", "mean") in each for each in lines) == 1

    body()


def warming_up(per, first="mean", then="sum"):
    """A mean and a sum, one of which has no weight at first; a callback that gives it one."""
    weight = {"later": 0.0}

    def criterion(y_pred, y_true):
        later = getattr(y_pred.square(), then)()
        return F.cross_entropy(y_pred, y_true, reduction=first) + weight["later"] * later

    @per
    def grow(state):
        weight["later"] += 0.1

    return criterion, grow


@pytest.mark.parametrize("per", [on_step_training, on_end_epoch])
def test_a_term_whose_weight_grows_from_zero_is_noticed(per):
    @ranks(2)
    def body():
        _, lines = trained(*warming_up(per))
        if collectives.rank() == 0:
            assert sum(TOLD.format("coupled", "mean") in each for each in lines) == 1

    body()


@ranks(2)
def test_a_mean_that_is_added_to_a_sum_is_noticed():
    _, lines = trained(*warming_up(on_step_training, first="sum", then="mean"))
    if collectives.rank() == 0:
        assert sum(TOLD.format("coupled", "sum") in each for each in lines) == 1


@pytest.mark.parametrize("kinds", [("mean", "sum"), ("sum", "mean")])
def test_a_loss_that_becomes_another_kind_is_noticed(kinds):
    @ranks(2)
    def body():
        reduction = {"now": kinds[0]}

        def criterion(y_pred, y_true):
            return F.cross_entropy(y_pred, y_true, reduction=reduction["now"])

        @on_end_epoch
        def change(state):
            reduction["now"] = kinds[1]

        _, lines = trained(criterion, change, epochs=3)
        if collectives.rank() == 0:
            assert sum(TOLD.format(*reversed(kinds)) in each for each in lines) == 1

    body()


@pytest.mark.parametrize("per", [on_step_training, on_end_epoch])
@pytest.mark.parametrize("kinds", [("mean", "sum"), ("sum", "mean")])
def test_a_reduction_that_changes_is_followed_at_once(kinds, per):
    def program():
        criterion = nn.CrossEntropyLoss(reduction=kinds[0])

        @per
        def change(state):
            if state[torchbearer.EPOCH] == 1:
                criterion.reduction = kinds[1]

        return parameters(trained(criterion, change, epochs=4)[0])

    expected = program()

    @ranks(2)
    def body():
        torch.testing.assert_close(program(), expected, rtol=1e-5, atol=1e-7)

    body()


@ranks(2)
def test_an_attribute_of_that_name_may_be_anything():
    class Own(nn.CrossEntropyLoss):
        def forward(self, y_pred, y_true):
            return F.cross_entropy(y_pred, y_true)

    criterion = Own()
    criterion.reduction = torch.zeros(3)
    _, lines = trained(criterion, epochs=2)
    assert not any("loss" in each for each in lines)


@ranks(2)
def test_a_loss_of_torch_is_examined_once(monkeypatch):
    seen = []
    examine = loss_verdicts._examine
    monkeypatch.setattr(loss_verdicts, "_examine", lambda *a: seen.append(1) or examine(*a))
    for criterion in (nn.CrossEntropyLoss(), F.cross_entropy):
        seen.clear()
        trained(criterion, epochs=3)
        assert len(seen) == 1
    seen.clear()
    trained(root, epochs=3)
    assert len(seen) == (1 if collectives.rank() else 5)  # batches 0, 1, 3 and two more epochs


class MeanOrSum:
    """A closure of the user's own, whose loss is the criterion's or a sum."""

    def __init__(self, *, sums):
        self.sums = sums

    def __call__(self, state):
        state[torchbearer.OPTIMIZER].zero_grad()
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
        loss = state[torchbearer.CRITERION](state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
        state[torchbearer.LOSS] = loss * len(state[torchbearer.X]) if self.sums else loss
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        state[torchbearer.LOSS].backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)


def nothing_changes(trial):
    trial.run(2)


def another_closure(trial):
    trial.with_closure(MeanOrSum(sums=True)).run(2)


def another_criterion(trial):
    trial.state[torchbearer.CRITERION] = nn.CrossEntropyLoss(reduction="sum")
    trial.run(2)


def rank_zero_loads(trial):
    if collectives.is_rank_zero():
        trial.load_state_dict(trial.state_dict())
    trial.run(2)


def rank_zero_has_its_own_criterion(trial):
    if collectives.is_rank_zero():
        trial.state[torchbearer.CRITERION] = nn.CrossEntropyLoss()
    trial.run(2)


def rank_zero_has_its_own_closure(trial):
    if collectives.is_rank_zero():
        trial.with_closure(MeanOrSum(sums=False)).run(2)
    else:
        trial.run(2)
    trial.run(3)


def a_closure_that_changes(trial):
    closure = MeanOrSum(sums=False)
    trial.with_closure(closure).run(2)
    closure.sums = True
    trial.run(3)


@pytest.mark.parametrize(
    ("change", "looks", "told"),
    [
        (nothing_changes, 0, False),
        (rank_zero_loads, 1, False),
        (rank_zero_has_its_own_criterion, 1, False),
        (another_closure, 1, True),
        (another_criterion, 1, False),
        (a_closure_that_changes, 2, True),
    ],
)
def test_the_next_run_knows_what_cannot_have_changed_and_no_more(change, looks, told):
    def program():
        trial, _ = trained(nn.CrossEntropyLoss(), epochs=1)
        with pytest.MonkeyPatch.context() as patch, LogLines() as lines:
            seen, examine = [], loss_verdicts._examine
            patch.setattr(loss_verdicts, "_examine", lambda *a: seen.append(1) or examine(*a))
            change(trial)
        return parameters(trial), len(seen), "\n".join(lines)

    expected, _, _ = program()

    @ranks(2)
    def body():
        found, seen, lines = program()
        assert seen == looks
        if told:  # nobody can tell a mean from a sum there
            if collectives.is_rank_zero():
                assert "the closure computes another loss than the criterion" in lines
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

    body()


def test_ranks_that_know_different_things_of_the_loss_look_again_together():
    @ranks(2)
    def body():
        trial, _ = trained(nn.CrossEntropyLoss(), epochs=1)
        rank_zero_has_its_own_closure(trial)
        assert len(set(collectives.all_gather(parameters(trial).tolist()[0], "a weight"))) == 1

    body()


class PerPosition(nn.Module):
    """One class for each sample, or for each position of a sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return torch.einsum("cf,nf...->nc...", self.weight, x)


def test_a_mean_over_samples_is_one_over_targets_where_these_become_sequences():
    torch.manual_seed(1)
    single = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(4)]
    sequences = [(torch.randn(4, 6, 5), torch.randint(3, (4, 5))) for _ in range(4)]
    for index, (_, y) in enumerate(sequences):
        y[:, 5 - index :] = -100  # another number of targets in each batch

    def program(parts):
        model = PerPosition()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        callbacks = data_parallel(shard=False)
        trial = Trial(model, optimizer, nn.CrossEntropyLoss(), callbacks=callbacks, verbose=0)
        for epochs, data in enumerate(parts, 1):
            trial.with_train_generator(data).run(epochs)
        return parameters(trial)

    def joined(data):
        halves = [[torch.cat(each) for each in zip(*pair, strict=True)] for pair in by_two(data)]
        return [(x, y) for x, y in halves]

    def by_two(data):
        return list(zip(data[::2], data[1::2], strict=True))

    expected = program([joined(single), joined(sequences)])

    @ranks(2)
    def body():
        rank = collectives.rank()
        found = program([single[rank::2], sequences[rank::2]])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    body()


@ranks(2)
def test_what_a_second_network_keeps_under_its_own_key_is_not_taken_for_the_criterion():
    """Between two steps the state has the loss and the predictions of the one before."""
    other, optimizer, mean, loss, out = (
        torchbearer.state_key(f"second_{name}") for name in ("net", "opt", "crit", "loss", "out")
    )
    network = nn.Linear(6, 1)
    first = base_closure(torchbearer.X, other, out, torchbearer.X, mean, loss, optimizer)
    second = standard_closure()

    def closure(state):
        first(state)
        state[optimizer].step()
        second(state)

    state = (
        (other, network),
        (optimizer, torch.optim.SGD(network.parameters(), lr=0.0)),
        (mean, lambda y_pred, x: (y_pred - x).square().mean()),
    )

    def summing(state):
        return F.softplus(state[torchbearer.Y_PRED]).sum()

    _, lines = trained(summing, closure=closure, state=state)
    assert not any("on the first one" in each for each in lines)
    if collectives.rank() == 0:
        assert sum("under a key of its own" in each for each in lines) == 1
        assert sum("the loss is a sum" in each for each in lines) == 1


class Cut(Callback):
    """Ends the run as a failure would, at one step."""

    def __init__(self, at):
        self.at = at

    def on_step_training(self, state):
        if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == self.at:
            raise InterruptedError


@pytest.mark.parametrize("at", [(0, 1), (0, 2), (1, 0), (1, 2)])
def test_a_resumed_run_knows_the_kind_that_it_knew(at, tmp_path):
    @ranks(2)
    def body():
        def program(folder, at=None):
            return trained(
                nn.CrossEntropyLoss(reduction="sum"), Checkpoint(folder, every_steps=1), Cut(at)
            )

        folder = str(tmp_path / "cut")
        with pytest.raises(InterruptedError):
            program(folder, at)
        resumed, lines = program(folder)
        whole, _ = program(str(tmp_path / "whole"))
        assert torch.equal(parameters(resumed), parameters(whole))
        assert not any("on the first one" in each for each in lines)

    body()


@pytest.mark.parametrize(
    ("known", "later", "differs"),
    [
        ("mean", "mean", False),
        ("mean", "unknown", False),
        ("unknown", "weighted", False),
        ("mean", "sum", True),
        ("sum", "mean", True),
        ("coupled", "sum", False),
        ("sum", "coupled", True),
        ("mean", "coupled", True),
        ("weighted", "mean", False),
        ("mean", "weighted", True),
    ],
)
def test_what_two_batches_show(known, later, differs):
    assert _differs(known, later, masked) is differs


def test_ignored_targets_of_a_later_batch_are_no_other_kind():
    assert not _differs("mean", "weighted", nn.CrossEntropyLoss())


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_mean_divides_by_targets_once_samples_have_several(criterion):
    losses = LossVerdicts(None, None, None)
    losses.kinds = ["mean"]  # as the first batch, or the run before, has shown it
    target = torch.tensor([[1, 2, -100], [0, -100, -100]])
    state = {torchbearer.CRITERION: criterion, torchbearer.Y_TRUE: target}
    assert losses.weight({**state, torchbearer.X: torch.ones(2, 3)}, 0) == 3


def test_a_loss_that_cannot_be_told_yet_does_not_get_the_kind_of_the_next_one(monkeypatch):
    found = {"first": Verdict("unknown", "all are zero", later=True), "second": Verdict("sum")}
    monkeypatch.setattr(loss_verdicts, "_examine", lambda criterion, _: found[criterion])
    losses = LossVerdicts(None, None, None)
    with LogLines() as lines:
        for number, criterion in enumerate(found):
            loss = torch.ones(1, requires_grad=True)
            losses.find({torchbearer.LOSS: loss, torchbearer.CRITERION: criterion}, number)
    assert losses.average(0) is Average.WEIGHTED
    assert losses.average(1) is Average.SUM
    assert not any("of the steps before were averaged" in line for line in lines)
