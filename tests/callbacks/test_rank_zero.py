"""RankZeroOnly: any callback on rank zero, and a list that is the same everywhere."""

import pytest
import torch
import torchbearer
from torch import nn
from torchbearer import Trial
from torchbearer.callbacks import (
    Best,
    Callback,
    CSVLogger,
    Interval,
    ModelCheckpoint,
    MostRecent,
    TensorBoard,
    TensorBoardText,
    on_step_training,
)

from tests.ranks import ranks
from torchbearer_ddp.callbacks.checkpoint import Checkpoint
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.hooks import HOOKS
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.callbacks.rank_zero import RankZeroOnly
from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.group import collectives, local_work


def trial_with(*callbacks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trial = Trial(
        model,
        optimizer,
        nn.functional.mse_loss,
        ["loss"],
        [SyncModel(), SyncGradients(), *callbacks],
        verbose=0,
    )
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    trial.with_train_data(x, y, batch_size=4, num_workers=0)
    return trial.with_val_data(x, y, batch_size=4, num_workers=0)


class Recorder(Callback):
    """Remembers every hook, and counts in its state."""

    def __init__(self):
        self.calls = []
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        return self


def record(hook):
    def call(self, state):
        self.calls.append(hook)
        self.count += 1

    return call


for each in HOOKS:
    setattr(Recorder, each, record(each))


@ranks(2)
def test_every_hook_reaches_the_callback_on_rank_zero_and_nowhere_else():
    plain, wrapped = Recorder(), RankZeroOnly(Recorder())
    trial_with(plain, wrapped).run(2)
    assert {"on_init", "on_sample", "on_step_validation", "on_checkpoint", "on_end"} <= set(
        plain.calls
    )
    assert wrapped.callback.calls == (plain.calls if collectives.is_rank_zero() else [])


@ranks(2)
def test_a_factory_is_called_on_rank_zero_only():
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    wrapped = RankZeroOnly(factory)
    trial_with(wrapped).run(1)
    if collectives.is_rank_zero():
        assert wrapped.callback is made[0]
        assert made[0].calls
    else:
        assert wrapped.callback is None
        assert made == []


@ranks(2)
def test_rank_zeros_state_is_restored_on_every_rank_and_saved_again():
    for make in (Recorder, lambda: Recorder()):
        wrapped = RankZeroOnly(make)
        trial = trial_with(wrapped)
        trial.run(1)
        saved = collectives.broadcast(wrapped.state_dict(), "rank zero's state")
        assert saved["count"] > 0
        again = RankZeroOnly(make)
        states = trial.state[torchbearer.CALLBACK_LIST].state_dict()
        states["callback_states"][-1] = saved
        fresh = trial_with(again)
        again.load_state_dict({"count": 0})
        fresh.state[torchbearer.CALLBACK_LIST].load_state_dict(states)
        assert again.state_dict() == saved


@ranks(2)
def test_torchbearers_checkpointers_write_once(tmp_path):
    folder = f"{tmp_path}/models"
    wrapped = [
        RankZeroOnly(lambda: Best(f"{folder}/best.pt")),
        RankZeroOnly(lambda: Interval(folder + "/interval-{epoch}.pt")),
        RankZeroOnly(lambda: MostRecent(folder + "/recent-{epoch}.pt")),
        RankZeroOnly(lambda: ModelCheckpoint(folder + "/checkpoint-{epoch}.pt")),
    ]
    trial = trial_with(*wrapped)
    trial.run(3)
    collectives.barrier("the files stand")
    names = sorted(path.name for path in (tmp_path / "models").iterdir())
    every_epoch = [f"{kind}-{e}.pt" for kind in ("checkpoint", "interval") for e in range(3)]
    assert names == sorted(["best.pt", "recent-2.pt", *every_epoch])
    loaded = trial_with(*wrapped)
    loaded.load_state_dict(torch.load(f"{folder}/recent-2.pt", weights_only=False))
    for mine, theirs in zip(
        loaded.state[torchbearer.MODEL].parameters(),
        trial.state[torchbearer.MODEL].parameters(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    assert len(loaded.run(4)) == 4


@ranks(2)
def test_torchbearers_tensorboard_callbacks_write_once(tmp_path):
    trial_with(
        RankZeroOnly(TensorBoard(str(tmp_path), write_graph=False, write_batch_metrics=True)),
        RankZeroOnly(TensorBoardText(str(tmp_path), comment="text")),
        RankZeroOnly(CSVLogger(f"{tmp_path}/{collectives.rank()}.csv")),
    ).run(2)
    collectives.barrier("the files stand")
    folders = sorted(str(p.parent.relative_to(tmp_path)) for p in tmp_path.rglob("*tfevents*"))
    run = "Sequential_torchbearer"
    assert folders == ["Sequential_text", run, f"{run}/epoch-0", f"{run}/epoch-1"]
    assert (tmp_path / "0.csv").read_text().count("\n") == 3
    assert not (tmp_path / "1.csv").exists() or not (tmp_path / "1.csv").read_text()


@ranks(2)
def test_a_stop_requested_on_rank_zero_stops_all_ranks():
    steps = []

    @on_step_training
    def count(state):
        steps.append(state[torchbearer.BATCH])

    @on_step_training
    def stop(state):
        state[torchbearer.STOP_TRAINING] = True

    history = trial_with(count, RankZeroOnly(stop)).run(3)
    assert history == []
    assert collectives.all_gather(steps, "steps taken") == [[0, 1]] * 2


def test_what_is_no_callback_is_refused():
    for wrong in (3, lambda: 3):
        with pytest.raises(ValueError, match="was given 3: give it a torchbearer callback"):
            RankZeroOnly(wrong)
    with pytest.raises(ValueError, match="SyncModel exchanges data with the other ranks"):
        RankZeroOnly(SyncModel())


def test_without_a_group_the_callback_runs():
    wrapped = RankZeroOnly(Recorder())
    trial_with(wrapped).run(1)
    assert "on_end_epoch" in wrapped.callback.calls
    assert wrapped.state_dict() == {"count": len(wrapped.callback.calls)}


@ranks(2)
def test_what_happens_inside_is_local_in_every_hook():
    found = []

    class Asks(Callback):
        pass

    for hook in HOOKS:
        setattr(Asks, hook, lambda self, state: found.append(local_work.inside()))
    trial_with(RankZeroOnly(Asks())).run(1)
    assert not local_work.inside()
    assert bool(found) == collectives.is_rank_zero()
    assert all(found)


def unreadable():
    """A callback of the same name that cannot read what the other has saved."""

    def load_state_dict(self, state_dict):
        raise KeyError("a count of another kind")

    return type("Recorder", (Recorder,), {"load_state_dict": load_state_dict})()


@ranks(2)
def test_a_state_that_cannot_be_loaded_is_an_error_of_all_ranks(tmp_path):
    """Rank zero alone has the callback; the other would wait for it at the next exchange."""
    trial_with(RankZeroOnly(lambda: Recorder()), Checkpoint(tmp_path)).run(1)
    again = trial_with(RankZeroOnly(unreadable), Checkpoint(tmp_path))
    with pytest.raises(DistributedError, match="a count of another kind"):
        again.run(2)
    collectives.barrier("both are still in step")
