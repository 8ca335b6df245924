"""Scripts that call ``run()`` several times, and runs that were over when they were restarted."""

import contextlib
import functools
import warnings

import pytest
import torch
import torchbearer
from torchbearer.callbacks import EarlyStopping, on_end_epoch, on_step_training

from tests.programs import Stopped, assert_same, build, failing, outcome
from tests.ranks import RankPool
from torchbearer_ddp import Checkpoint, RankZeroOnly
from torchbearer_ddp.checkpoints import file
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives, stop_request

#: Steps of an epoch in one process.
STEPS = 8


def twice(trial):
    trial.run(2)
    trial.run(4)


def with_evaluations(trial):
    noted = [trial.evaluate()]
    for epochs in (1, 2, 3):
        trial.run(epochs)
        noted.append(trial.evaluate())
        noted.append(float(torch.rand(1)))
    return noted


def with_changes(trial):
    """The second run has another learning rate, a thawed layer and one more group."""
    model, optimizer = trial.state[torchbearer.MODEL], trial.state[torchbearer.OPTIMIZER]
    model[0].weight.requires_grad = False
    trial.run(2)
    optimizer.param_groups[0]["lr"] *= 0.5
    model[0].weight.requires_grad = True
    trial.state[torchbearer.MODEL].extra = torch.nn.Parameter(torch.rand(3))
    optimizer.add_param_group({"params": [trial.state[torchbearer.MODEL].extra]})
    trial.run(4)


def run_script(script, *callbacks):
    trial = build(*callbacks)
    noted = script(trial)
    return {**outcome(trial), "noted": noted}


def check(folder, script, at, **options):
    """The script, failed at a step and started again, ends like one that was not interrupted."""
    expected = run_script(script)
    with pytest.raises(Stopped):
        run_script(script, failing(at), Checkpoint(folder, **options))
    finish_writing()
    collectives.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        assert_same(run_script(script, Checkpoint(folder, **options)), expected)


@pytest.mark.parametrize("script", [twice, with_evaluations, with_changes])
@pytest.mark.parametrize("at", [6, 2 * STEPS, 2 * STEPS + 1, 2 * STEPS + 6])
def test_a_script_with_several_runs_continues_in_the_right_one(tmp_path, script, at):
    check(tmp_path, script, at, every_steps=3)


def test_several_runs_on_ranks(tmp_path):
    with RankPool(2) as pool:
        for number, (script, at) in enumerate(
            [(twice, 4 * 2 + 3), (with_evaluations, 4 + 2), (with_changes, 4 * 3 + 1)]
        ):
            pool.run(functools.partial(check, tmp_path / str(number), script, at, every_steps=3))
        pool.run(functools.partial(without_the_first_end, tmp_path / "gone"))


def without_the_first_end(folder):
    """The order of the data is that of the first call, also where it cannot be restored."""
    expected = run_script(twice)
    with pytest.raises(Stopped):
        run_script(twice, failing(4 * 2 + 3), Checkpoint(folder, every_steps=1, monitor=None))
    finish_writing()
    collectives.barrier()
    if collectives.is_rank_zero():
        (folder / "epoch-0002.pt").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(run_script(twice, Checkpoint(folder)), expected)


