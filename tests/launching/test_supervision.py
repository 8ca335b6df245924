"""A rank fails: all end within seconds, and the first cause is what the user reads first."""

import os
import signal
import socket
import sys
import time

import pytest

from tests.launching.programs import SCRIPTS, Program, bound, free_port, until

#: Every rank is gone this long after the fault.
BOUND = 5.0
HOST = socket.gethostname()


def cause_of(program):
    """The first line that the user reads after the one that says what was started."""
    return program.said().splitlines()[0]


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    ("event", "cause"),
    [
        ("raise", f"torchbearer_ddp: Rank {{}} on {HOST} raised ValueError: a bad sample"),
        ("exit", f"torchbearer_ddp: Rank {{}} on {HOST} called sys.exit(3)"),
        ("_exit", f"torchbearer_ddp: Rank {{}} on {HOST} exited with code 1 and without a result"),
        ("kill", f"torchbearer_ddp: Rank {{}} on {HOST} was killed by SIGKILL"),
    ],
)
def test_a_rank_fails(event, on, cause):
    with Program("misbehave.py", event, "--on", str(on), "--nproc-per-node", "2") as program:
        program.pids(2)
        started = time.monotonic()
        assert program.code(BOUND + 5) == 1
        assert time.monotonic() - started < bound(BOUND)
        assert cause_of(program).startswith(cause.format(on)), program.text()
        assert not program.alive()
        if event == "raise":
            text = program.said()
            assert text.count("ValueError: a bad sample") == 2  # the head line and the traceback
            assert "in misbehave" in text
            assert "run_distributed" not in text  # the launcher's own frames help nobody


def test_a_rank_fails_while_another_is_frozen():
    flags = ("none", "--nproc-per-node", "3")
    with Program("misbehave.py", *flags) as program:
        pids = program.pids(3)
        os.kill(pids[2], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        assert program.code(BOUND) == 1
        assert cause_of(program).startswith(f"torchbearer_ddp: Rank 1 on {HOST} was killed by SIGK")
        assert not program.alive()


def test_a_frozen_rank_is_named_at_the_timeout():
    timeout = bound(4)
    flags = ("none", "--nproc-per-node", "2", "--timeout", str(timeout))
    with Program("misbehave.py", *flags) as program:
        os.kill(program.pids(2)[1], signal.SIGSTOP)
        assert program.code(timeout + BOUND) == 1
        assert cause_of(program).startswith(f"torchbearer_ddp: Rank 1 on {HOST} did not answer")
        assert not program.alive()


@pytest.mark.parametrize("frozen", [False, True])
def test_no_rank_survives_its_launcher(frozen):
    with Program("misbehave.py", "none", "--nproc-per-node", "2") as program:
        pids = program.pids(2)
        if frozen:
            os.kill(pids[1], signal.SIGSTOP)
        program.process.kill()
        until(lambda: not program.alive(), BOUND)


def test_no_rank_survives_a_launcher_that_is_killed_at_once():
    with Program("misbehave.py", "none", "--nproc-per-node", "2") as program:
        until(lambda: len(program.alive()) == 3, 60)
        program.process.kill()
        until(lambda: not program.alive(), BOUND)


def test_a_result_that_cannot_be_sent():
    with Program("misbehave.py", "return", "--nproc-per-node", "2") as program:
        assert program.code() == 1
        expected = "torchbearer_ddp: Rank 1 returned a builtins.generator, which cannot be sent"
        assert program.said().startswith(expected), program.text()
        assert len(program.said().splitlines()) == 1


def test_an_early_end_without_an_error_is_none():
    with Program("misbehave.py", "leave", "--nproc-per-node", "2") as program:
        assert program.code() == 0, program.text()
        assert program.output[-1] == "['done', None]\n"


@pytest.mark.parametrize(
    ("event", "code", "others"),
    [
        ("raise", 1, f"torchbearer_ddp: Rank 1 on {HOST} raised ValueError: a bad sample"),
        ("exit", 3, f"torchbearer_ddp: Rank 1 on {HOST} called sys.exit(3)"),
        ("kill", -9, f"torchbearer_ddp: Rank 0 on {HOST} lost contact with another rank"),
    ],
)
def test_a_rank_fails_without_a_launcher(event, code, others):
    port = str(free_port())
    flags = (event, "--world-size", "2", "--host", "127.0.0.1", "--port", port, "--rank")
    with (
        Program("misbehave.py", *flags, "1") as one,
        Program("misbehave.py", *flags, "0") as zero,
    ):
        until(lambda: zero.output and one.output, 60)
        started = time.monotonic()
        assert (one.code(BOUND + 5), zero.code(BOUND + 5)) == (code, 1)
        assert time.monotonic() - started < bound(BOUND)
        assert cause_of(zero).startswith(others), zero.text()
        if event == "kill":
            assert f"No word from rank 1 on {HOST}" in zero.text()
        if event == "raise":
            assert one.text().count("ValueError: a bad sample") == 1


def test_the_rank_that_holds_the_store_fails_without_a_launcher():
    port = str(free_port())
    flags = ("raise", "--on", "0", "--world-size", "2", "--host", "127.0.0.1", "--port", port)
    with (
        Program("misbehave.py", *flags, "--rank", "1") as one,
        Program("misbehave.py", *flags, "--rank", "0") as zero,
    ):
        until(lambda: zero.output and one.output, 60)
        assert (one.code(BOUND), zero.code(BOUND)) == (1, 1)
        assert cause_of(one).startswith(f"torchbearer_ddp: Rank 0 on {HOST} raised ValueError")


@pytest.mark.parametrize("event", ["raise", "kill"])
@pytest.mark.parametrize("on", [0, 1])
def test_a_rank_of_another_node_fails(event, on):
    port = str(free_port())
    flags = (event, "--on", str(on), "--nnodes", "2", "--host", "127.0.0.1", "--port", port)
    with (
        Program("misbehave.py", *flags, "--node-rank", "1", "--nproc-per-node", "1") as second,
        Program("misbehave.py", *flags, "--node-rank", "0", "--nproc-per-node", "1") as first,
    ):
        until(lambda: first.output and second.output, 60)
        for program in (first, second):
            assert program.code(BOUND) == 1, program.text()
            words = {"raise": "raised ValueError", "kill": "was killed by SIGKILL"}[event]
            assert cause_of(program).startswith(f"torchbearer_ddp: Rank {on} on {HOST} {words}")
            assert not program.alive()


def test_a_rank_fails_under_torchrun():
    script = (str(SCRIPTS / "misbehave.py"), "raise")
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *script)
    with Program(sys.executable, *command, raw=True) as program:
        assert program.code() == 1
        assert "ValueError: a bad sample" in program.text()
        assert not program.alive()
