"""Checkpoint on real ranks: what is in a file, and how runs continue from it."""

import functools
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
import torchbearer
from torchbearer.callbacks import (
    Callback,
    EarlyStopping,
    LambdaLR,
    MultiStepLR,
    StepLR,
    TorchScheduler,
    on_sample,
    on_step_training,
    on_step_validation,
)

from tests.programs import EPOCHS, Stopped, assert_same, build, failing, network, outcome, train
from tests.ranks import ranks, run_ranks
from torchbearer_ddp import Checkpoint, CheckpointError, RankZeroOnly, data_parallel
from torchbearer_ddp.checkpoints import contents, file
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives, stop_request


def interrupted(folder, at, **options):
    with pytest.raises(Stopped):
        train(folder, [failing(at)], **options)
    finish_writing()


def names(folder):
    return {path.name for path in folder.glob("*.pt")}


@pytest.mark.parametrize(
    ("at", "options"),
    [
        (2, {"every_steps": 1}),
        (13, {"every_steps": 3}),
        (17, {"every_steps": 8}),  # the last step of an epoch is done, its validation is not
        (25, {}),
        (13, {"every_steps": 3, "workers": 2}),
        (32, {"every_steps": 3, "steps": 19}),  # the loader starts over within an epoch
        (21, {"every_seconds": 1e-9, "background": False}),
    ],
)
def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path, at, options):
    sizes = {key: options[key] for key in ("workers", "steps") if key in options}
    expected = train(**sizes)
    interrupted(tmp_path, at, **options)
    # Whatever happens in between is forgotten: the generators are those of the checkpoint.
    torch.rand(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        assert_same(train(tmp_path, **options), expected)


def one_cycle():
    builder = functools.partial(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40, three_phase=True
    )
    return TorchScheduler(builder, step_on_batch=True)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda: LambdaLR(lambda epoch: 1 / (1 + epoch)),
        lambda: MultiStepLR([3, 9, 20], step_on_batch=True),
        one_cycle,
    ],
)
def test_schedulers_that_set_the_rate_when_they_are_made(tmp_path, scheduler):
    expected = train(callbacks=[scheduler()])
    with pytest.raises(Stopped):
        train(tmp_path, [scheduler(), failing(21)], every_steps=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        assert_same(train(tmp_path, [scheduler()]), expected)


def test_saving_changes_nothing(tmp_path):
    assert_same(train(tmp_path, every_steps=2, every_seconds=1e-9), train())


def test_batches_go_on_where_they_were(tmp_path):
    seen = []

    @on_step_training
    def note(state):
        seen.append([int(state[k]) for k in (torchbearer.EPOCH, torchbearer.BATCH)])
        assert state[torchbearer.STEPS] == 8

    with pytest.raises(Stopped):
        train(tmp_path, [note, failing(13)], every_steps=4)
    finish_writing()
    train(tmp_path, [note], every_steps=4)
    assert seen == [[epoch, batch] for epoch in range(4) for batch in range(8)]


@ranks(2)
def test_ranks_continue_bit_for_bit(tmp_path):
    expected = train()
    for folder, at, options in (
        ("steps", 7, {"every_steps": 3}),
        ("epochs", 11, {}),
        ("workers", 6, {"every_steps": 2, "workers": 1}),
    ):
        if "workers" in options:
            expected = train(workers=1)
        interrupted(tmp_path / folder, at, **options)
        collectives.barrier()
        torch.rand(collectives.rank())
        assert_same(train(tmp_path / folder, **options), expected)
    assert {"epoch-0004.pt", "latest"} <= {p.name for p in (tmp_path / "epochs").iterdir()}


@ranks(2)
def test_a_file_is_the_state_at_its_step_and_batch_norm_agrees(tmp_path):
    at_step = {}

    @on_step_training
    def note(state):
        if state[torchbearer.EPOCH] == 0:
            at_step[state[torchbearer.BATCH] + 1] = {
                name: t.clone() for name, t in state[torchbearer.MODEL].state_dict().items()
            }

    train(tmp_path, [note], epochs=1, every_steps=1, keep=None)
    collectives.barrier()
    for step, live in at_step.items():
        payload = file.read(tmp_path / f"step-{step:07d}.pt")
        assert payload["torchbearer_ddp"]["batch"] == step
        own = payload["torchbearer_ddp"]["ranks"][collectives.rank()]["buffers"]
        assert set(own) == {"1.running_mean", "1.running_var"}
        everyone = collectives.all_gather(live["1.running_mean"], "means")
        assert not torch.equal(everyone[0], everyone[1])
        assert torch.allclose(payload["model"]["1.running_mean"], sum(everyone) / 2)
        for name, value in live.items():
            assert torch.equal(own.get(name, payload["model"][name]), value)


def test_the_number_of_ranks_may_change(tmp_path):
    run_ranks(lambda: interrupted(tmp_path, 7, every_steps=3), 2)
    trial = build(Checkpoint(tmp_path))
    with pytest.warns(UserWarning, match=r"world size 2 then and 1 now.*epoch begins again"):
        trial.run(4)
    assert len(trial.state[torchbearer.HISTORY]) == 4

    def three():
        return train(tmp_path, epochs=5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in run_ranks(three, 3):
            assert len(found["history"]) == 5
            assert found["history"][:4] == trial.state[torchbearer.HISTORY]


def test_plain_torchbearer_and_plain_torch_load_a_file(tmp_path):
    trained = train(tmp_path, epochs=2)
    script = """
import sys, torch, torchbearer
from torchbearer.callbacks import StepLR
payload = torch.load(sys.argv[1], weights_only=True)
def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16),
                               torch.nn.Dropout(0.3), torch.nn.Linear(16, 2))
model = net()
trial = torchbearer.Trial(model, torch.optim.Adam(model.parameters()), callbacks=[StepLR(1)])
trial.load_state_dict(payload)
plain = net()
plain.load_state_dict(payload['model'])
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
assert not any(name.startswith('torchbearer_ddp') for name in sys.modules)
print(len(trial.state[torchbearer.HISTORY]), plain[0].weight.detach().double().sum().item())
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "latest")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2", str(float(trained["0.weight"].double().sum()))]


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile])
def test_wrappers_leave_no_trace_in_the_names(wrap):
    inner = network()
    model = torch.nn.Sequential(wrap(inner), torch.nn.Linear(2, 2))
    for wrapped, plain in ((wrap(inner), inner), (model, torch.nn.Sequential(inner, model[1]))):
        saved = contents.model_state(wrapped)
        assert saved.keys() == plain.state_dict().keys()
        other = {name: t + 1 for name, t in saved.items()}
        contents.load_model(wrapped, other)
        assert all(torch.equal(t, other[name]) for name, t in plain.state_dict().items())
        assert contents.unwrapped(wrap(inner)) is inner


def test_tied_parameters_are_saved_once(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
    model[1].weight = model[0].weight
    build(Checkpoint(tmp_path), model=model).run(1)
    saved = file.read(tmp_path / "latest")["model"]
    assert saved["0.weight"].data_ptr() == saved["1.weight"].data_ptr()
    assert saved["0.weight"].data_ptr() != saved["2.weight"].data_ptr()


def test_resume_true_false_and_a_path(tmp_path, caplog):
    with pytest.raises(CheckpointError, match=r"resume=True, but there is no checkpoint in"):
        train(tmp_path, resume=True)
    expected = train(tmp_path, epochs=2, resume=False)
    assert "continuing" not in caplog.text
    with pytest.raises(CheckpointError, match=r"resume=False .* epoch-0002\.pt"):
        train(tmp_path, resume=False)
    assert_same(train(tmp_path, epochs=2, resume=True), expected)
    done = f"all 2 epochs are done ({tmp_path / 'epoch-0002.pt'}), nothing to train"
    assert caplog.text.count(done) == 1
    assert "continuing" not in caplog.text  # nothing that looks like training
    train(tmp_path, epochs=3, resume=True)
    assert caplog.text.count("continuing from") == 1
    assert "to start afresh" in caplog.text
    assert caplog.text.count("nothing to train") == 1
    # From the first epoch's file into another folder; and a file that is not there.
    first = tmp_path / "epoch-0001.pt"
    assert_same(train(tmp_path / "other", epochs=2, resume=first), expected)
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        train(tmp_path / "third", resume=str(tmp_path / "epoch-0009.pt"))


def test_the_same_trial_goes_on_with_what_it_has(tmp_path):
    trial = build(Checkpoint(tmp_path, resume=False))
    trial.run(2)
    with torch.no_grad():
        trial.state[torchbearer.MODEL][0].weight.zero_()
    trial.run(2)
    assert not trial.state[torchbearer.MODEL][0].weight.any()
    trial.run(3)
    assert names(tmp_path) >= {"epoch-0002.pt", "epoch-0003.pt"}


def test_evaluate_and_predict_neither_resume_nor_save(tmp_path):
    train(tmp_path, epochs=1)
    trial = build(Checkpoint(tmp_path))
    before = trial.state[torchbearer.MODEL][0].weight.clone()
    trial.evaluate()
    assert torch.equal(trial.state[torchbearer.MODEL][0].weight, before)
    assert names(tmp_path) == {"epoch-0001.pt", "best-val_loss.pt"}
    trial.run(2)
    assert len(trial.state[torchbearer.HISTORY]) == 2


def test_a_run_differs_from_an_evaluation_whatever_came_before(tmp_path):
    """torchbearer leaves the data of the last call in the trial's state."""
    train(tmp_path, epochs=1)
    seen = []

    @torchbearer.callbacks.on_end_epoch
    def evaluate_inside(state):
        if state is checkpoint._run_state:
            trial.evaluate(data_key=torchbearer.TRAIN_DATA)
            trial.evaluate()
            seen.append(checkpoint._run_state is state)

    checkpoint = Checkpoint(tmp_path, every_epochs=None, every_steps=5, monitor=None)
    trial = build(evaluate_inside, checkpoint)
    stop_request.reset()
    trial.evaluate()
    trial.predict()  # there is no test data
    assert not stop_request.current().resumable
    assert not trial.state[torchbearer.HISTORY]
    trial.evaluate(data_key=torchbearer.TRAIN_DATA)
    trial.run(2)
    assert seen == [True]
    assert stop_request.current().resumable
    assert len(trial.state[torchbearer.HISTORY]) == 2  # one of them the checkpoint's
    assert "step-0000015.pt" in names(tmp_path)


@pytest.mark.parametrize("hook", ["on_sample", "on_sample_validation"])
def test_a_run_after_one_that_failed(tmp_path, hook):
    fail = [True]

    def body(state):
        if fail[0]:
            raise Stopped

    trial = build(getattr(torchbearer.callbacks, hook)(body), Checkpoint(tmp_path))
    with pytest.raises(Stopped):
        trial.run(1)
    fail[0] = False
    trial.evaluate()
    assert not names(tmp_path)
    trial.run(1)
    assert "epoch-0001.pt" in names(tmp_path)


def test_a_run_that_cannot_be_told_from_an_evaluation_is_refused(tmp_path):
    @torchbearer.callbacks.on_start_training
    def fail(state):
        raise Stopped

    trial = build(fail, Checkpoint(tmp_path))
    with pytest.raises(Stopped):
        trial.run(1)
    fail.on_start_training = lambda state: None
    with pytest.raises(CheckpointError, match="Make a new Trial"):
        trial.run(1)


def test_a_changed_list_of_callbacks_is_matched_by_name(tmp_path):
    stopping = EarlyStopping(monitor="loss", patience=50)
    train(tmp_path, [stopping, RankZeroOnly(EarlyStopping(monitor="acc"))], epochs=2)
    again = EarlyStopping(monitor="loss", patience=50)

    @on_sample
    def added(state):
        pass

    trial = build(added, again, Checkpoint(tmp_path))
    with pytest.warns(
        UserWarning, match=r"no longer there: RankZeroOnly\(EarlyStopping\); new.*LambdaCallback"
    ) as found:
        trial.run(2)
    assert len([w for w in found if "callbacks are not" in str(w.message)]) == 1
    assert again.best == stopping.best != float("inf")


def test_a_state_that_is_not_plain_is_refused_with_its_place(tmp_path):
    class Odd(torchbearer.callbacks.Callback):
        def state_dict(self):
            return {"thing": threading.Event}

    with pytest.raises(CheckpointError, match=r"\['Odd'\]\['thing'\] is a builtins.type"):
        train(tmp_path, [Odd()], epochs=1)


def test_another_model_s_file_is_refused(tmp_path):
    train(tmp_path, epochs=1)
    other = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2))
    trial = build(Checkpoint(tmp_path), model=other)
    before = other[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"epoch-0001\.pt.*not of this model.*0\.bias has"):
        trial.run(2)
    assert torch.equal(other[0].weight, before)


