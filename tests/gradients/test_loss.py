"""The kinds of losses are told apart, and asking leaves no trace."""

import argparse
import functools
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
import torchbearer
from torch import nn
from torchbearer import State
from torchbearer.callbacks import Mixup

from torchbearer_ddp.gradients.loss import KINDS, Verdict, classify, combine, divisor

MU, LOGVAR = torchbearer.state_key("mu"), torchbearer.state_key("logvar")
CLASSES = 5


def run_state(x, y_pred, y_true, **others):
    """A run's state right after the criterion was called."""
    state = State()
    state[torchbearer.X], state[torchbearer.Y_PRED] = x, y_pred
    state[torchbearer.Y_TRUE] = y_true
    state[torchbearer.DEVICE] = "cpu"
    state[torchbearer.DATA] = torchbearer.TRAIN_DATA
    state[torchbearer.MODEL] = nn.Linear(3, CLASSES)
    state[torchbearer.HISTORY] = [{"loss": 1.0}] * len(x)
    for key, value in others.items():
        dict.__setitem__(state, key, value)
    return state


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def classification(count=12, dtype=torch.float32):
    torch.manual_seed(count)
    target = torch.randint(CLASSES, (count,))
    return run_state(drawn(count, 3), drawn(count, CLASSES, dtype=dtype).requires_grad_(), target)


def regression(count=12, dtype=torch.float32):
    torch.manual_seed(count)
    return run_state(drawn(count, 3), drawn(count, 4, dtype=dtype), drawn(count, 4, dtype=dtype))


def images(count=12, dtype=torch.float32):
    torch.manual_seed(count)
    shape = (count, 1, 4, 4)
    target = (torch.rand(shape) < 0.3).to(dtype)
    return run_state(drawn(count, 3), torch.rand(shape).to(dtype), target)


def autoencoder(count=12, dtype=torch.float32):
    state = images(count, dtype)
    state[torchbearer.X] = state[torchbearer.Y_TRUE]
    state[MU], state[LOGVAR] = drawn(count, 2, dtype=dtype), drawn(count, 2, dtype=dtype)
    return state


def sequences(count=12, dtype=torch.float32, padding=0):
    """Predictions (count, classes, length); the sequences have different lengths."""
    torch.manual_seed(count)
    target = torch.randint(1, CLASSES, (count, 7))
    for row in range(count):
        target[row, 1 + row % 6 :] = padding
    return run_state(drawn(count, 7), drawn(count, CLASSES, 7, dtype=dtype), target)


def log_probabilities(count=12, dtype=torch.float32):
    state = classification(count, dtype)
    state[torchbearer.Y_PRED] = state[torchbearer.Y_PRED].log_softmax(1)
    return state


def distributions(count=12, dtype=torch.float32):
    state = log_probabilities(count, dtype)
    state[torchbearer.Y_TRUE] = drawn(count, CLASSES, dtype=dtype).softmax(1)
    return state


def mixed(count=12, dtype=torch.float32):
    state = classification(count, dtype)
    torch.manual_seed(1)
    Mixup(lam=0.3).on_sample(state)
    return state


def vae_sum(state):
    mu, logvar = state[MU], state[LOGVAR]
    rebuilt = F.binary_cross_entropy(
        state[torchbearer.Y_PRED], state[torchbearer.X], reduction="sum"
    )
    return rebuilt - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def vae_mean(state):
    return vae_sum(state) / len(state[torchbearer.X])


def info_nce(y_pred, y_true):
    first, second = F.normalize(y_pred, dim=1), F.normalize(y_true, dim=1)
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


def dice(y_pred, y_true):
    return 1 - (2 * (y_pred * y_true).sum() + 1) / (y_pred.sum() + y_true.sum() + 1)


def dice_each(y_pred, y_true):
    both = (y_pred * y_true).flatten(1).sum(1)
    return (1 - (2 * both + 1) / (y_pred + y_true).flatten(1).sum(1).add(1)).mean()


def class_weights():
    return torch.linspace(0.1, 3.0, CLASSES)


def flat_tokens(y_pred, y_true):
    return F.cross_entropy(y_pred.transpose(1, 2).flatten(0, 1), y_true.flatten())


padded_loss = nn.CrossEntropyLoss(ignore_index=0)

