"""One rank wants to stop: all stop at the same step, with equal parameters."""

import torchbearer
from torchbearer.callbacks import EarlyStopping, TerminateOnNaN, on_step_training

from tests.faults.training import train
from tests.ranks import run_ranks
from torchbearer_ddp import collectives


@on_step_training
def note_own_loss(state):
    """The loss of this rank alone, where callbacks look for metrics."""
    state[torchbearer.METRICS]["own"] = float(state[torchbearer.LOSS])


@on_step_training
def note_own_progress(state):
    """Better with every step on rank zero, never on rank one."""
    better = 0 if collectives.rank() == 1 else state[torchbearer.BATCH]
    state[torchbearer.METRICS]["own"] = -better


def stop_on_nan():
    nan = {"rank": 1, "step": 3, "do": "nan"}
    return train([nan], callbacks=[note_own_loss, TerminateOnNaN(monitor="own")])


def test_nan_on_one_rank():
    # Seen by rank one after step 3, and told to the other with the gradients of step 4.
    (steps, parameters), other = run_ranks(stop_on_nan, 2)
    assert steps == 5
    assert other == (steps, parameters)


def stop_early():
    stopping = EarlyStopping(monitor="own", mode="min", patience=3, step_on_batch=True)
    return train([], callbacks=[note_own_progress, stopping])


def test_an_early_stop_on_one_rank():
    (steps, parameters), other = run_ranks(stop_early, 2)
    assert 3 < steps < 10
    assert other == (steps, parameters)