def test_the_best_epochs_are_kept(tmp_path):
    values = iter([3.0, 1.0, float("nan"), 2.0, 0.5])

    @torchbearer.callbacks.on_end_epoch
    def fake(state):
        state[torchbearer.METRICS]["val_loss"] = next(values)
        state[torchbearer.METRICS]["val_acc"] = 0.5

    for epochs in (3, 5):
        trial = build(fake, Checkpoint(tmp_path, keep=1, monitor=("val_loss", "val_acc")))
        trial.run(epochs)
        label = file.read_label(tmp_path / "best-val_loss.pt")
        assert label.epochs == {3: 2, 5: 5}[epochs]
    assert names(tmp_path) == {"epoch-0005.pt", "best-val_loss.pt", "best-val_acc.pt"}
    assert file.read_label(tmp_path / "best-val_acc.pt").epochs == 1


def test_a_monitor_that_is_no_metric_is_named_once(tmp_path):
    with pytest.warns(UserWarning, match=r"monitor='val_typo'\).*val_loss") as found:
        train(tmp_path, epochs=2, monitor="val_typo")
    assert len([w for w in found if "val_typo" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_steps": 0}, "every_steps is 0"),
        ({"keep": -1}, "keep is -1"),
        ({"mode": "up"}, "mode is 'up'"),
        ({"monitor": ["a/b", "a_b"]}, "share the file"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path, **options)


@pytest.mark.parametrize("second", [".", "other"])
def test_two_callbacks_are_refused(tmp_path, second):
    with pytest.raises(ValueError, match=r"Two Checkpoint callbacks .* and .* Keep one of them"):
        build(Checkpoint(tmp_path), Checkpoint(tmp_path / second))


class Rewriting(Callback):
    """Changes the weights at the start of the run and of each epoch."""

    def on_start(self, state):
        self._change(state)

    def on_start_epoch(self, state):
        self._change(state)

    @staticmethod
    def _change(state):
        with torch.no_grad():
            state[torchbearer.MODEL][0].weight.mul_(0.5)
            state[torchbearer.MODEL][1].running_mean.add_(1)


@pytest.mark.parametrize(("at", "options"), [(13, {"every_steps": 3}), (25, {})])
def test_weights_that_callbacks_change_at_a_start_are_those_of_the_file(tmp_path, at, options):
    expected = train(callbacks=[Rewriting()])
    with pytest.raises(Stopped):
        train(tmp_path, [Rewriting(), failing(at)], **options)
    finish_writing()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        assert_same(train(tmp_path, [Rewriting()], **options), expected)


@ranks(2)
def test_torchbearer_s_own_checkpoints_load_with_trust(tmp_path):
    path = tmp_path / "own.pt"
    stopping = EarlyStopping(monitor="loss", patience=50)
    trial = build(stopping, RankZeroOnly(torchbearer.callbacks.MostRecent(str(path))))
    trial.run(2)
    collectives.barrier()
    again = EarlyStopping(monitor="loss", patience=50)
    other = build(again)
    with pytest.raises(CheckpointError, match=r"nothing in it was run.*trust=True"):
        Checkpoint.load(other, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Checkpoint.load(other, path, trust=True)
    histories = collectives.all_gather(trial.state[torchbearer.HISTORY], "the histories")
    assert other.state[torchbearer.HISTORY] == histories[0]
    for name in ("0.weight", "exp_avg.0"):
        assert torch.equal(outcome(other)[name], outcome(trial)[name])
    assert again.best == stopping.best


def test_load_takes_our_files_and_bare_weights(tmp_path):
    expected = train(tmp_path, epochs=1)
    trial = Checkpoint.load(build(), tmp_path / "best-val_loss.pt")
    assert torch.equal(trial.state[torchbearer.MODEL][0].weight, expected["0.weight"])
    bare = {f"module.{k}": v + 1 for k, v in trial.state[torchbearer.MODEL].state_dict().items()}
    torch.save(bare, tmp_path / "bare.pt")
    Checkpoint.load(trial, tmp_path / "bare.pt")
    assert torch.equal(trial.state[torchbearer.MODEL][0].weight, expected["0.weight"] + 1)


@ranks(2)
def test_a_stop_by_a_signal_is_saved_and_continued(tmp_path):
    expected = train()

    @on_sample
    def stop(state):
        place = (collectives.rank(), state[torchbearer.EPOCH], state[torchbearer.BATCH])
        if place == (1, 1, 1):
            stop_request.request(15)

    train(tmp_path, [stop], every_epochs=None, monitor=None)
    stop_request.reset()
    collectives.barrier()
    assert names(tmp_path) == {"step-0000006.pt"}
    assert_same(train(tmp_path, every_epochs=None, monitor=None), expected)


@ranks(2)
def test_a_stop_by_a_signal_with_the_last_step_of_an_epoch(tmp_path):
    expected = train()

    @on_step_training
    def stop(state):
        if state[torchbearer.EPOCH] == 1 and state[torchbearer.BATCH] == 3:
            stop_request.request(15)

    train(tmp_path, [stop], every_epochs=None, monitor=None)
    stop_request.reset()
    collectives.barrier()
    assert names(tmp_path) == {"step-0000008.pt"}
    assert_same(train(tmp_path, every_epochs=None, monitor=None), expected)


@ranks(2)
def test_a_save_waits_for_accumulated_gradients(tmp_path):
    expected = train(accumulate=2)
    interrupted(tmp_path, 8, accumulate=2, every_steps=3)
    collectives.barrier()
    assert "step-0000004.pt" in names(tmp_path)
    assert "step-0000003.pt" not in names(tmp_path)
    assert_same(train(tmp_path, accumulate=2, every_steps=3), expected)


def test_a_stop_by_a_signal_waits_for_accumulated_gradients(tmp_path):
    expected = train(accumulate=3)

    @on_sample
    def stop(state):
        if state[torchbearer.EPOCH] == 1 and state[torchbearer.BATCH] == 3:
            stop_request.request(15)

    train(tmp_path, [stop], accumulate=3, every_epochs=None, monitor=None)
    stop_request.reset()
    assert names(tmp_path) == {"step-0000014.pt"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        assert_same(train(tmp_path, accumulate=3), expected)


@ranks(2)
def test_time_decides_on_all_ranks_alike(tmp_path):
    stepped = []

    @on_step_training
    def pace(state):
        # A slow rank must not save at another step than a fast one.
        time.sleep(0.02 + 0.01 * collectives.rank())
        stepped.append(time.monotonic())

    train(tmp_path, [pace], every_seconds=0.2, every_epochs=None, monitor=None, keep=None)
    seconds = time.monotonic() - stepped[0]
    collectives.barrier()
    assert 1 <= len(names(tmp_path)) <= 1 + seconds / 0.2


def test_time_decides_in_one_process_where_no_gradient_is_exchanged(tmp_path):
    options = {"every_seconds": 1e-9, "background": False, "keep": None, "monitor": None}
    model = torch.nn.Linear(2, 1)
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.nn.functional.mse_loss,
        callbacks=[*data_parallel(every=4), Checkpoint(tmp_path, every_epochs=None, **options)],
        verbose=0,
    )
    trial.with_train_generator([(torch.ones(4, 2), torch.ones(4, 1))] * 3).run(1)
    assert names(tmp_path) == {f"step-000000{step}.pt" for step in (1, 2, 3)}


def test_a_run_after_one_that_was_refused_is_refused_too(tmp_path):
    train(tmp_path, epochs=1)
    before = names(tmp_path)
    trial = build(Checkpoint(tmp_path, resume=False))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"resume=False .* epoch-0001\.pt"):
            trial.run(2)
    assert names(tmp_path) == before
    assert not trial.state[torchbearer.HISTORY]


@ranks(2)
def test_save_now_saves_the_step_in_which_it_is_called(tmp_path):
    def trained(folder, *callbacks):
        checkpoint = Checkpoint(folder, every_epochs=None, monitor=None, keep=None)

        @on_step_training
        def ask(state):
            if checkpoint.global_step + 1 == 6:  # counted after this hook
                checkpoint.save_now(state)

        # A scheduler after it in the list steps in the same hook.
        trial = build(ask, checkpoint, StepLR(1, 0.9, step_on_batch=True), *callbacks)
        trial.run(EPOCHS)
        return outcome(trial)

    expected = trained(tmp_path / "whole")
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", failing(10))
    finish_writing()
    collectives.barrier()
    assert names(tmp_path / "cut") == {"step-0000006.pt"}
    assert_same(trained(tmp_path / "cut"), expected)


@ranks(2)
def test_a_validation_that_one_rank_cuts_short_is_not_saved(tmp_path):
    @on_step_validation
    def stop(state):
        state[torchbearer.STOP_TRAINING] = collectives.rank() == 1

    train(tmp_path, [stop], keep=None)
    collectives.barrier()
    assert names(tmp_path) == set()
