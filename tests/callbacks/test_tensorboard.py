"""TensorBoard: what a run writes, read back by the real tensorboard package."""

import ctypes
import os
import resource
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
import torchbearer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchbearer import Trial
from torchbearer.callbacks import AggregatePredictions, Callback, on_step_training

from tests.ranks import ranks, run_ranks
from tests.requirements import unavailable
from torchbearer_ddp import Checkpoint
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.callbacks.tensorboard import TensorBoard
from torchbearer_ddp.gradients import timing
from torchbearer_ddp.group import collectives

STEPS = 5  # per epoch
_NEW_MOUNT_NAMESPACE = 0x00020000  # CLONE_NEWNS


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trial_with(*callbacks, model=None):
    model = model or network()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.2}])
    trial = Trial(
        model,
        optimizer,
        nn.functional.mse_loss,
        ["loss"],
        [SyncModel(), SyncGradients(), *callbacks],
        verbose=0,
    )
    x, y = torch.randn(4 * STEPS, 3), torch.randn(4 * STEPS, 2)
    trial.with_train_data(x, y, batch_size=4, num_workers=0)
    return trial.with_val_data(x, y, batch_size=4, num_workers=0)


def read(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def curve(events, tag):
    return [(point.step, point.value) for point in events.Scalars(tag)]


def steps(events, tag):
    return [point.step for point in events.Scalars(tag)]


def event_files(folder):
    return sorted(Path(folder).rglob("*tfevents*"))


def train(folder, epochs=2, **options):
    history = trial_with(TensorBoard(folder, batch_step_size=2, **options)).run(epochs)
    return [{k: float(v) for k, v in epoch.items()} for epoch in history]


def test_the_same_curves_on_one_rank_and_on_two(tmp_path):
    (alone,) = run_ranks(train, 1, (str(tmp_path / "1"),))
    together, _ = run_ranks(train, 2, (str(tmp_path / "2"),))
    for folder, history in (("1", alone), ("2", together)):
        (file,) = event_files(tmp_path / folder)
        assert file.parent == tmp_path / folder
        events = read(tmp_path / folder)
        for name in ("loss", "val_loss"):
            found = curve(events, f"epoch/{name}")
            assert [step for step, _ in found] == [STEPS, 2 * STEPS]
            assert [value for _, value in found] == pytest.approx([e[name] for e in history])
        for tag in (
            "batch/running_loss",
            "learning_rate/group_0",
            "learning_rate/group_1",
            "speed/samples_per_second",
            "step_time_ms/compute",
            "step_time_ms/waiting",
            "step_time_ms/moving",
            "rank_compute_ms/median",
            "rank_waiting_ms/max",
        ):
            assert steps(events, tag) == [2, 4, 6, 8, 10], tag
        assert curve(events, "learning_rate/group_0")[0][1] == pytest.approx(0.1)
        assert curve(events, "learning_rate/group_1")[0][1] == pytest.approx(0.2)
        assert "BatchNorm1d" in str(events.Graph())
        text = events.Tensors("trial/text_summary")[0].tensor_proto.string_val[0].decode()
        assert "SyncGradients" in text
        assert "Linear(in_features=3" in text
    assert read(tmp_path / "1").Tags() == read(tmp_path / "2").Tags()


class FedClock(timing.HostClock):
    """A clock on which rank 1 takes longer by 0.1 s, whatever the machine does."""

    def begin_exchange(self):
        super().begin_exchange()
        self._own = 0.01 + 0.1 * collectives.rank()
        return self._own


def timed(folder):
    @on_step_training
    def slow(state):
        time.sleep(0.1 * collectives.rank())  # rank one has more to do

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "HostClock", FedClock)
        trial_with(slow, TensorBoard(folder, batch_step_size=1, write_graph=False)).run(1)


