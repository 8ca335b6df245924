"""Saving on real ranks: how many exchanges it takes, errors, and the schedule."""

import itertools
import time
from typing import ClassVar

import pytest
import torch
import torchbearer
from torchbearer.callbacks import on_step_training

from tests.programs import build, network, train
from tests.ranks import ranks
from torchbearer_ddp import Checkpoint, CheckpointError
from torchbearer_ddp.callbacks.callback_order import OrderedCallback
from torchbearer_ddp.checkpoints import file, rank_state
from torchbearer_ddp.checkpoints.schedule import SaveSchedule
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives, membership


@ranks(3)
def test_gather_to_brings_values_of_any_size_to_one_rank():
    for size in (1, 10_000):
        for target in (0, 2):
            mine = [collectives.rank(), torch.ones(size * collectives.rank())]
            everyone = collectives.gather_to(mine, "values", target)
            if collectives.rank() != target:
                assert everyone == []
                continue
            assert [rank for rank, _ in everyone] == [0, 1, 2]
            assert [len(tensor) for _, tensor in everyone] == [0, size, 2 * size]


def test_gather_to_without_a_group():
    assert collectives.gather_to({"a": 1}, "values") == [{"a": 1}]


class AfterAll(OrderedCallback):
    """Calls a function after a step and after every other callback, Checkpoint too."""

    order: ClassVar = {"on_step_training": 100}

    def __init__(self, body):
        super().__init__()
        self._body = body

    def on_step_training(self, state):
        self._body(state)


def exchanges_by_step(*callbacks):
    """The number of exchanges from the end of one step to the end of the next, by step."""
    counted = []

    trial = build(*callbacks, AfterAll(lambda state: counted.append(membership.current().sequence)))
    trial.run(1)
    return [after - before for before, after in itertools.pairwise(counted[1:])]


@ranks(2)
def test_a_save_takes_three_exchanges_and_the_clock_none(tmp_path):
    plain = exchanges_by_step()
    assert len(set(plain)) == 1
    idle = exchanges_by_step(Checkpoint(tmp_path / "idle", every_seconds=3600))
    assert idle == plain
    saving = exchanges_by_step(Checkpoint(tmp_path / "steps", every_steps=1))
    # Errors and checksums; the sizes of the ranks' parts; the parts.
    assert {after - before for before, after in zip(plain, saving, strict=True)} == {3}
    clock = exchanges_by_step(Checkpoint(tmp_path / "clock", every_seconds=1e-9))
    assert clock == saving


class Unsaveable(torchbearer.callbacks.Callback):
    """What it sets on one rank cannot be saved there."""

    def on_step_training(self, state):
        if collectives.rank() == 1:
            state[torchbearer.HISTORY].append({"odd": object()})


@ranks(2)
def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    with pytest.raises(Exception, match=r"\['odd'\] is a builtins.object") as caught:
        train(tmp_path, [Unsaveable()], every_steps=1)
    assert ("Rank 1: " in str(caught.value)) == (collectives.rank() == 0)
    assert not list(tmp_path.glob("*.pt"))


def plain_run(checkpoint, *callbacks, steps=6):
    """A run without SyncGradients, as with torch's own DistributedDataParallel."""
    torch.manual_seed(0)
    model = network()
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.nn.CrossEntropyLoss(),
        callbacks=[checkpoint, *callbacks],
        verbose=0,
    )
    trial.with_train_data(torch.randn(12, 6), torch.randint(2, (12,)), batch_size=4)
    return trial.for_train_steps(steps)


@ranks(2)
def test_without_sync_gradients_the_clock_is_still_rank_zero_s(tmp_path):
    saved = []

    note = AfterAll(lambda state: saved.append(checkpoint._schedule.saved_step))
    # Rank one's own clock would never be due.
    seconds = 1e-9 if collectives.rank() == 0 else 3600
    checkpoint = Checkpoint(tmp_path, every_seconds=seconds, every_epochs=None, monitor=None)
    plain_run(checkpoint, note).run(1)
    assert saved == [1, 2, 3, 4, 5, 6]


@ranks(2)
def test_without_sync_gradients_a_failed_write_is_raised_at_the_end_of_the_epoch(tmp_path):
    steps = []

    @on_step_training
    def fail(state):
        steps.append(len(steps) + 1)
        if len(steps) == 1:
            checkpoint._saver._writer.start(broken)
            finish_writing()  # the error is there before the next step

    def broken():
        raise CheckpointError("full")

    checkpoint = Checkpoint(tmp_path, every_epochs=None, monitor=None)
    trial = plain_run(checkpoint, fail)
    with pytest.raises(CheckpointError, match="full"):
        trial.run(2)
    assert steps == [1, 2, 3, 4, 5, 6]


def test_each_rank_s_part_is_one_tensor(tmp_path):
    """Also in the middle of an epoch, with metrics that gather: few records, a small file."""
    train(tmp_path, epochs=1, every_steps=5, steps=100, keep=None)
    sizes = {step: (tmp_path / f"step-{step:07d}.pt").stat().st_size for step in (5, 95)}
    assert sizes[95] - sizes[5] < 30_000
    section = file.read(tmp_path / "step-0000095.pt")["torchbearer_ddp"]
    (part,) = section["ranks"]
    assert part["packed"].dtype == torch.uint8
    assert len(rank_state.unpack(part, "cpu")["epoch"]["values"]) > 1


def test_the_schedule(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    schedule = SaveSchedule(2, 3, 10.0)
    assert [step for step in range(1, 10) if schedule.is_due_at_step(step)] == [3, 6, 9]
    due = [epoch for epoch in range(1, 6) if schedule.is_due_after_epochs(epoch, ends=epoch == 5)]
    assert due == [2, 4, 5]
    now[0] = 9.9
    assert not schedule.is_due_by_clock()
    now[0] = 10.0
    assert schedule.is_due_by_clock()
    schedule.saved(7)
    assert schedule.saved_step == 7
    assert not schedule.is_due_by_clock()
    never = SaveSchedule(None, None, None)
    assert not never.is_due_after_epochs(4, ends=True)
    assert not never.is_due_by_clock()
    assert not never.is_due_at_step(3)