def test_several_trials_in_one_script(tmp_path):
    """The second Trial is made from the random numbers that the first one's training left."""

    def script(at, folder):
        fail = failing(at)
        first = build(fail, *([Checkpoint(folder / "first", every_steps=3)] if folder else []))
        first.run(2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
        second = torchbearer.Trial(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            torch.nn.CrossEntropyLoss(),
            callbacks=[fail, *([Checkpoint(folder / "second", every_steps=3)] if folder else [])],
            verbose=0,
        )
        second.with_train_data(torch.randn(20, 6), torch.arange(20) % 2, 4, num_workers=0).run(3)
        return outcome(first), outcome(second)

    expected = script(10**9, None)
    with pytest.raises(Stopped):
        script(2 * STEPS + 8, tmp_path)
    finish_writing()
    for found, wanted in zip(script(10**9, tmp_path), expected, strict=True):
        wanted.pop("torch"), found.pop("torch")  # of the first: noted after the second
        assert_same(found, wanted)


def test_the_end_of_an_earlier_run_is_kept_and_otherwise_said(tmp_path, caplog):
    def script(trial):
        trial.run(1)
        noted = trial.evaluate()
        trial.run(4)
        return noted

    expected = run_script(script)
    options = {"every_steps": 2, "keep": 1}
    with pytest.raises(Stopped):
        run_script(script, failing(3 * STEPS), Checkpoint(tmp_path, **options))
    finish_writing()
    assert (tmp_path / "epoch-0001.pt").exists()
    assert len(list(tmp_path.glob("step-*.pt"))) == 1
    (tmp_path / "epoch-0001.pt").unlink()
    (tmp_path / "best-val_loss.pt").unlink(missing_ok=True)
    with pytest.warns(UserWarning, match=r"end of run\(\) number 1 is gone.*larger keep"):
        found = run_script(script, Checkpoint(tmp_path, **options))
    assert "was saved in run() number 2 of this script" in caplog.text
    assert found.pop("noted") != expected.pop("noted")  # which is why it is said
    assert_same(found, expected)


def test_a_script_that_now_calls_run_once(tmp_path):
    before = run_script(twice, Checkpoint(tmp_path))
    after = run_script(lambda trial: trial.run(5), Checkpoint(tmp_path))
    assert after["history"][:4] == before["history"]
    assert len(after["history"]) == 5
    # And the other way round: both calls ask for less than is done.
    assert run_script(twice, Checkpoint(tmp_path))["history"] == after["history"]


def test_a_run_that_fails_before_it_has_continued_can_be_called_again(tmp_path):
    expected = run_script(lambda trial: trial.run(3))
    with pytest.raises(Stopped):
        run_script(lambda trial: trial.run(3), failing(12), Checkpoint(tmp_path, every_steps=3))
    finish_writing()
    fail = [True]

    @torchbearer.callbacks.on_start
    def fail_once(state):
        if fail.pop():
            fail.append(False)
            raise Stopped

    trial = build(fail_once, Checkpoint(tmp_path))
    with pytest.raises(Stopped):
        trial.run(3)
    trial.run(3)
    assert_same({**outcome(trial), "noted": trial.state[torchbearer.HISTORY]}, expected)


def test_a_run_that_failed_and_was_called_again_is_one_run(tmp_path):
    """As in a script that catches an error, which does not come again after a restart."""

    def script(trial):
        with contextlib.suppress(Stopped):
            return trial.run(3)
        return trial.run(3)

    with pytest.raises(Stopped):
        run_script(script, failing(3), failing(14), Checkpoint(tmp_path, every_steps=1))
    finish_writing()
    assert len(file.read(tmp_path / "latest")["torchbearer_ddp"]["runs"]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        assert len(run_script(script, Checkpoint(tmp_path))["history"]) == 3


class Plateau(EarlyStopping):
    """Stops after two epochs."""

    def __init__(self, patience=1):
        super().__init__(monitor="loss", min_delta=100.0, patience=patience)


@pytest.mark.parametrize("wrap", [lambda each: each, RankZeroOnly])
def test_a_run_that_was_stopped_early_stays_stopped(tmp_path, caplog, wrap):
    def train(*callbacks, epochs=6):
        trial = build(*callbacks, Checkpoint(tmp_path))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
            trial.run(epochs)
        return outcome(trial)

    expected = train(wrap(Plateau()))
    assert len(expected["history"]) == 2
    for _ in range(2):
        assert_same(train(wrap(Plateau())), expected)
    name = type(wrap(Plateau())).__name__
    assert f"stopped by {name}" in caplog.text
    assert "after 2 of 6 epochs, so there is nothing to train" in caplog.text
    # Whoever changes what stopped it trains on.
    assert len(train(wrap(Plateau()), epochs=7)["history"]) == 3
    assert len(train(wrap(Plateau(patience=4)), epochs=7)["history"]) == 5
    assert len(train(epochs=7)["history"]) == 7


def test_a_stop_by_another_callback_and_one_by_a_signal(tmp_path, caplog):
    def train(folder, body):
        trial = build(on_end_epoch(body), Checkpoint(folder))
        trial.run(4)
        stop_request.reset()
        return len(trial.state[torchbearer.HISTORY])

    def stop(state):
        state[torchbearer.STOP_TRAINING] = True

    def signal(state):
        if state[torchbearer.EPOCH] == 0:
            stop_request.request(15)

    assert train(tmp_path / "stop", stop) == 1
    assert train(tmp_path / "stop", stop) == 1
    assert "stopped by a callback after 1 of 4 epochs" in caplog.text
    assert train(tmp_path / "signal", signal) == 1
    assert train(tmp_path / "signal", signal) == 4


def early_stop_with_a_signal(folder):
    """As with a job that Slurm requeues while EarlyStopping says stop: both at once, on ranks."""

    @on_end_epoch
    def signal(state):
        if state[torchbearer.EPOCH] == 1 and collectives.rank() == 1:
            stop_request.request(15)

    def train(*callbacks):
        trial = build(*callbacks, Checkpoint(folder))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
            trial.run(6)
        return outcome(trial)

    expected = train(Plateau(), signal)
    stop_request.reset()
    collectives.barrier()
    assert len(expected["history"]) == 2
    assert_same(train(Plateau()), expected)


def early_stop_inside_a_function(folder):
    """Only rank zero has the callback."""
    for _ in range(2):
        trial = build(RankZeroOnly(Plateau), Checkpoint(folder))
        trial.run(6)
        assert len(trial.state[torchbearer.HISTORY]) == 2
        collectives.barrier()


def stop_in_mid_epoch(folder):
    """Saved at the very step: it is over, and a restart does not take one more."""

    @on_step_training
    def stop(state):
        if state[torchbearer.EPOCH] == 1 and state[torchbearer.BATCH] >= 1:
            state[torchbearer.STOP_TRAINING] = True

    def train():
        trial = build(stop, Checkpoint(folder, every_steps=1))
        trial.run(3)
        return outcome(trial)

    expected = train()
    collectives.barrier()
    for _ in range(2):
        assert_same(train(), expected)
        collectives.barrier()


@pytest.mark.parametrize(
    "body", [early_stop_with_a_signal, early_stop_inside_a_function, stop_in_mid_epoch]
)
def test_stops_on_ranks(tmp_path, body):
    with RankPool(2) as pool:
        pool.run(functools.partial(body, tmp_path))


def test_a_file_of_format_2_continues(tmp_path):
    """What earlier versions wrote: without the calls of run() and what had stopped them."""
    expected = run_script(lambda trial: trial.run(3))
    with pytest.raises(Stopped):
        run_script(lambda trial: trial.run(3), failing(12), Checkpoint(tmp_path, every_steps=3))
    finish_writing()
    path = tmp_path / "latest"
    payload, label = file.read(path), file.read_label(path)
    assert payload["torchbearer_ddp"].pop("format") == 3
    old = {"format": 2, **payload["torchbearer_ddp"]}
    for name in ("runs", "stopped"):
        del old[name]
    file.write(path.resolve(), {**payload, "torchbearer_ddp": old}, label)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        found = run_script(lambda trial: trial.run(3), Checkpoint(tmp_path))
    assert_same(found, expected)