def test_times_and_speed_add_up(tmp_path):
    run_ranks(timed, 2, (str(tmp_path),))
    events = read(tmp_path)
    speeds = [value for _, value in curve(events, "speed/samples_per_second")]
    parts = {
        part: [value for _, value in curve(events, f"step_time_ms/{part}")]
        for part in ("compute", "waiting", "moving")
    }
    for step in range(STEPS):  # 2 ranks x 4 samples
        whole = sum(values[step] for values in parts.values())
        assert 2 * 4 / (whole / 1000) == pytest.approx(speeds[step], rel=1e-3)
    assert sum(parts["waiting"]) > 100  # of the 500 ms by which rank one was late
    for name, rank in (("compute", 1), ("waiting", 0)):  # rank one computes, rank zero waits
        least, median, most, who = (
            [value for _, value in curve(events, f"rank_{name}_ms/{kind}")][1:]
            for kind in ("min", "median", "max", "rank_of_max")
        )
        assert who == [rank] * (STEPS - 1)
        assert all(low + 50 < high for low, high in zip(least, most, strict=True))
        middles = [(low + high) / 2 for low, high in zip(least, most, strict=True)]
        assert median == pytest.approx(middles)


def resumed(folder, total, state):
    logged = TensorBoard(folder, batch_step_size=1, write_graph=False)
    trial = trial_with(logged)
    if state:
        logged.load_state_dict(state["callback"])
        trial.state[torchbearer.HISTORY].extend(state["history"])
    trial.run(total)
    return {"callback": logged.state_dict(), "history": trial.state[torchbearer.HISTORY]}


def test_a_resumed_run_continues_the_curve(tmp_path):
    after_one = run_ranks(resumed, 2, (str(tmp_path), 1, None))
    assert [state["callback"] for state in after_one] == [{"global_step": STEPS}] * 2
    run_ranks(resumed, 2, (str(tmp_path), 3, after_one[0]))  # to be forgotten after epoch 1
    beyond = dict(curve(read(tmp_path), "batch/running_loss"))
    run_ranks(resumed, 2, (str(tmp_path), 2, after_one[0]))
    assert len(event_files(tmp_path)) == 3
    events = read(tmp_path)
    assert steps(events, "batch/running_loss") == list(range(1, 2 * STEPS + 1))
    assert steps(events, "epoch/val_loss") == [STEPS, 2 * STEPS]
    assert set(beyond) == set(range(1, 3 * STEPS + 1))


def test_without_a_saved_step_the_history_has_it(tmp_path):
    first = resumed(tmp_path, 1, None)
    resumed(tmp_path, 2, {"callback": {}, "history": first["history"]})
    assert steps(read(tmp_path), "batch/running_loss") == list(range(1, 2 * STEPS + 1))


def test_a_second_run_in_the_folder_has_its_own_file(tmp_path):
    first, second = (TensorBoard(tmp_path, batch_step_size=1) for _ in range(2))
    trial_with(first, second).run(1)
    files = event_files(tmp_path)
    assert len(files) == 2
    for file in files:
        assert steps(read(file), "batch/running_loss") == list(range(1, STEPS + 1))


def test_evaluation_is_kept_apart_from_the_epochs(tmp_path):
    trial = trial_with(TensorBoard(tmp_path))
    trial.run(1)
    found = trial.evaluate()
    events = read(tmp_path)
    assert curve(events, "evaluate/val_loss") == [(STEPS, pytest.approx(found["val_loss"]))]
    assert steps(events, "epoch/val_loss") == [STEPS]


def test_one_trial_writes_one_file(tmp_path):
    trial = trial_with(TensorBoard(tmp_path, batch_step_size=1))
    before = trial.evaluate()
    for epochs in (1, 3):
        trial.run(epochs)
        trial.predict(data_key=torchbearer.VALIDATION_DATA)
        trial.evaluate()
    assert len(event_files(tmp_path)) == 1
    events = read(tmp_path)
    first, *later = curve(events, "evaluate/val_loss")
    assert first == (0, pytest.approx(before["val_loss"]))
    assert [step for step, _ in later] == [STEPS, 3 * STEPS]
    assert steps(events, "batch/running_loss") == list(range(1, 3 * STEPS + 1))
    assert len(events.Tensors("trial/text_summary")) == 1


def test_predictions_alone_write_nothing(tmp_path):
    trial_with(TensorBoard(tmp_path)).predict(data_key=torchbearer.VALIDATION_DATA)
    assert event_files(tmp_path) == []


