"""A rank fails or freezes in mid-training: under every launcher and transport all end right."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.processes import Program, bound, free_port, until

TRAINING = str(Path(__file__).with_name("training.py"))
#: Every rank is gone this long after the fault, or after the timeout that finds it.
BOUND = 8.0
HOST = socket.gethostname()
#: What comes before the fault, or is torchrun's own.
PREAMBLE = re.compile(r", gloo on cpu|gradients: |torch/distributed/|OMP_NUM_THREADS|^\*+$|^$")


class Run:
    """Two ranks in mid-training, started as a user would, in one terminal or in two."""

    def __init__(self, launcher, programs):
        self.launcher, self.programs = launcher, programs

    def pids(self):
        """The processes of the ranks, once both train."""
        if self.launcher != "rank":
            return self.programs[0].pids(2)
        until(lambda: all(program.output for program in self.programs), 60)
        return [program.process.pid for program in self.programs]

    def terminal(self, rank):
        """Where a rank's words can be read."""
        return self.programs[rank if self.launcher == "rank" else 0]

    def assert_ended(self, seconds, codes):
        """All of it is gone within the bound, with these exit codes."""
        started = time.monotonic()
        assert [program.code(seconds) for program in self.programs] == codes, self.text()
        assert time.monotonic() - started < bound(seconds), self.text()
        assert not [pid for program in self.programs for pid in program.alive()]

    def text(self):
        return "\n".join(program.text() for program in self.programs)


@contextlib.contextmanager
def running(launcher, transport, *, timeout=30.0, events=()):
    script = (TRAINING, "--transport", transport, "--steps", "100000", "--pause", "0.01")
    command = (*script, "--timeout", str(timeout), "--events", json.dumps(events))
    place = ("--world-size", "2", "--host", "127.0.0.1", "--port", str(free_port()), "--rank")
    starts = {
        "spawn": [(*command, "--nproc-per-node", "2")],
        "torchrun": [("-m", "torch.distributed.run", "--nproc-per-node", "2", *command)],
        "rank": [(*command, *place, "0"), (*command, *place, "1")],
    }[launcher]
    with contextlib.ExitStack() as stack:
        yield Run(
            launcher,
            [stack.enter_context(Program(sys.executable, *each, raw=True)) for each in starts],
        )


def first_words(program):
    """What the user reads first after the lines that say what was started."""
    return next((line for line in program.errors if not PREAMBLE.search(line)), "")


def ours(program):
    """All that the library says, but for what was started."""
    lines = (line for line in program.errors if line.startswith("torchbearer_ddp: "))
    return [line for line in lines if not PREAMBLE.search(line)]


WORDS = {
    "raise": "raised ValueError: a bad sample",
    "exit": "called sys.exit(3)",
    "_exit": "exited with code 1 and without a result",
    "kill": "was killed by SIGKILL",
}
CODES = {"raise": 1, "exit": 3, "_exit": 1, "kill": -signal.SIGKILL}


def by_transport(*cases):
    """Gives each case a transport, by turns; in ``make soak`` every case has both."""
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
@pytest.mark.parametrize("launcher", ["spawn", "rank", "torchrun"])
def test_a_rank_fails(launcher, event, on, transport):
    events = [{"rank": on, "step": 5, "do": event}]
    with running(launcher, transport, events=events) as run:
        run.pids()
        codes = [CODES[event] if rank == on else 1 for rank in (0, 1)]
        run.assert_ended(BOUND, codes if launcher == "rank" else [1])
        survivor = run.terminal(1 - on)
        spoke = event in ("raise", "exit")
        cause = f"torchbearer_ddp: Rank {on} on {HOST} {WORDS[event]}"
        if launcher != "spawn" and not spoke:  # only its parent, which is not ours, knows how
            cause = f"torchbearer_ddp: Lost connection to rank {on} on {HOST}. It was killed"
        assert first_words(survivor).startswith(cause), run.text()
        if spoke:
            # It is said in full once, by the rank itself, and marked where another repeats it.
            assert first_words(run.terminal(on)).startswith(cause), run.text()
            assert run.text().count("in train\n") == (2 if launcher == "torchrun" else 1)
            lines = [line for program in run.programs for line in ours(program)]
            mark = f"(Rank {1 - on} stopped because of it.)\n"
            repeated = [] if launcher == "spawn" else [True]
            assert sorted(line.endswith(mark) for line in lines) == [False, *repeated]
        assert "run_distributed" not in run.text().partition("torch.distributed.run")[0]
        if launcher == "torchrun":
            root = run.text().partition("Root Cause (first observed failure):")[2]
            assert f"rank      : {on} (local_rank: {on})" in root
            assert (WORDS[event] if spoke else f"exitcode  : {CODES[event]} ") in root


@pytest.mark.parametrize(
    ("launcher", "on", "transport"),
    by_transport(
        *[("spawn", 1), ("spawn", 0)],
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
        if launcher != "spawn":  # nobody of ours may end it; as soon as it wakes, it ends itself
            os.kill(pids[on], signal.SIGCONT)
        run.assert_ended(BOUND, [1] * len(run.programs))
        assert first_words(survivor).startswith(cause), run.text()
