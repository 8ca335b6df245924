"""Closures that skip a batch, try it again or compute a loss of their own: still one process."""

import functools

import pytest
import torch
import torchbearer
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchbearer import Trial
from torchbearer.bases import base_closure

from tests.callbacks.averaging import (
    Fails,
    assert_close,
    assert_replicas_equal,
    batches,
    net,
    on_every_transport,
    on_two_ranks,
    sync,
)
from tests.log_lines import LogLines
from torchbearer_ddp import Checkpoint, MixedPrecision
from torchbearer_ddp.group import collectives

KEYS = (torchbearer.X, torchbearer.MODEL, torchbearer.Y_PRED, torchbearer.Y_TRUE)
STANDARD = base_closure(*KEYS, torchbearer.CRITERION, torchbearer.LOSS, torchbearer.OPTIMIZER)
#: What zero_grad is called with before a batch is skipped; "not" if it is not called at all.
CLEARS = [True, False, "not"]


class Words(nn.Module):
    """A table with sparse gradients in front of a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table, self.out = nn.Embedding(12, 6, sparse=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.table(x[:, 0].abs().mul(10).long() % 12))


class Parts(nn.Module):
    """Two layers, of which the second can be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.uses_second = nn.Linear(6, 2), nn.Linear(6, 2), True

    def forward(self, x):
        return self.first(x) + (self.second(x) if self.uses_second else 0.0)


def skipping(clears, closure=STANDARD):
    """A closure that makes nothing of a batch that is not finite."""

    def skip_or_go_on(state):
        if torch.isfinite(state[torchbearer.X]).all():
            closure(state)
        elif clears != "not":
            state[torchbearer.OPTIMIZER].zero_grad(set_to_none=clears)

    return skip_or_go_on


def with_bad(data, *bad):
    return [(x * torch.nan, y) if i in bad else (x, y) for i, (x, y) in enumerate(data)]


def mine(*bad, ranks=(0,)):
    """The batches of this rank, of which some ranks have bad ones."""
    rank = collectives.rank()
    return with_bad(batches(rank), *(bad if rank in ranks else ()))


def together(*bad, ranks=(0,)):
    """The batches of one process: without the bad ones."""
    steps = []
    for i, step in enumerate(zip(*map(batches, range(collectives.world_size())), strict=True)):
        good = [each for rank, each in enumerate(step) if i not in bad or rank not in ranks]
        steps.append(tuple(map(torch.cat, zip(*(good or step), strict=True))))
        if not good:
            steps[-1] = (steps[-1][0] * torch.nan, steps[-1][1])
    return steps


def train(model, callbacks, runs, closure=STANDARD, **more):
    """Trains by several runs, each with data of its own."""
    optimizer = more.get("optimizer") or torch.optim.SGD(model.parameters(), 0.02)
    criterion = more.get("criterion", functional.mse_loss)
    trial = Trial(model, optimizer, criterion, callbacks=callbacks, verbose=0)
    trial.with_closure(closure)
    for epochs, data in enumerate(runs, 1):
        trial.with_train_generator(data).run(epochs)
    return trial


def check(make, options, ours, one, closure=STANDARD, **more):
    """Compares a model that the ranks train with one that one process trains."""
    model, alone = make(), make()
    train(model, sync(**options), ours, closure, **more)
    train(alone, [], one, closure, **more)
    assert_close(model, alone)
    assert_replicas_equal(model)


@pytest.mark.parametrize("make", [net, Words])
def test_a_batch_that_one_rank_skips_wherever_it_is(make, transport_ranks):
    @on_every_transport
    def body():
        for clears in CLEARS:
            for bad in (0, 2):  # the first batch of a run has no buckets yet
                ours, one = [mine(), mine(bad)], [together(), together(bad)]
                check(make, {}, ours, one, skipping(clears))

    body(transport_ranks)