TABLE = {
    "cross-entropy": ("mean", nn.CrossEntropyLoss(), classification),
    "cross-entropy, sum": ("sum", nn.CrossEntropyLoss(reduction="sum"), classification),
    "label smoothing": ("mean", nn.CrossEntropyLoss(label_smoothing=0.1), classification),
    "class weights": ("weighted", nn.CrossEntropyLoss(class_weights()), classification),
    "class weights and smoothing": (
        "weighted",
        nn.CrossEntropyLoss(class_weights(), label_smoothing=0.1),
        classification,
    ),
    "class weights, sum": (
        "sum",
        nn.CrossEntropyLoss(class_weights(), reduction="sum"),
        classification,
    ),
    "ignored class": ("weighted", nn.CrossEntropyLoss(ignore_index=2), classification),
    "class that is never there": ("weighted", nn.CrossEntropyLoss(ignore_index=99), classification),
    "padded sequences": ("weighted", padded_loss, sequences),
    "padded sequences, torch's default": (
        "weighted",
        nn.CrossEntropyLoss(),
        functools.partial(sequences, padding=-100),
    ),
    "padded sequences, a function": (
        "weighted",
        flat_tokens,
        functools.partial(sequences, padding=-100),
    ),
    "padded sequences, a function of the state": (
        "weighted",
        lambda state: padded_loss(state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE]),
        sequences,
    ),
    "sequences without padding": ("weighted", nn.CrossEntropyLoss(), sequences),
    "NLL": ("mean", nn.NLLLoss(), log_probabilities),
    "NLL weights": ("weighted", nn.NLLLoss(class_weights()), log_probabilities),
    "targets are probabilities": ("mean", nn.CrossEntropyLoss(class_weights()), distributions),
    "KL batchmean": ("mean", nn.KLDivLoss(reduction="batchmean"), distributions),
    "KL sum": ("sum", nn.KLDivLoss(reduction="sum"), distributions),
    "MSE": ("mean", nn.MSELoss(), regression),
    "MSE sum": ("sum", nn.MSELoss(reduction="sum"), regression),
    "Huber": ("mean", nn.HuberLoss(), regression),
    "BCE": ("mean", nn.BCELoss(), images),
    "BCE sum": ("sum", nn.BCELoss(reduction="sum"), images),
    "VAE, sum": ("sum", vae_sum, autoencoder),
    "VAE, mean": ("mean", vae_mean, autoencoder),
    "mixup": ("mean", Mixup.mixup_loss, mixed),
    "RMSE": ("coupled", lambda p, t: F.mse_loss(p, t).sqrt(), regression),
    "InfoNCE": ("coupled", info_nce, regression),
    "dice": ("coupled", dice, images),
    "dice of each image": ("mean", dice_each, images),
    "mean + constant": ("mean", lambda p, t: F.mse_loss(p, t) + 3, regression),
    "sum + mean": (
        "coupled",
        lambda p, t: F.mse_loss(p, t, reduction="sum") + F.l1_loss(p, t),
        regression,
    ),
    "sum + weight decay": (
        "coupled",
        lambda s: (
            F.mse_loss(s[torchbearer.Y_PRED], s[torchbearer.Y_TRUE], reduction="sum")
            + s[torchbearer.MODEL].weight.square().sum()
        ),
        regression,
    ),
    "mean + weight decay": (
        "mean",
        lambda s: (
            F.mse_loss(s[torchbearer.Y_PRED], s[torchbearer.Y_TRUE])
            + s[torchbearer.MODEL].weight.square().sum()
        ),
        regression,
    ),
    "difference of means": ("mean", lambda p, t: (p + 1e3).mean() - (t + 1e3).mean(), regression),
    "softmax over the batch": ("coupled", lambda p, t: (p.softmax(0) * t).sum(), regression),
}


@pytest.mark.parametrize("count", [2, 3, 12, 700])
@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_losses(name, count):
    kind, criterion, batch = TABLE[name]
    state = batch(count)
    verdict = classify(criterion, state)
    assert verdict.kind in KINDS
    assert verdict == Verdict(kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_losses_in_other_precisions(name, dtype):
    kind, criterion, batch = TABLE[name]
    assert classify(criterion, batch(12, dtype)) == Verdict(kind)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, y_pred, y_true):
        return F.mse_loss(self.drop(y_pred), y_true)


class Annealed(nn.Module):
    """Counts its calls, in an attribute and in a buffer, and draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, y_pred, y_true):
        self.calls += 1
        self.seen.append(len(y_pred))
        noise = torch.rand((), generator=self.generator)
        return F.mse_loss(y_pred, y_true) * self.calls * noise


class Weak(nn.Module):
    """A criterion with weights in single precision, which cannot be called in double precision."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, y_pred, y_true):
        return self.net(y_pred - y_true).mean()


def needs_all(y_pred, y_true):
    if len(y_pred) < 12:
        raise RuntimeError("there must be 12 samples")
    return F.mse_loss(y_pred, y_true)


