"""A rank fails or freezes during training: under every launcher and transport all ranks end."""

import os
import signal

import pytest

from tests.faults.failing_runs import (
    BOUND,
    CAUSES,
    CODES,
    HOST,
    SUPERVISED,
    first_line,
    messages,
    running,
)
from tests.processes import bound, until

pytestmark = pytest.mark.concurrent


def by_transport(*cases):
    """Alternates the transports over the cases; in ``make soak`` every case has both."""
    both = ("shm", "gloo")
    return [
        (*case, transport)
        for number, case in enumerate(cases)
        for transport in (both if "TORCHBEARER_DDP_SOAK" in os.environ else [both[number % 2]])
    ]


@pytest.mark.parametrize(
    ("event", "on", "transport"),
    by_transport(("raise", 0), ("raise", 1), ("exit", 1), ("_exit", 0), ("kill", 1), ("kill", 0)),
)
@pytest.mark.parametrize("launcher", [*SUPERVISED, "rank", "torchrun"])
def test_a_rank_fails(launcher, event, on, transport):
    events = [{"rank": on, "step": 5, "do": event}]
    with running(launcher, transport, events=events) as run:
        run.pids()
        codes = [CODES[event] if rank == on else 1 for rank in (0, 1)]
        run.assert_ended(BOUND, codes if launcher == "rank" else [1])
        survivor = run.terminal(1 - on)
        reported = event in ("raise", "exit")
        cause = f"torchbearer_ddp: Rank {on} on {HOST} {CAUSES[event]}"
        if launcher not in SUPERVISED and not reported:
            # Only its parent, which is not ours, knows how it ended.
            cause = f"torchbearer_ddp: Lost connection to rank {on} on {HOST}. It was killed"
        assert first_line(survivor).startswith(cause), run.text()
        if reported:
            # Once in full, by the rank itself, and with a note where another rank repeats it.
            assert first_line(run.terminal(on)).startswith(cause), run.text()
            tracebacks = 2 if launcher == "torchrun" else 1
            assert run.text().count("in train_with_events\n") == tracebacks
            lines = [line for program in run.programs for line in messages(program)]
            note = f"(Rank {1 - on} stopped because of it.)\n"
            repeated = [] if launcher in SUPERVISED else [True]
            assert sorted(line.endswith(note) for line in lines) == [False, *repeated]
        assert "run_distributed" not in run.text().partition("torch.distributed.run")[0]
        if launcher == "torchrun":
            root = run.text().partition("Root Cause (first observed failure):")[2]
            assert f"rank      : {on} (local_rank: {on})" in root
            assert (CAUSES[event] if reported else f"exitcode  : {CODES[event]} ") in root


@pytest.mark.parametrize(
    ("launcher", "on", "transport"),
    by_transport(
        *[("fork", 1), ("forkserver", 0), ("spawn", 1), ("fork", 0)],
        *[("rank", 0), ("rank", 1)],
        *[("torchrun", 1), ("torchrun", 0)],
    ),
)
def test_a_frozen_rank_is_named_at_the_timeout(launcher, on, transport):
    timeout = bound(5)
    with running(launcher, transport, timeout=timeout) as run:
        pids = run.pids()
        os.kill(pids[on], signal.SIGSTOP)
        survivor = run.terminal(1 - on)
        cause = f"torchbearer_ddp: Rank {on} on {HOST} did not answer within {timeout:g} s"
        until(lambda: pids[1 - on] not in survivor.alive(), timeout + BOUND)
        if (
            launcher not in SUPERVISED
        ):  # its parent is not ours; as soon as it continues, it ends itself
            os.kill(pids[on], signal.SIGCONT)
        run.assert_ended(BOUND, [1] * len(run.programs))
        assert first_line(survivor).startswith(cause), run.text()
