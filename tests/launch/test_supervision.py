"""A rank fails: all end within seconds, and the first cause is what the user reads first.

``faults/test_ranks.py`` has the plain cases, under every launcher.
"""

import os
import signal
import socket

import pytest

from tests.processes import Program, free_port, until
from torchbearer_ddp.launch.starting import VARIABLE

pytestmark = pytest.mark.concurrent

METHODS = ("fork", "forkserver", "spawn")
#: Every rank is gone this long after the fault.
BOUND = 5.0
HOST = socket.gethostname()


def cause_of(program):
    """The first line that the user reads after the one that says what was started."""
    return program.said().splitlines()[0]


def test_a_rank_fails_while_another_is_frozen():
    flags = ("none", "--nproc-per-node", "3")
    with Program("steps", *flags) as program:
        pids = program.pids(3)
        os.kill(pids[2], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        assert program.code(BOUND) == 1
        assert cause_of(program).startswith(f"torchbearer_ddp: Rank 1 on {HOST} was killed by SIGK")
        assert not program.alive()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_no_rank_survives_its_launcher(method, frozen):
    start = {VARIABLE: method}
    with Program("steps", "none", "--nproc-per-node", "2", environment=start) as program:
        pids = program.pids(2)
        if frozen:
            os.kill(pids[1], signal.SIGSTOP)
        program.process.kill()
        until(lambda: not program.alive(), BOUND)


@pytest.mark.parametrize("method", METHODS)
def test_no_rank_survives_a_launcher_that_is_killed_at_once(method):
    """With a clean process to fork from, that one has to go too."""
    start, first = {VARIABLE: method}, 2 if method == "forkserver" else 3
    with Program("steps", "none", "--nproc-per-node", "2", environment=start) as program:
        until(lambda: len(program.alive()) == first, 60)
        program.process.kill()
        until(lambda: not program.alive(), BOUND)


def test_a_result_that_cannot_be_sent():
    with Program("steps", "return", "--nproc-per-node", "2") as program:
        assert program.code() == 1
        expected = "torchbearer_ddp: Rank 1 returned a builtins.generator, which cannot be sent"
        assert program.said().startswith(expected), program.text()
        assert len(program.said().splitlines()) == 1


def test_an_early_end_without_an_error_is_none():
    with Program("steps", "leave", "--nproc-per-node", "2") as program:
        assert program.code() == 0, program.text()
        assert program.output[-1] == "['done', None]\n"


@pytest.mark.parametrize("event", ["raise", "kill"])
@pytest.mark.parametrize("on", [0, 1])
def test_a_rank_of_another_node_fails(event, on):
    port = str(free_port())
    flags = (event, "--on", str(on), "--nnodes", "2", "--host", "127.0.0.1", "--port", port)
    with (
        Program("steps", *flags, "--node-rank", "1", "--nproc-per-node", "1") as second,
        Program("steps", *flags, "--node-rank", "0", "--nproc-per-node", "1") as first,
    ):
        until(lambda: first.output and second.output, 60)
        for program in (first, second):
            assert program.code(BOUND) == 1, program.text()
            words = {"raise": "raised ValueError", "kill": "was killed by SIGKILL"}[event]
            assert cause_of(program).startswith(f"torchbearer_ddp: Rank {on} on {HOST} {words}")
            assert not program.alive()