def undefined_on_parts(y_pred, y_true):
    return F.mse_loss(y_pred, y_true) / (len(y_pred) // 12 or float("nan"))


@pytest.mark.parametrize(
    ("criterion", "reason", "later"),
    [
        (Noisy(), "it draws random numbers", False),
        (lambda p, t: F.mse_loss(p * random.random(), t), "it draws random numbers", False),
        (lambda p, t: F.mse_loss(p * numpy.random.rand(), t), "it draws random numbers", False),
        (Annealed(), "it returns another value each time", False),
        (needs_all, "it raised RuntimeError on 4 of 12 samples: there must be 12 samples", False),
        (undefined_on_parts, "its value is not a finite number", False),
        (nn.MSELoss(reduction="none"), "it returns a tensor of shape (12, 4)", False),
        (lambda p, t: (p * 0).sum(), "its value is zero on this batch", True),
    ],
)
def test_what_cannot_be_told_has_a_reason(criterion, reason, later):
    verdict = classify(criterion, regression())
    assert verdict.kind == "unknown"
    assert verdict.reason.startswith(reason)
    assert verdict.later is later


def test_one_sample_does_not_tell_but_a_later_batch_may():
    assert classify(nn.MSELoss(), regression(1)) == Verdict(
        "unknown", "the batch has only one sample", later=True
    )


def test_a_sum_to_which_a_callback_has_added_is_not_a_sum():
    state = regression()
    criterion = nn.MSELoss(reduction="sum")
    state[torchbearer.LOSS] = criterion(state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
    assert classify(criterion, state) == Verdict("sum")
    state[torchbearer.LOSS] = state[torchbearer.LOSS] * 1.01
    verdict = classify(criterion, state)
    assert verdict.kind == "unknown"
    assert "a callback or a closure has changed it" in verdict.reason


def test_asking_leaves_no_trace():
    criterion, state = Annealed(), regression()
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate(), criterion.generator.get_state()
    keys = list(state)
    buffer, seen = criterion.calls, criterion.seen
    for each in (criterion, Noisy()):
        classify(each, state)
    assert criterion.calls is buffer
    assert buffer == 0
    assert criterion.seen is seen
    assert not seen
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert torch.equal(before[2], criterion.generator.get_state())
    assert list(state) == keys


class Meter:
    """As in many projects: not callable, and known to the criterion as a variable."""

    def __init__(self):
        self.values = []
        self.count = 0

    def update(self, value):
        self.values.append(value)
        self.count += 1


CALLS, SHARED_METER = 0, Meter()


def test_asking_leaves_no_trace_in_the_variables_that_a_criterion_counts_in():
    calls, counts, meter = 0, {"calls": 0, "sizes": []}, Meter()
    options = argparse.Namespace(beta=0.0)

    def criterion(y_pred, y_true):
        global CALLS, FIRST_SIZE
        nonlocal calls
        calls, CALLS, FIRST_SIZE = calls + 1, CALLS + 1, len(y_pred)
        counts["calls"] += 1
        counts["sizes"].append(len(y_pred))
        criterion.calls = getattr(criterion, "calls", 0) + 1
        options.beta += 0.1
        loss = F.mse_loss(y_pred, y_true)
        for each in (meter, SHARED_METER):
            each.update(loss.item())
        return loss

    assert classify(criterion, regression()) == Verdict("mean")
    assert (calls, CALLS, counts, options.beta) == (0, 0, {"calls": 0, "sizes": []}, 0.0)
    assert not hasattr(criterion, "calls")
    assert "FIRST_SIZE" not in globals()
    for each in (meter, SHARED_METER):
        assert (each.count, each.values) == (0, [])
    criterion(torch.zeros(3), torch.zeros(3))
    assert (calls, CALLS, counts["sizes"], criterion.calls, meter.count) == (1, 1, [3], 1, 1)


def test_a_module_in_a_closure_or_in_the_state_keeps_its_buffers_and_its_backward():
    weak, state = Weak(), regression()
    state[torchbearer.MODEL] = nn.BatchNorm1d(4)
    state[torchbearer.Y_PRED] = drawn(12, 4).requires_grad_()

    def criterion(run):
        inner = weak(run[torchbearer.Y_PRED], run[torchbearer.Y_TRUE])
        return inner + run[torchbearer.MODEL](run[torchbearer.Y_PRED]).square().mean()

    loss = criterion(state)
    norms = (weak.net[0], state[torchbearer.MODEL])
    before = [norm.running_var.clone() for norm in norms]
    assert classify(criterion, state).kind in ("coupled", "mean")
    for norm, value in zip(norms, before, strict=True):
        assert torch.equal(norm.running_var, value)
        assert norm.num_batches_tracked == 1
    loss.backward()  # a buffer that was written to would raise here


def test_a_criterion_that_writes_into_its_inputs_changes_nothing():
    state = regression()

    def criterion(y_pred, y_true):
        return F.mse_loss(y_pred.clamp_(0, 0.1), y_true.mul_(2))

    before = [state[key].clone() for key in (torchbearer.Y_PRED, torchbearer.Y_TRUE)]
    assert classify(criterion, state) == Verdict("mean")
    assert torch.equal(before[0], state[torchbearer.Y_PRED])
    assert torch.equal(before[1], state[torchbearer.Y_TRUE])


def test_batches_of_lists_and_dicts_are_cut():
    state = regression()
    state[torchbearer.X] = {"image": state[torchbearer.X], "names": list("abcdefghijkl")}
    state[torchbearer.Y_PRED] = [{"boxes": drawn(3, 4)} for _ in range(12)]
    state[torchbearer.Y_TRUE] = [{"boxes": drawn(3, 4)} for _ in range(12)]

    def criterion(run):
        pairs = zip(run[torchbearer.Y_PRED], run[torchbearer.Y_TRUE], strict=True)
        assert len(run[torchbearer.X]["names"]) == len(run[torchbearer.X]["image"])
        return torch.stack([F.l1_loss(a["boxes"], b["boxes"]) for a, b in pairs]).mean()

    assert classify(criterion, state) == Verdict("mean")
    assert classify(
        lambda run: criterion(run) * len(run[torchbearer.X]["names"]), state
    ) == Verdict("sum")


def test_flattened_sequences_are_cut_between_samples():
    state = sequences(padding=-100)
    state[torchbearer.Y_PRED] = state[torchbearer.Y_PRED].transpose(1, 2).flatten(0, 1)
    state[torchbearer.Y_TRUE] = state[torchbearer.Y_TRUE].flatten()
    criterion = nn.CrossEntropyLoss()
    assert classify(criterion, state) == Verdict("weighted")
    state[torchbearer.Y_TRUE] = state[torchbearer.Y_TRUE].abs() % CLASSES
    assert classify(nn.CrossEntropyLoss(reduction="sum"), state) == Verdict("sum")


def test_the_divisor_is_what_the_loss_divides_by():
    for criterion, state in (
        (nn.CrossEntropyLoss(class_weights(), ignore_index=2), classification()),
        (padded_loss, sequences()),
        (nn.NLLLoss(class_weights()), log_probabilities()),
        (TABLE["padded sequences, a function of the state"][1], sequences()),
    ):
        summed = nn.CrossEntropyLoss if not isinstance(criterion, nn.NLLLoss) else nn.NLLLoss
        module = criterion if isinstance(criterion, nn.Module) else padded_loss
        total = summed(module.weight, ignore_index=module.ignore_index, reduction="sum")
        values = state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE]
        found = divisor(criterion, state, "weighted")
        assert total(*values).item() / found == pytest.approx(module(*values).item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["mean", "sum", "coupled", "unknown"])
def test_the_divisor_of_other_kinds_is_the_number_of_samples(kind):
    assert divisor(nn.MSELoss(), regression(7), kind) == 7
    assert divisor(nn.CrossEntropyLoss(), classification(7), kind) == 7


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy, F.nll_loss])
def test_ignored_targets_of_a_later_batch_do_not_count_in_a_mean(criterion):
    state = classification(7)
    assert classify(criterion, state) == Verdict("mean")
    state[torchbearer.Y_TRUE][:3] = -100
    assert divisor(criterion, state, "mean") == 4


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch is older")
def test_a_loss_whose_ignored_target_is_not_named_ignores_the_usual_one():
    state, criterion = classification(7), nn.LinearCrossEntropyLoss(3, 3)
    state[torchbearer.Y_PRED] = torch.randn(7, 3)
    state[torchbearer.Y_TRUE] = state[torchbearer.Y_TRUE] % 3
    assert classify(criterion, state) == Verdict("mean")
    state[torchbearer.Y_TRUE][:3] = -100
    assert divisor(criterion, state, "mean") == 4
    assert classify(criterion, state) == Verdict("weighted")


def test_the_verdict_of_all_ranks():
    mean, weighted, coupled = Verdict("mean"), Verdict("weighted"), Verdict("coupled")
    later, never = Verdict("unknown", "zero", later=True), Verdict("unknown", "random")
    assert combine([mean, later]) == mean
    assert combine([weighted, mean]) == weighted
    assert combine([mean, coupled]) == coupled
    assert combine([later, later]) == later
    assert combine([later, never]) == never
    assert combine([mean, Verdict("sum")]).kind == "unknown"