@pytest.mark.parametrize("loads", [True, False])
def test_an_evaluation_hides_nothing_of_an_earlier_training(tmp_path, loads):
    trained = trial_with(TensorBoard(tmp_path, batch_step_size=1))
    trained.run(2)
    trial = trial_with(TensorBoard(tmp_path))
    if loads:  # by hand, without the callbacks: the history says at which step it stands
        trial.state[torchbearer.HISTORY] = trained.state[torchbearer.HISTORY]
    trial.evaluate()
    events = read(tmp_path)
    assert steps(events, "batch/running_loss") == list(range(1, 2 * STEPS + 1))
    assert steps(events, "evaluate/val_loss") == [2 * STEPS if loads else 0]


def test_nested_metrics_have_a_curve_each_and_what_is_no_number_is_named_once(tmp_path):
    logged = TensorBoard(tmp_path, batch_step_size=1, write_graph=False)

    @on_step_training
    def add(state):
        state[torchbearer.METRICS].update(
            {"pair": [torch.tensor(1.0), 2], "by": {"a": torch.tensor([3.0, 4.0])}, "word": "x"}
        )

    with pytest.warns(RuntimeWarning) as caught:
        trial_with(add, logged).run(1)
    assert [str(w.message) for w in caught if "batch/" in str(w.message)] == [
        "TensorBoard has no curve for batch/word: could not convert string to float: 'x'."
    ]
    events = read(tmp_path)
    found = {tag: curve(events, f"batch/{tag}")[0][1] for tag in ("pair_0", "pair_1", "by_a_1")}
    assert found == {"pair_0": 1.0, "pair_1": 2.0, "by_a_1": 4.0}


