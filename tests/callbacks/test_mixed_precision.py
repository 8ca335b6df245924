"""MixedPrecision: what a loop with autocast and GradScaler gives, on any number of ranks."""

from __future__ import annotations

import copy
import dataclasses
import io

import cloudpickle
import pytest
import torch
import torchbearer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torchbearer import Trial
from torchbearer.bases import base_closure
from torchbearer.callbacks import Callback, on_backward, on_criterion, on_sample, on_step_training

from tests import programs
from tests.callbacks import half_precision
from tests.callbacks.half_precision import CASES, Case, assert_same, batches, by_hand, network
from tests.gradients.transport_cases import option, pool_for
from tests.processes import bound
from tests.ranks import RankPool, ranks
from tests.stand_ins import nccl
from torchbearer_ddp import (
    Checkpoint,
    DesyncError,
    Int8State,
    MixedPrecision,
    SyncGradients,
    SyncModel,
    TensorBoard,
    data_parallel,
    int8_hook,
)
from torchbearer_ddp.group import collectives

POWERSGD = PowerSGDState(None)
#: So large that the first steps are skipped.
CALIBRATING = {"init_scale": half_precision.CALIBRATING, "growth_interval": 3}


@pytest.mark.parametrize("name", CASES)
def test_one_process_is_a_loop_by_hand(name):
    found, expected = half_precision.train(CASES[name], 2), by_hand(CASES[name], 1, 2)
    assert_same(found, expected)
    if CASES[name].init_scale == half_precision.CALIBRATING or CASES[name].overflow:
        assert expected.skipped, "the case shall skip steps"


@pytest.mark.parametrize("name", ["bf16", "fp16", "adam", "calibrating", "clipped"])
def test_one_process_has_the_same_bits(name):
    found, expected = half_precision.train(CASES[name], 2), by_hand(CASES[name], 1, 2)
    for ours, hand in zip(found.parameters, expected.parameters, strict=True):
        assert torch.equal(ours, hand)


@pytest.fixture(scope="module", params=[2, 3])
def some_ranks(request):
    with RankPool(request.param) as pool:
        yield request.param, pool


def train_all(transport):
    """Every case with small buckets, so that several travel."""
    options = {"transport": transport, "bucket_mb": 1e-4}
    return {
        name: half_precision.train(Case(**{**vars(case), "options": options}))
        for name, case in CASES.items()
    }


def assert_by_hand(pool, world_size, transport):
    everyone = pool.run(train_all, (transport,), timeout=bound(60))
    for name, case in CASES.items():
        expected = by_hand(case, world_size)
        for found in everyone:
            assert_same(found[name], expected)
            pairs = zip(found[name].parameters, everyone[0][name].parameters, strict=True)
            assert all(torch.equal(*pair) for pair in pairs), name


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ranks_are_a_loop_by_hand(some_ranks, transport):
    world_size, pool = some_ranks
    assert_by_hand(pool, world_size, transport)


def test_ranks_on_a_stand_in_for_nccl():
    with pool_for(nccl.NAME) as pool:
        assert_by_hand(pool, 2, option(nccl.NAME))


#: Gradients that single precision holds and fp16 does not, before the scale has become smaller.
LARGE = 3e2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_compressed_gradients_are_a_loop_by_hand(two_ranks, compress, dtype):
    """What the wire cannot carry is an infinity for every rank, and one more step is skipped."""
    case = Case(dtype, init_scale=2.0**14, factor=LARGE, compress=compress)
    case = dataclasses.replace(case, options={"transport": "gloo", "bucket_mb": 1e-4})
    everyone = two_ranks.run(half_precision.train, (case, 2))
    expected = by_hand(case, 2, 2)
    for found in everyone:
        assert_same(found, expected)
        for ours, other in zip(found.parameters, everyone[0].parameters, strict=True):
            assert torch.equal(ours, other)
    if dtype == "fp16":
        plain = by_hand(dataclasses.replace(case, compress=None), 2, 2)
        assert (expected.skipped > plain.skipped) == (compress == "fp16")