@pytest.mark.parametrize("make", [net, Words])
def test_a_batch_that_all_ranks_skip_does_what_it_does_in_one_process(make, two_ranks):
    @on_two_ranks
    def body():
        everyone = (0, 1)
        for clears in CLEARS:
            ours, one = mine(2, ranks=everyone), together(2, ranks=everyone)
            criterion = nn.MSELoss(reduction="sum")
            check(make, {}, [mine(), ours], [together(), one], skipping(clears))
            ours, one = [mine(), ours], [together(), one]
            check(make, {}, ours, one, skipping(clears), criterion=criterion)

    body(two_ranks)


@on_every_transport
def test_a_rank_that_skips_does_not_step_on_what_the_others_have_cleared():
    def closure(state):
        state[torchbearer.MODEL].uses_second = state[torchbearer.BATCH] < 3
        skipping("not")(state)

    check(Parts, {}, [mine(3)], [together(3)], closure)


@on_two_ranks
def test_a_window_that_one_rank_skips():
    criterion = nn.MSELoss(reduction="sum")
    for clears in CLEARS:
        model, options = net(), {"accumulate": 2}
        train(model, sync(**options), [mine(2, 3)], skipping(clears), criterion=criterion)
        assert_replicas_equal(model)
        assert_close(model, by_hand(together(2, 3), criterion))


