"""Two ranks that train until one of them fails, started as a user would, and what they say."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import sys
import time

from tests.processes import Program, bound, free_port, python_words, until
from torchbearer_ddp.launch.starting import VARIABLE

#: How a launcher that supervises its ranks starts them.
SUPERVISED = ("fork", "forkserver", "spawn")
#: Every rank is gone this long after the fault, or after the timeout that finds it.
BOUND = 8.0
HOST = socket.gethostname()
#: Lines that come before the fault, or are torchrun's own.
PREAMBLE = re.compile(
    r", \S+ on (cpu|cuda)|gradients: |torch/distributed/|OMP_NUM_THREADS|^\*+$|^$"
)


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
def running(launcher, transport, *more, timeout=30.0, events=()):
    flags = ("--transport", transport, "--steps", "100000", "--pause", "0.01")
    faults = ("--timeout", str(timeout), "--events", json.dumps(events))
    command = python_words("train", *flags, *faults, *more)
    place = ("--world-size", "2", "--host", "127.0.0.1", "--port", str(free_port()), "--rank")
    starts = {
        **{way: [(*command, "--nproc-per-node", "2")] for way in SUPERVISED},
        "torchrun": [
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command)
        ],
        "rank": [(*command, *place, "0"), (*command, *place, "1")],
    }[launcher]
    environment = {VARIABLE: launcher} if launcher in SUPERVISED else {}
    programs = [
        Program(sys.executable, *each, environment=environment, raw=True) for each in starts
    ]
    with contextlib.ExitStack() as stack:
        yield Run(launcher, [stack.enter_context(program) for program in programs])


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