def residual_options(which):
    if which == "hook":
        return {"hook": int8_hook, "hook_state": Int8State()}
    return {"compress": which, "error_feedback": True, "transport": "gloo"}


def trained_with_residuals(which, growth_interval):
    model = network()
    precision = MixedPrecision("fp16", init_scale=2.0**6, growth_interval=growth_interval)
    Trial(
        model,
        torch.optim.SGD(model.parameters(), 1e-2),
        nn.MSELoss(),
        callbacks=[SyncModel(), SyncGradients(**residual_options(which)), precision],
        verbose=0,
    ).with_train_generator(batches(Case(), collectives.rank(), 2)).run(1)
    return precision.loss_scale, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("which", ["int8", "bf16", "hook"])
def test_what_rounding_has_lost_follows_the_scale(two_ranks, which):
    """A power of two changes no digit, so neither does a scale that grows with each step."""
    (fixed, expected), _ = two_ranks.run(trained_with_residuals, (which, 1000))
    (grown, found), _ = two_ranks.run(trained_with_residuals, (which, 1))
    assert grown > fixed
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


# The kind of the loss, which is found by evaluating the criterion.


class Projected(nn.Module):
    """A loss that multiplies matrices, which autocast rounds; a mean or a sum."""

    def __init__(self, reduce):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("matrix", torch.randn(2, 64, generator=generator))
        self.reduce = reduce

    def forward(self, y_pred, y_true):
        return self.reduce((y_pred @ self.matrix - y_true @ self.matrix).pow(2).mean(1))


def kind_of(dtype, reduce, closure):
    model = network()
    gradients = SyncGradients()
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), 1e-3),
        Projected(reduce),
        callbacks=[SyncModel(), gradients, MixedPrecision(dtype, init_scale=2.0**8)],
        verbose=0,
    )
    if closure:
        trial.with_closure(closure)
    trial.with_train_generator(batches(Case(), collectives.rank(), 2)).run(1)
    return gradients.loss_kind


def custom_closure(state):
    """As a user writes it; it is not torchbearer's, so its loss is compared with the criterion."""
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    state[torchbearer.LOSS] = state[torchbearer.CRITERION](
        state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE]
    )
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS])
    state[torchbearer.CALLBACK_LIST].on_backward(state)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("closure", [None, custom_closure])
def test_the_kind_of_the_loss_is_found_under_autocast(two_ranks, dtype, closure):
    assert two_ranks.run(kind_of, (dtype, torch.mean, closure)) == ["mean", "mean"]
    assert two_ranks.run(kind_of, (dtype, torch.sum, closure)) == ["sum", "sum"]


# Closures.


def one_trial(*callbacks, model=None, closure=None, optimizer=None):
    model = model or network()
    trial = Trial(
        model,
        optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.5),
        nn.functional.mse_loss,
        ["loss"],
        list(callbacks),
        verbose=0,
    )
    if closure:
        trial.with_closure(closure)
    data = batches(Case(), collectives.rank(), collectives.world_size())
    return trial.with_generators(data, data, [x for x, _ in data])


def forward(state):
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    return nn.functional.mse_loss(state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])


def silent(state):
    """Without on_backward; callbacks that clip would not act."""
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.LOSS] = forward(state)
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS])


def doubled(state):
    """Two passes into the same gradients, each with both hooks: the loss counts twice."""
    state[torchbearer.OPTIMIZER].zero_grad()
    for _ in range(2):
        state[torchbearer.LOSS] = forward(state)
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS])
        state[torchbearer.CALLBACK_LIST].on_backward(state)


def doubled_with_one_hook(state):
    """The same with one call of each hook."""
    state[torchbearer.OPTIMIZER].zero_grad()
    first, state[torchbearer.LOSS] = forward(state), forward(state)
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    first.backward(**state[torchbearer.BACKWARD_ARGS])
    state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS])
    state[torchbearer.CALLBACK_LIST].on_backward(state)