def by_hand(data, criterion):
    """Two batches a step, as a loop in one process adds them up."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for x, y in (first, second):
            criterion(model(x), y).backward()
        optimizer.step()
    return model


def trying_again(closure=STANDARD):
    """A closure that trains on a part of the batch where memory is not enough for all of it."""

    def closure_or_less(state):
        model, fails = state[torchbearer.MODEL], state[torchbearer.BATCH] == 2
        handle = None
        if fails and collectives.rank() == 0:
            handle = model.register_forward_hook(lambda *found: Fails.apply(found[2]))
        try:
            closure(state)
        except RuntimeError:
            handle.remove()
            state[torchbearer.X] = state[torchbearer.X][:1]
            state[torchbearer.Y_TRUE] = state[torchbearer.Y_TRUE][:1]
            closure(state)

    return closure_or_less


@on_every_transport
def test_a_closure_that_tries_again_with_a_smaller_batch():
    one = together()
    steps = zip(*map(batches, range(collectives.world_size())), strict=True)
    third = [each if rank else (each[0][:1], each[1][:1]) for rank, each in enumerate([*steps][2])]
    one[2] = tuple(map(torch.cat, zip(*third, strict=True)))
    for accumulate in (1, 4):
        model, alone = net(), net()
        train(model, sync(accumulate=accumulate), [mine()], trying_again())
        if accumulate == 1:
            train(alone, [], [one])
        else:
            everything = [tuple(map(torch.cat, zip(*one, strict=True)))]
            train(alone, [], [everything])
        assert_close(model, alone)


@on_two_ranks
def test_ignored_batches_and_frozen_layers_in_windows_whose_zeros_stay():
    def targets(data, ignored):
        drawn = torch.Generator().manual_seed(5)
        found = [(x, torch.randint(0, 2, (len(x),), generator=drawn)) for x, _ in data]
        if ignored and collectives.rank() == 0:
            found[-1][1][:] = -100
        return found

    for optimizer in (torch.optim.SGD, functools.partial(torch.optim.SGD, momentum=0.5)):
        for ignored in (False, True):
            model = net()
            steps = optimizer(model.parameters(), lr=0.1)
            steps.zero_grad = functools.partial(type(steps).zero_grad, steps, set_to_none=False)
            trial = Trial(
                model, steps, nn.CrossEntropyLoss(), callbacks=sync(accumulate=2), verbose=0
            )
            trial.with_train_generator(targets(mine()[:3], ignored)).run(1)
            model[0].weight.requires_grad_(False)
            trial.run(3)
            assert_replicas_equal(model)


@on_two_ranks
def test_batches_of_a_model_in_ddp_count_alike_on_all_ranks_in_a_window():
    sizes = [[3, 3, 3, 3], [3, 3, 3, 1]][collectives.rank()]
    model = DistributedDataParallel(net())
    train(model, sync(accumulate=2), [batches(collectives.rank(), sizes)])
    assert_replicas_equal(model)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_model_of_which_a_part_is_in_ddp_adds_up_batches(reduction, two_ranks):
    @on_two_ranks
    def body():
        def make(wrap):
            model = net(widths=(6, 5, 5, 2))
            return nn.Sequential(wrap(model[:2]), model[2:])

        sizes = [[3, 1, 2, 4], [3, 3, 3, 2]]
        mine_now = batches(collectives.rank(), sizes[collectives.rank()])
        model, criterion = make(DistributedDataParallel), nn.MSELoss(reduction=reduction)
        train(model, sync(accumulate=2), [mine_now], criterion=criterion)
        assert_replicas_equal(model)
        if reduction == "mean":  # each part as it is averaged: by batches in DDP, else by samples
            alone, both = make(lambda inner: inner), [batches(r, sizes[r]) for r in range(2)]
            optimizer = torch.optim.SGD(alone.parameters(), 0.02)
            inner, outer = [*alone[0].parameters()], [*alone[1].parameters()]
            for window in (slice(0, 2), slice(2, 4)):
                parts = [(criterion(alone(x), y), len(x)) for r in both for x, y in r[window]]
                total = sum(n for _, n in parts)
                by_batches = sum(loss for loss, _ in parts) / len(parts)
                by_samples = sum(loss * n for loss, n in parts) / total
                gradients = torch.autograd.grad(by_batches, inner, retain_graph=True)
                gradients += torch.autograd.grad(by_samples, outer)
                for parameter, gradient in zip([*inner, *outer], gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            found = zip(model.parameters(), alone.parameters(), strict=True)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in found)

    body(two_ranks)


@on_two_ranks
def test_a_head_is_trained_beside_old_gradients_of_the_rest():
    for bad in (1, 2):
        model, alone = net(), net()
        for each, callbacks, data in (
            (model, sync(), mine(bad)),
            (alone, [], together(bad)),
        ):
            train(each, callbacks, [mine() if callbacks else together()])
            each[0].requires_grad_(False)
            head = torch.optim.SGD(each[2].parameters(), 0.02)
            train(each, callbacks, [data, data], skipping("not"), optimizer=head)
        assert_close(model, alone)
        assert_replicas_equal(model)


@on_two_ranks
def test_a_wrapped_closure_is_one_of_the_users_own():
    @functools.wraps(STANDARD)
    def closure(state):
        STANDARD(state)

    check(net, {}, [mine()], [together()], closure)
    check(
        net,
        {},
        [mine()],
        [together()],
        functools.update_wrapper(functools.partial(STANDARD), STANDARD),
    )


@on_two_ranks
def test_a_sparse_gradient_of_a_batch_that_counts_nothing_in_a_window():
    def masked(y_pred, y_true):  # a mean over what is not zero, of which there may be none
        kept = y_true != 0
        return ((y_pred - y_true).pow(2) * kept).sum() / kept.sum()

    def weight(state):
        return float((state[torchbearer.Y_TRUE] != 0).sum())

    model, alone = Words(), Words()
    data = mine()
    if collectives.rank() == 0:
        data[1] = data[1][0], torch.zeros_like(data[1][1])
    options = {"accumulate": 2, "loss": "mean", "weight": weight}
    train(model, sync(**options), [data], criterion=masked)
    one = together(1)
    windows = [tuple(map(torch.cat, zip(*one[i : i + 2], strict=True))) for i in (0, 2)]
    train(alone, [], [windows], criterion=masked)
    assert_close(model, alone)


@on_two_ranks
def test_local_steps_count_the_last_try():
    model, data = net(), mine()
    callbacks = sync(every=4)
    train(model, callbacks, [data], trying_again())
    single = net()
    mine_alone = [*data]
    if collectives.rank() == 0:
        mine_alone[2] = data[2][0][:1], data[2][1][:1]
    train(single, [], [mine_alone])
    total = sum(len(x) for x, _ in mine_alone)
    found = collectives.all_gather((total, [p.detach() for p in single.parameters()]), "one by one")
    weights = [weight for weight, _ in found]
    for index, parameter in enumerate(model.parameters()):
        parts = [weight * each[index] for weight, each in found]
        assert torch.allclose(parameter, sum(parts) / sum(weights), atol=1e-5)


@on_two_ranks
def test_skipped_by_all_is_no_error_of_one_rank_in_half_precision():
    for clears in CLEARS:
        model = net()
        callbacks = [*sync(), MixedPrecision("fp16", init_scale=2.0**6)]
        train(model, callbacks, [mine(2, ranks=(0, 1))], skipping(clears))
        assert_replicas_equal(model)


def test_what_rounding_has_lost_keeps_its_unit_without_the_loss_scale(tmp_path, two_ranks):
    @on_two_ranks
    def body():
        found = []
        for compress in (None, "int8"):
            for epochs, dtype in enumerate(["fp16", "bf16"], 1):
                model = net(widths=(6, 200, 2))
                callbacks = sync(transport="gloo", compress=compress)
                callbacks += [
                    MixedPrecision(dtype),
                    Checkpoint(tmp_path / f"{compress}", monitor=None),
                ]
                optimizer = torch.optim.SGD(model.parameters(), 0.02)
                trial = Trial(model, optimizer, functional.mse_loss, callbacks=callbacks, verbose=0)
                trial.with_train_generator(mine()).run(epochs)
            found.append(model)
        assert_close(*found, tolerance=0.05)

    body(two_ranks)


def test_the_kind_of_a_loss_whose_first_batch_all_ranks_skip(two_ranks):
    @on_two_ranks
    def body():
        everyone = (0, 1)
        for bad in ((0,), (0, 1, 2)):
            criterion = nn.MSELoss(reduction="sum")
            ours, one = mine(*bad, ranks=everyone), together(*bad, ranks=everyone)
            with LogLines() as lines:
                check(net, {}, [ours], [one], skipping(True), criterion=criterion)
            assert not any("cannot be told" in line for line in lines)

    body(two_ranks)


def weighing_nothing(y_pred, y_true):
    """A sum; not a number where nothing is left of a batch."""
    return (y_pred - y_true).pow(2).sum() + (torch.nan if bool((y_true == 0).all()) else 0.0)


@on_two_ranks
def test_the_kind_of_a_loss_whose_first_value_is_not_finite():
    def sum_of_some(y_pred, y_true):
        wanted = y_true != 0
        nothing = torch.nan if not wanted.any() else 0.0  # as a mean over no samples
        return ((y_pred - y_true) * wanted).pow(2).sum() + nothing

    def closure(state):
        STANDARD(state)
        if not torch.isfinite(state[torchbearer.LOSS]):
            state[torchbearer.OPTIMIZER].zero_grad()

    def without_first(data):
        return [(data[0][0], torch.zeros_like(data[0][1])), *data[1:]]

    model, alone, callbacks = net(), net(), sync()
    train(model, callbacks, [without_first(mine())], closure, criterion=sum_of_some)
    assert callbacks[1].loss_kind == "sum"
    train(alone, [], [without_first(together())], closure, criterion=sum_of_some)
    assert_close(model, alone)


@on_two_ranks
def test_a_criterion_under_a_key_of_its_own_is_not_taken_for_that_of_the_trial():
    key = torchbearer.state_key("criterion of its own")
    closure = base_closure(*KEYS, key, torchbearer.LOSS, torchbearer.OPTIMIZER)
    model, gradients = net(), sync()
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        nn.MSELoss(),
        callbacks=gradients,
        verbose=0,
    )
    trial.state[key] = nn.MSELoss(reduction="sum")
    with LogLines() as lines:
        trial.with_closure(closure).with_train_generator(mine()).run(1)
    assert gradients[1].loss_kind == "unknown"
    if collectives.is_rank_zero():
        assert any("cannot be told" in line for line in lines)
