"""A rank fails or freezes during training: under every launcher and transport all ranks end."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time

import pytest

from tests.processes import Program, bound, free_port, python_words, until

pytestmark = pytest.mark.concurrent
#: Every rank is gone this long after the fault, or after the timeout that finds it.
BOUND = 8.0
HOST = socket.gethostname()
#: Lines that come before the fault, or are torchrun's own.
PREAMBLE = re.compile(r", gloo on cpu|gradients: |torch/distributed/|OMP_NUM_THREADS|^\*+$|^$")


class Run:
    """Two ranks that train, started as a user would, in one terminal or in two."""

    def __init__(self, launcher, programs):
        self.launcher, self.programs = launcher, programs

    def pids(self):
        """The processes of the ranks, once both train."""
        if self.launcher != "rank":
            return self.programs[0].pids(2)
        until(lambda: all(program.output for program in self.programs), 60)
        return [program.process.pid for program in self.programs]

    def terminal(self, rank):
        """The program in whose output a rank's messages are."""
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
    flags = ("--transport", transport, "--steps", "100000", "--pause", "0.01")
    more = ("--timeout", str(timeout), "--events", json.dumps(events))
    command = python_words("train", *flags, *more)
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


def first_line(program):
    """What the user reads first after the lines that describe the launch."""
    return next((line for line in program.errors if not PREAMBLE.search(line)), "")


def messages(program):
    """The library's own lines after those that describe the launch."""
    lines = (line for line in program.errors if line.startswith("torchbearer_ddp: "))
    return [line for line in lines if not PREAMBLE.search(line)]


CAUSES = {
    "raise": "raised ValueError: a bad sample",
    "exit": "called sys.exit(3)",
    "_exit": "exited with code 1 and without a result",
    "kill": "was killed by SIGKILL",
}
CODES = {"raise": 1, "exit": 3, "_exit": 1, "kill": -signal.SIGKILL}


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
@pytest.mark.parametrize("launcher", ["spawn", "rank", "torchrun"])
def test_a_rank_fails(launcher, event, on, transport):
    events = [{"rank": on, "step": 5, "do": event}]
    with running(launcher, transport, events=events) as run:
        run.pids()
        codes = [CODES[event] if rank == on else 1 for rank in (0, 1)]
        run.assert_ended(BOUND, codes if launcher == "rank" else [1])
        survivor = run.terminal(1 - on)
        reported = event in ("raise", "exit")
        cause = f"torchbearer_ddp: Rank {on} on {HOST} {CAUSES[event]}"
        if launcher != "spawn" and not reported:
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
            repeated = [] if launcher == "spawn" else [True]
            assert sorted(line.endswith(note) for line in lines) == [False, *repeated]
        assert "run_distributed" not in run.text().partition("torch.distributed.run")[0]
        if launcher == "torchrun":
            root = run.text().partition("Root Cause (first observed failure):")[2]
            assert f"rank      : {on} (local_rank: {on})" in root
            assert (CAUSES[event] if reported else f"exitcode  : {CODES[event]} ") in root


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
        if launcher != "spawn":  # its parent is not ours; as soon as it continues, it ends itself
            os.kill(pids[on], signal.SIGCONT)
        run.assert_ended(BOUND, [1] * len(run.programs))
        assert first_line(survivor).startswith(cause), run.text()
