"""One rank stops: all stop at the same step, with equal parameters. And repeated signals."""

import signal
import sys
import time

import pytest
import torchbearer
from torchbearer.callbacks import EarlyStopping, TerminateOnNaN, on_step_training

from tests.processes import Program, bound, until
from tests.programs import train_with_events
from tests.ranks import run_ranks
from torchbearer_ddp.checkpoints import file
from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.stop_request import ECHO_SECONDS


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
    return train_with_events([nan], callbacks=[note_own_loss, TerminateOnNaN(monitor="own")])


def test_nan_on_one_rank():
    # Found by rank one after step 3, and sent to the other rank with the gradients of step 4.
    (steps, parameters), other = run_ranks(stop_on_nan, 2)
    assert steps == 5
    assert other == (steps, parameters)


def stop_early():
    stopping = EarlyStopping(monitor="own", mode="min", patience=3, step_on_batch=True)
    return train_with_events([], callbacks=[note_own_progress, stopping])


def test_an_early_stop_on_one_rank():
    (steps, parameters), other = run_ranks(stop_early, 2)
    assert 3 < steps < 10
    assert other == (steps, parameters)


SLOW_DISK = """
import os, sys, time
from tests.programs import train_with_events
from torchbearer_ddp import run_distributed

sync, seconds = os.fsync, float(sys.argv[2])

def slowly(descriptor):
    os.write(1, b"writing\\n")
    time.sleep(seconds)
    sync(descriptor)

def train_on_it(folder):
    os.fsync = slowly
    train_with_events([], 10**6, folder=folder, pause=0.01)

run_distributed(train_on_it, (sys.argv[1],))
"""


@pytest.mark.concurrent(4)
@pytest.mark.parametrize(
    ("ranks", "end", "seconds", "grace"),
    [
        (1, "the file is complete", 3, 60),
        (1, "the end of the grace", 60, 4),
        (2, "the file is complete", 3, 60),
        (2, "a third signal", 60, 60),
    ],
)
def test_a_second_signal_while_a_checkpoint_is_written(tmp_path, ranks, end, seconds, grace):
    flags = ("--grace", str(grace), *(("--nproc-per-node", str(ranks)) if ranks > 1 else ()))
    command = (sys.executable, "-c", SLOW_DISK, str(tmp_path), str(seconds), *flags)
    with Program(*command, raw=True) as program:
        until(lambda: "writing\n" in program.output, 60)
        for _ in range(3 if end == "a third signal" else 2):
            program.process.send_signal(signal.SIGTERM)
            sent = time.monotonic()
            until(lambda sent=sent: time.monotonic() > sent + 2 * ECHO_SECONDS, 10)
        started = time.monotonic()
        assert program.code(60) == 143, program.text()
        assert time.monotonic() - started < bound(30 if end == "the file is complete" else 8)
        assert not program.alive()
    saved = [file.read(path) for path in tmp_path.glob("step-*.pt")]
    assert bool(saved) == (end == "the file is complete")
