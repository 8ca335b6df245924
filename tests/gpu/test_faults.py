"""A rank on a GPU fails, is killed, freezes, or its kernel asserts: the others end and name it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.failing_runs import BOUND, CAUSES, HOST, first_line, messages, running
from tests.processes import bound, until

# Limits in seconds grow with the load of the machine; so must that of a test.
pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(600)]
#: A process with a CUDA context takes longer to end.
ENDS_WITHIN = 2 * BOUND


def transport(kind):
    return "nccl" if kind == "cuda" else "gloo"


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
@pytest.mark.parametrize(("event", "on"), [("raise", 1), ("kill", 0), ("kill", 1)])
def test_a_rank_fails(kind, launcher, event, on):
    events = [{"rank": on, "step": 5, "do": event}]
    with running(launcher, transport(kind), "--device", kind, events=events) as run:
        run.pids()
        run.assert_ended(ENDS_WITHIN, [1])
        cause = f"torchbearer_ddp: Rank {on} on {HOST} {CAUSES[event]}"
        if launcher == "torchrun" and event == "kill":  # only its parent, not ours, knows
            cause = f"torchbearer_ddp: Lost connection to rank {on} on {HOST}. It was killed"
        assert first_line(run.programs[0]).startswith(cause), run.text()


@pytest.mark.parametrize("on", [0, 1])
def test_a_frozen_rank_is_named_at_the_timeout(kind, on):
    timeout = bound(10)
    with running("spawn", transport(kind), "--device", kind, timeout=timeout) as run:
        pids = run.pids()
        os.kill(pids[on], signal.SIGSTOP)
        until(lambda: pids[1 - on] not in run.programs[0].alive(), timeout + ENDS_WITHIN)
        run.assert_ended(ENDS_WITHIN, [1])
        cause = f"torchbearer_ddp: Rank {on} on {HOST} did not answer within {timeout:g} s"
        assert first_line(run.programs[0]).startswith(cause), run.text()


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
@pytest.mark.parametrize("on", [0, 1])
def test_an_assertion_in_a_kernel_is_the_first_cause(kind, launcher, on):
    """It is found later, by some other call; NCCL's watchdog finds it too, and must not end us."""
    events = [{"rank": on, "step": 5, "do": "index"}]
    with running(launcher, transport(kind), "--device", kind, events=events) as run:
        run.pids()
        run.assert_ended(ENDS_WITHIN, [1])
        first = messages(run.programs[0])[0]
        assert first.startswith(f"torchbearer_ddp: Rank {on} on {HOST} raised "), run.text()
        found = "device-side assert" if kind == "cuda" else "IndexError"
        assert found in first, run.text()
        assert "SIGABRT" not in run.text()