def after(closure, rate, scale, callbacks=()):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    precision = MixedPrecision("fp16", init_scale=scale, growth_interval=3)
    trial = one_trial(*callbacks, precision, model=model, closure=closure, optimizer=optimizer)
    trial.run(1)
    return [p.detach() for p in model.parameters()], precision.loss_scale


@pytest.mark.parametrize(
    ("closure", "rate", "scale"),
    [
        (silent, 0.1, half_precision.CALIBRATING),
        # What is added up overflows earlier: here nothing does.
        (doubled, 0.05, 2.0**8),
        (doubled_with_one_hook, 0.05, 2.0**8),
    ],
)
def test_closures_of_other_forms(closure, rate, scale, two_ranks):
    """The loss counts once, or twice at half the rate."""

    def on_a_rank():
        gradients = (SyncGradients(transport="gloo", loss="mean"),)
        return after(closure, rate, scale, gradients), after(None, 0.1, scale, gradients)

    for (found, its_scale), (expected, expected_scale) in [
        (after(closure, rate, scale), after(None, 0.1, scale)),
        *two_ranks.run(on_a_rank),
    ]:
        assert its_scale == expected_scale != scale
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def without_arguments(state):
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.LOSS] = forward(state)
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    state[torchbearer.LOSS].backward()
    state[torchbearer.CALLBACK_LIST].on_backward(state)


def without_hooks(state):
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.LOSS] = forward(state)
    state[torchbearer.LOSS].backward()


def half_plain(state):
    state[torchbearer.OPTIMIZER].zero_grad()
    extra, state[torchbearer.LOSS] = forward(state), forward(state)
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS])
    extra.backward()
    state[torchbearer.CALLBACK_LIST].on_backward(state)


def plain_first(state):
    state[torchbearer.OPTIMIZER].zero_grad()
    forward(state).backward()
    custom_closure_without_zeroing(state)


def custom_closure_without_zeroing(state):
    state[torchbearer.LOSS] = forward(state)
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS])
    state[torchbearer.CALLBACK_LIST].on_backward(state)


@pytest.mark.parametrize("closure", [without_arguments, without_hooks, half_plain, plain_first])
def test_a_pass_without_the_scale_is_refused(closure):
    with pytest.raises(ValueError, match=r"does not start from the loss scale.*BACKWARD_ARGS"):
        one_trial(MixedPrecision("fp16"), closure=closure).run(1)
    one_trial(MixedPrecision("bf16"), closure=closure).run(1)  # has no scale


def test_a_pass_that_only_one_rank_makes_is_refused(two_ranks):
    def body():
        def closure(state):
            state[torchbearer.OPTIMIZER].zero_grad()
            if collectives.rank() == 0 or state[torchbearer.BATCH] != 2:
                custom_closure_without_zeroing(state)

        callbacks = SyncGradients(loss="mean"), MixedPrecision("fp16")
        one_trial(*callbacks, closure=closure).run(1)

    # Rank 1 sees it; rank 0 then misses rank 1.
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*made no backward pass for this"):
        two_ranks.run(body)


def test_gradients_that_are_not_cleared_are_added_to():
    """A closure of one's own may clear them every other batch; the optimizer steps each time."""

    def closure(state):
        if state[torchbearer.BATCH] % 2 == 0:
            state[torchbearer.OPTIMIZER].zero_grad()
        custom_closure_without_zeroing(state)

    def after(*callbacks):
        model = network()
        one_trial(*callbacks, model=model, closure=closure).run(1)
        return list(model.parameters())

    precision = MixedPrecision("fp16", init_scale=2.0**4, growth_interval=2)
    single = after(precision), after()
    assert precision.loss_scale > 2.0**4  # it has changed between two passes
    for a, b in zip(*single, strict=True):
        assert torch.allclose(a, b, atol=0.02)


class Recording(nn.Linear):
    """Keeps the dtypes of what it returns."""

    def forward(self, x):
        result = super().forward(x)
        self.__dict__.setdefault("seen", []).append(result.dtype)
        return result


JUDGE, JUDGE_STEPS, JUDGE_LOSS, JUDGE_SAYS, JUDGE_RULE = map(
    torchbearer.state_key, ("amp_judge", "amp_steps", "amp_loss", "amp_says", "amp_rule")
)