class Dice(nn.Module):
    """Draws a random number and counts whenever it is called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + torch.rand(1)


def state_after(*callbacks):
    torch.manual_seed(5)
    trial = trial_with(*callbacks, model=nn.Sequential(Dice(), network()))
    trial.run(2)
    tensors = trial.state[torchbearer.MODEL].state_dict().values()
    return torch.cat([tensor.reshape(-1).float() for tensor in tensors])


def test_logging_changes_nothing_in_the_training(tmp_path):
    assert torch.equal(state_after(), state_after(TensorBoard(tmp_path, batch_step_size=1)))
    assert read(tmp_path).Tags()["graph"]


def compiled_whole():
    return torch.compile(network(), backend="eager")


def compiled_in_part():
    return nn.Sequential(nn.Identity(), torch.compile(network(), backend="eager"))


def compiled_in_place():
    model = network()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("make", [compiled_whole, compiled_in_part, compiled_in_place])
def test_a_compiled_model_has_its_graph(tmp_path, make, recwarn):
    model = make()
    trial_with(TensorBoard(tmp_path), model=model).run(1)
    assert read(tmp_path).Tags()["graph"]
    assert [w for w in recwarn if "graph" in str(w.message)] == []
    assert any("_orig_mod" in name for name in model.state_dict()) is (
        make is not compiled_in_place
    )


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        if torch.jit.is_tracing():
            raise NotImplementedError("not me")
        return self.layers(x)


def test_a_model_that_cannot_be_traced_is_a_warning(tmp_path):
    with pytest.warns(RuntimeWarning, match="no graph of the model: not me") as caught:
        trial_with(TensorBoard(tmp_path), model=Untraceable()).run(2)
    assert len([w for w in caught if "graph" in str(w.message)]) == 1
    assert steps(read(tmp_path), "epoch/loss") == [STEPS, 2 * STEPS]


@ranks(2)
def test_a_folder_that_cannot_be_made_is_one_warning_and_training_continues(tmp_path):
    (tmp_path / "file").touch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trial = trial_with(TensorBoard(tmp_path / "file" / "logs", batch_step_size=1))
        assert len(trial.run(2)) == 2
        trial.evaluate()
    found = [str(w.message) for w in caught if "TensorBoard" in str(w.message)]
    assert len(found) == (1 if collectives.is_rank_zero() else 0)
    assert all("Not a directory" in each and "Training continues" in each for each in found)


def limited(folder, limit):
    # The rank's own limit: from here on no file of this process grows beyond it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = trial_with(TensorBoard(folder, batch_step_size=1, write_graph=False)).run(6)
    return len(history), [str(w.message) for w in caught if "TensorBoard" in str(w.message)]


def test_a_disk_that_fills_up_is_one_warning_and_what_was_written_stays(tmp_path):
    limit = 5000
    zero, one = run_ranks(limited, 2, (str(tmp_path), limit))
    assert zero[0] == one[0] == 6
    assert one[1] == []
    (message,) = zero[1]
    assert "File too large" in message
    (file,) = event_files(tmp_path)
    assert file.stat().st_size < limit  # the record that did not fit is cut off again
    found = steps(read(tmp_path), "batch/running_loss")
    assert 3 < len(found) < 6 * STEPS
    assert found == list(range(1, len(found) + 1))


def on_a_small_disk(folder):
    # A mount namespace of this process alone: the disk is gone with it, however it ends.
    if ctypes.CDLL(None).unshare(_NEW_MOUNT_NAMESPACE):
        return None
    private = ["mount", "--make-rprivate", "/"]
    small = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", folder]
    if any(
        subprocess.run(c, capture_output=True, check=False).returncode for c in (private, small)
    ):
        return None
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        history = trial_with(TensorBoard(f"{folder}/a", batch_step_size=1)).run(6)
    assert len([w for w in caught if "TensorBoard" in str(w.message)]) == 1
    return len(history), len(steps(read(f"{folder}/a"), "batch/running_loss"))


def test_a_full_file_system(tmp_path):
    (found,) = run_ranks(on_a_small_disk, 1, (str(tmp_path),))
    if found is None:
        unavailable("a small disk cannot be mounted; run the tests as root to enable this one")
    epochs, points = found
    assert epochs == 6
    assert 0 < points < 6 * STEPS
    assert not list(tmp_path.iterdir())


def ended(folder):
    @on_step_training
    def end(state):
        if state[torchbearer.BATCH] == 3:
            os._exit(7)

    trial_with(TensorBoard(folder, batch_step_size=1, write_graph=False), end).run(1)


def test_every_step_is_on_disk_when_the_process_is_ended(tmp_path):
    with pytest.raises(AssertionError, match="the process ended without a word"):
        run_ranks(ended, 1, (str(tmp_path),))
    assert steps(read(tmp_path), "batch/running_loss") == [1, 2, 3, 4]


def test_a_step_size_below_one_is_refused():
    with pytest.raises(ValueError, match="batch_step_size is 0: write every 1 step or more"):
        TensorBoard("x", batch_step_size=0)


def checkpointed(folder, epochs):
    logged = TensorBoard(f"{folder}/logs", batch_step_size=1, write_graph=False)
    trial_with(logged, Checkpoint(f"{folder}/checkpoints")).run(epochs)


def test_checkpoint_keeps_the_step(tmp_path):
    run_ranks(checkpointed, 2, (str(tmp_path), 1))
    run_ranks(checkpointed, 2, (str(tmp_path), 2))
    assert steps(read(tmp_path / "logs"), "batch/running_loss") == list(range(1, 2 * STEPS + 1))


@pytest.mark.parametrize("hook", ["on_end_epoch", "on_step_training"])
def test_an_evaluation_inside_of_a_run_leaves_the_points_of_the_run(tmp_path, hook):
    class Evaluates(Callback):
        is_inside = False

        def call(self, state):
            if not self.is_inside:
                self.is_inside = True
                state[torchbearer.SELF].evaluate(data_key=torchbearer.VALIDATION_DATA)
                self.is_inside = False

    setattr(Evaluates, hook, Evaluates.call)
    trial_with(Evaluates(), TensorBoard(tmp_path, write_graph=False)).run(2)
    events = read(tmp_path)
    assert steps(events, "epoch/val_loss") == [STEPS, 2 * STEPS]


def test_predictions_that_a_run_collects_leave_its_points(tmp_path):
    trial_with(AggregatePredictions(), TensorBoard(tmp_path, write_graph=False)).run(2)
    assert steps(read(tmp_path), "epoch/loss") == [STEPS, 2 * STEPS]