def adversaries(precision):
    model, judge = Recording(6, 2), Recording(2, 1)
    one = base_closure(
        *(torchbearer.Y_TRUE, JUDGE, JUDGE_SAYS, torchbearer.Y_TRUE),
        *(JUDGE_RULE, JUDGE_LOSS, JUDGE_STEPS),
    )
    other = torchbearer.bases.standard_closure()

    def closure(state):
        one(state)
        state[JUDGE_STEPS].step()
        other(state)

    trial = one_trial(precision, model=model, closure=closure)
    trial.state[JUDGE] = judge
    trial.state[JUDGE_STEPS] = torch.optim.SGD(judge.parameters(), 0.1)
    trial.state[JUDGE_RULE] = lambda says, _: says.float().square().mean()
    return trial, model, judge


def test_every_forward_pass_of_a_closure_is_under_autocast():
    trial, model, judge = adversaries(MixedPrecision("bf16"))
    trial.run(1)
    assert set(model.seen) == set(judge.seen) == {torch.bfloat16}


def test_another_optimizer_on_a_scaled_loss_is_refused():
    trial, _, _ = adversaries(MixedPrecision("fp16"))
    with pytest.raises(ValueError, match="SGD beside it is about to step on gradients of a scaled"):
        trial.run(1)


class Probe(Callback):
    """Trains a module of its own on features, with a plain loss and a plain step."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1)

    def on_step_training(self, state):
        self.optimizer.zero_grad()
        self.module(state[torchbearer.Y_PRED].detach()).mean().backward()
        self.optimizer.step()


def test_another_optimizer_on_a_plain_loss_is_left_alone():
    torch.manual_seed(5)
    probe = Probe()
    expected = probe.module.weight.detach().clone()
    seen = []

    @on_step_training
    def remember(state):
        seen.append(state[torchbearer.Y_PRED].detach().mean(0))

    one_trial(MixedPrecision("fp16", **CALIBRATING), remember, probe).run(1)
    for features in seen:
        expected -= 0.1 * features
    assert torch.allclose(probe.module.weight, expected, atol=1e-5)


# What does not go together.


def test_lbfgs_is_refused_with_fp16_alone():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with pytest.raises(ValueError, match="does not work with LBFGS"):
        one_trial(MixedPrecision("fp16"), model=model, optimizer=optimizer).run(1)
    before = [p.detach().clone() for p in model.parameters()]
    model = copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure(state):  # LBFGS reads the loss that a closure returns
        custom_closure(state)
        return state[torchbearer.LOSS]

    one_trial(MixedPrecision("bf16"), model=model, optimizer=optimizer, closure=closure).run(1)
    assert not torch.equal(before[0], next(model.parameters()))


def test_half_parameters_are_refused():
    model = network().half()
    with pytest.raises(ValueError, match=r"keeps parameters in single precision"):
        one_trial(MixedPrecision("fp16"), model=model).run(1)


def test_an_optimizer_without_hooks_is_refused():
    model = network()

    class Foreign:
        param_groups = ()

        def zero_grad(self):
            model.zero_grad()

        def step(self, closure):
            closure()

    with pytest.raises(ValueError, match="Foreign calls no hooks before its step"):
        one_trial(MixedPrecision("bf16"), model=model, optimizer=Foreign()).run(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "half"}, "dtype is 'half': it is one of 'bf16', 'fp16'"),
        ({"init_scale": 0.0}, "must be above 0"),
        ({"growth_interval": 0}, "at least 1 step"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        MixedPrecision(**options)


def test_what_ranks_must_have_in_common(two_ranks):
    def body():
        model = network()
        dtype = "fp16" if collectives.rank() else "bf16"
        with pytest.raises(DesyncError, match="dtype of MixedPrecision"):
            one_trial(SyncModel(), SyncGradients(), MixedPrecision(dtype), model=model).run(1)
        for told in ({"compress": "powersgd"}, {"hook": powerSGD_hook, "hook_state": POWERSGD}):
            callbacks = SyncModel(), SyncGradients(**told), MixedPrecision("fp16")
            with pytest.raises(ValueError, match=r"PowerSGD adds what a step has lost to the next"):
                one_trial(*callbacks, model=model).run(1)
        callbacks = SyncModel(), SyncGradients(skip=[model[0]]), MixedPrecision("fp16")
        with pytest.raises(ValueError, match=r"skips a step on all ranks or on none"):
            one_trial(*callbacks, model=model).run(1)

    two_ranks.run(body)


# Around a run.


def test_evaluation_and_prediction_are_under_autocast():
    model = nn.Sequential(Recording(6, 8), nn.Linear(8, 2))
    trial = one_trial(MixedPrecision("bf16"), model=model)
    trial.run(1)
    model[0].seen.clear()
    loss = trial.evaluate(verbose=0)["val_loss"]
    predicted = trial.predict(verbose=0)
    assert set(model[0].seen) == {torch.bfloat16}
    assert predicted.dtype == torch.float32
    data = batches(Case(), 0, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = [(model(x).float(), nn.functional.mse_loss(model(x), y)) for x, y in data]
    assert torch.equal(predicted, torch.cat([each for each, _ in expected]))
    assert loss == pytest.approx(float(torch.stack([each for _, each in expected]).mean()))
    assert not torch.is_autocast_enabled("cpu")


def test_where_autocast_is_on():
    """On for forward and loss, with what callbacks add to it; off for backward and after it."""
    seen = {}

    def note(name):
        return lambda state: seen.setdefault(name, torch.is_autocast_enabled("cpu"))

    model = network()

    def note_backward(_):
        seen["backward"] = torch.is_autocast_enabled("cpu")

    next(model.parameters()).register_hook(note_backward)
    callbacks = [
        on_sample(note("sample")),
        on_criterion(note("criterion")),
        on_backward(note("after backward")),
        on_step_training(note("step")),
    ]
    one_trial(*callbacks, MixedPrecision("bf16"), model=model).run(1)
    assert seen == {
        "sample": False,
        "criterion": True,
        "backward": False,
        "after backward": False,
        "step": False,
    }


class Failing(Callback):
    """Raises once, at the third batch, in one hook."""

    def __init__(self, hook):
        super().__init__()
        self._left = True
        setattr(self, hook, self._fail)

    def _fail(self, state):
        if self._left and state[torchbearer.BATCH] == 2:
            self._left = False
            raise programs.Stopped


@pytest.mark.parametrize(
    "hook",
    ["on_forward", "on_criterion", "on_backward", "on_step_training", "on_forward_validation"],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_run_after_one_that_failed(dtype, hook):
    model = network()
    precision = MixedPrecision(dtype, **CALIBRATING)
    trial = one_trial(precision, Failing(hook), model=model)
    with pytest.raises(programs.Stopped):
        trial.run(1)
    assert not torch.is_autocast_enabled("cpu")
    assert not model._forward_pre_hooks
    history = trial.run(1)
    assert history[0].get("skipped_steps", 0) < len(batches(Case(), 0, 1))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_second_run_continues_with_the_scale():
    case = CASES["calibrating"]
    model = network()
    precision = case.callback()
    trial = one_trial(precision, model=model)
    trial.run(1)
    first = precision.loss_scale
    assert first < case.init_scale
    history = trial.run(2)
    expected = by_hand(case, 1, 2)
    assert precision.loss_scale == expected.scale
    assert sum(epoch["skipped_steps"] for epoch in history) == expected.skipped
    for ours, hand in zip(model.parameters(), expected.parameters, strict=True):
        assert torch.allclose(ours, hand, atol=1e-6)


def test_an_evaluation_inside_a_run_changes_nothing():
    def train(*callbacks):
        model = network()
        precision = MixedPrecision("fp16", **CALIBRATING)
        trial = one_trial(precision, *callbacks, model=model)
        history = trial.run(2)
        return list(model.parameters()), [epoch["skipped_steps"] for epoch in history]

    @on_step_training
    def evaluate(state):
        state[torchbearer.SELF].evaluate(verbose=0)
        state[torchbearer.SELF].train()

    found, expected = train(evaluate), train()
    assert found[1] == expected[1]
    for a, b in zip(found[0], expected[0], strict=True):
        assert torch.equal(a, b)


def test_a_compiled_model():
    def train(wrap):
        model = network()
        precision = MixedPrecision("fp16", **CALIBRATING)
        trial = one_trial(precision, model=wrap(model))
        trial.run(2)
        return list(model.parameters()), precision.loss_scale

    found = train(lambda model: torch.compile(model, backend="eager"))
    expected = train(lambda model: model)
    assert found[1] == expected[1]
    for a, b in zip(found[0], expected[0], strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_trial_can_be_sent_elsewhere_after_a_run_that_failed():
    trial = one_trial(MixedPrecision("fp16", **CALIBRATING), programs.failing(3))
    with pytest.raises(programs.Stopped):
        trial.run(1)
    sent = cloudpickle.loads(cloudpickle.dumps(trial))
    assert len(sent.run(1)) == 1


def test_a_model_can_be_copied_and_saved_during_a_run():
    copies = []

    @on_step_training
    def keep(state):
        copies.append(copy.deepcopy(state[torchbearer.MODEL]))
        file = io.BytesIO()
        torch.save(state[torchbearer.MODEL], file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))

    one_trial(MixedPrecision("fp16"), keep).run(1)
    assert copies[0](torch.zeros(1, 6)).dtype == torch.float32


def interrupted(folder, at):
    """The outcome of a run in one go, and of one that fails on all ranks and continues."""

    def mixed():
        return MixedPrecision("fp16", init_scale=2.0**18, growth_interval=2)

    whole = programs.train(callbacks=[mixed()])
    with pytest.raises(programs.Stopped):
        programs.train(folder, [mixed(), programs.failing(at)], every_steps=1, background=False)
    found = programs.train(folder, [mixed()], every_steps=1, background=False)
    programs.assert_same(found, whole)
    return [(epoch["skipped_steps"], epoch["loss_scale"]) for epoch in whole["history"]]


def test_a_resume_is_exact(tmp_path, two_ranks):
    one = interrupted(tmp_path / "one", 11)
    two, other = two_ranks.run(interrupted, (tmp_path / "two", 6), timeout=120)
    assert two == other
    assert sum(skipped for skipped, _ in one) > 0
    assert sum(skipped for skipped, _ in two) > 0


def test_the_state_of_the_trial_has_the_scale():
    precision = MixedPrecision("fp16", **CALIBRATING)
    trial = one_trial(precision)
    trial.run(1)
    saved = trial.state_dict()
    other = MixedPrecision("fp16", **CALIBRATING)
    one_trial(other).load_state_dict(saved)
    assert other.loss_scale == precision.loss_scale < half_precision.CALIBRATING
    assert other.state_dict() == precision.state_dict()


def test_a_line_and_the_history_name_the_skipped_steps(caplog):
    history = one_trial(MixedPrecision("fp16", **CALIBRATING)).run(1)
    skipped, scale = history[0]["skipped_steps"], history[0]["loss_scale"]
    assert skipped > 0
    line = f"MixedPrecision skipped {skipped} steps in epoch 0, whose gradients were not finite"
    assert f"{line}; the loss scale is now {scale:g}" in caplog.text
    caplog.clear()
    assert one_trial(MixedPrecision("fp16", init_scale=1.0)).run(1)[0]["skipped_steps"] == 0
    assert "skipped" not in caplog.text


def test_tensorboard_has_the_curves(tmp_path):
    writing = TensorBoard(tmp_path, write_graph=False, batch_step_size=1)
    (epoch,) = one_trial(MixedPrecision("fp16", **CALIBRATING), writing).run(1)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in ("skipped_steps", "loss_scale"):
        assert [point.value for point in events.Scalars(f"epoch/{name}")] == [epoch[name]]
        assert events.Scalars(f"batch/{name}")[-1].value == epoch[name]


def test_shards_and_a_checkpoint(tmp_path, two_ranks):
    """The whole list of callbacks, as users have it."""

    def body(folder):
        model = network()
        data = torch.utils.data.TensorDataset(torch.randn(30, 6), torch.randn(30, 2))
        trial = Trial(
            model,
            torch.optim.Adam(model.parameters(), 0.01),
            nn.functional.mse_loss,
            ["loss", "mse"],
            [*data_parallel(accumulate=2), MixedPrecision("fp16"), Checkpoint(folder)],
            verbose=0,
        )
        loader = torch.utils.data.DataLoader(data, 3, shuffle=True)
        history = trial.with_generators(loader, loader).run(2)
        assert history[1]["val_loss"] == pytest.approx(history[1]["val_mse"], rel=1e-4)
        return history

    first, second = two_ranks.run(body, (tmp_path,))
    assert [epoch["loss"] for epoch in first] == [epoch["loss"] for epoch in second]


def test_a_save_after_the_last_step_of_an_epoch_knows_what_was_skipped():
    precision = MixedPrecision("fp16", **CALIBRATING)
    counts = []

    class Counts(Callback):
        def on_start_validation(self, state):  # where a signal with the last step saves
            counts.append(precision.state_dict()["skipped_steps"])

        def on_start_epoch(self, state):
            counts.append(precision.state_dict()["skipped_steps"])

    trial = one_trial(precision, Counts())
    history = trial.with_val_data(*batches(Case(), 0, 1)[0]).run(2)
    skipped = [epoch["skipped_steps"] for epoch in history]
    assert skipped[0] > 0
    assert counts == [0, skipped[0], 0, skipped[1]]


def _steps_of(world_size, *, skips, accumulate=2):
    """A layer after steps in fp16, of which each rank skips some batches of a window."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    generator = torch.Generator().manual_seed(1)
    data = [[torch.randn(4, width, generator=generator) for width in (3, 2)] for _ in range(8)]

    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        if (collectives.rank(), state[torchbearer.BATCH]) not in skips:
            found = state[torchbearer.Y_PRED] = layer(state[torchbearer.X])
            loss = state[torchbearer.CRITERION](found, state[torchbearer.Y_TRUE])
            state[torchbearer.LOSS] = loss
            state[torchbearer.CALLBACK_LIST].on_criterion(state)
            loss.backward(**state[torchbearer.BACKWARD_ARGS])
            state[torchbearer.CALLBACK_LIST].on_backward(state)

    callbacks = data_parallel(shard=False, accumulate=accumulate)
    half = [MixedPrecision("fp16", init_scale=2.0**10)]
    trial = Trial(layer, torch.optim.SGD(layer.parameters(), 0.1), nn.MSELoss(), verbose=0,
                  callbacks=[*callbacks, *half])  # fmt: skip
    trial.with_closure(closure).with_train_generator(data[collectives.rank() :: world_size]).run(1)

    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    for window in range(0, len(data) // world_size, accumulate):
        kept = [
            data[world_size * index + rank]
            for index in range(window, window + accumulate)
            for rank in range(world_size)
            if (rank, index) not in skips
        ]
        if kept:
            x, y = (torch.cat(each) for each in zip(*kept, strict=True))
            nn.functional.mse_loss(expected(x), y).backward()
            with torch.no_grad():
                for parameter in expected.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for found, other in zip(layer.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("skips", [{(0, 1)}, {(0, 0)}, {(0, 2), (0, 3)}, {(0, 1), (0, 7)}])
def test_a_skipped_batch_of_a_window_leaves_no_scale_in_the_gradients(skips):
    _steps_of(1, skips=skips)


@pytest.mark.parametrize(
    "skips",
    [{(0, 1)}, {(1, 0)}, {(0, 1), (1, 1)}, {(0, 0), (0, 1)}, {(0, 2), (0, 3), (1, 2), (1, 3)}],
)
def test_ranks_may_skip_batches_of_a_window_by_themselves(skips):
    ranks(2)(_steps_of)(2, skips=skips)
