"""With ``--debug`` each rank reports where it is; a crash shows its line without it."""

import json
import os
import re
import signal
import socket
import sys

import pytest

from tests.processes import Program, bound, until
from torchbearer_ddp.group import debug
from torchbearer_ddp.launch.flags import merge, read_flags
from torchbearer_ddp.launch.planner import make_plan

TRAINING = (sys.executable, "-m", "tests.programs", "train")
HOST = socket.gethostname()


def lines(program, rank, reason):
    """What a rank reported about its place."""
    start = rf"torchbearer_ddp: rank {rank} on {HOST}, process \d+ \({reason}\): (.*)\n"
    return re.findall(start, "".join(program.errors))


@pytest.mark.concurrent
@pytest.mark.parametrize("to", ["launcher", "rank"])
def test_sigusr1_shows_where_a_running_rank_is(to):
    flags = ("--nproc-per-node", "2", "--steps", "10000", "--pause", "0.02")
    debugged = {"TORCHBEARER_DDP_DEBUG": "1"}
    with Program(*TRAINING, *flags, raw=True, environment=debugged) as program:
        pids = program.pids(2)
        os.kill(program.process.pid if to == "launcher" else pids[1], signal.SIGUSR1)
        asked = (0, 1) if to == "launcher" else (1,)
        until(lambda: all(lines(program, rank, "SIGUSR1") for rank in asked), 20)
        for rank in asked:
            (line,) = lines(program, rank, "SIGUSR1")
            place = r"epoch 0, step \d+, last hook on_\w+; last exchange: the gradients.*, [\d.]+ s"
            assert re.match(place, line), line
        # faulthandler's stacks of all threads, of each rank that was asked
        assert program.text().count("Current thread 0x") == len(asked), program.text()
        assert re.search(r'File ".*programs\.py", line \d+ in train_with_events\n', program.text())
        assert program.process.poll() is None
        program.process.terminate()
        assert program.code() == 143, program.text()


@pytest.mark.concurrent
def test_a_timeout_shows_where_everybody_is():
    events = json.dumps([{"rank": 1, "step": 3, "do": "stuck"}])
    timeout = ("--timeout", str(bound(3)))
    flags = ("--nproc-per-node", "2", "--pause", "0.01", "--events", events, *timeout, "--debug")
    with Program(*TRAINING, *flags, raw=True) as program:
        assert program.code() == 1
        waiting, stuck = lines(program, 0, "a wait failed"), lines(program, 1, "SIGUSR1")
        assert len(waiting) == len(stuck) == 1, program.text()
        place = "epoch 0, step 3, last hook on_backward; last exchange: the gradients"
        assert waiting[0].startswith(place)
        assert stuck[0].startswith("epoch 0, step 3, last hook on_sample")
        assert re.search(r'File ".*programs\.py", line \d+ in _stuck\n', program.text())
        assert f"Rank 1 on {HOST} did not answer" in program.said()


@pytest.mark.parametrize(
    ("command", "environment", "overrides", "expected"),
    [
        ("", {}, {}, False),
        ("--debug", {}, {}, True),
        ("", {"TORCHBEARER_DDP_DEBUG": "1"}, {}, True),
        ("", {"TORCHBEARER_DDP_DEBUG": "0"}, {}, False),
        ("--debug", {"TORCHBEARER_DDP_DEBUG": "1"}, {"debug": False}, False),
    ],
)
def test_flag_variable_and_argument(command, environment, overrides, expected):
    settings = merge(read_flags(command.split()), overrides)
    assert make_plan(settings, environment, 0).debug is expected


def test_nothing_is_logged_or_kept_in_a_run_that_is_not_debugged(caplog):
    state = {}
    with caplog.at_level("INFO", logger="torchbearer_ddp"):
        debug.note_hook("on_start", state)
        debug.note_exchange("apples")
        debug.report("no reason")
        assert caplog.text == ""
        assert debug._progress is None
        with debug.reporting(3):
            debug.report("early")
            debug.note_hook("on_start", state)
            assert debug._progress.state is state
            assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    assert "rank 3 on" in caplog.text
    assert "(early): no hook was called yet; no exchange yet" in caplog.text
    assert debug._progress is None
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


BUSY = """
import ctypes, os, time
from torchbearer_ddp import rank, run_distributed

def hold_the_lock():
    # PyDLL keeps Python's lock: no Python code runs, in any thread, until it returns.
    ctypes.PyDLL(None).sleep(600)

def work():
    os.write(1, f"rank {rank()} pid {os.getpid()}\\n".encode())
    hold_the_lock() if rank() == 1 else time.sleep(600)

run_distributed(work)
"""


@pytest.mark.concurrent
def test_the_stack_is_shown_while_native_code_blocks_all_of_python():
    flags = ("--nproc-per-node", "2", "--debug", "--grace", "1")
    with Program(sys.executable, "-c", BUSY, *flags, raw=True) as program:
        pid = program.pids(2)[1]

        def is_shown():
            os.kill(pid, signal.SIGUSR1)  # again: the rank says its pid before it holds the lock
            return "in hold_the_lock\n" in program.text()

        until(is_shown, 20)
        program.process.terminate()
        assert program.code() == 143, program.text()


CRASH = """
import ctypes
from torchbearer_ddp import barrier, rank, run_distributed

def read_address_zero():
    ctypes.string_at(0)

def work():
    barrier()
    if rank() == 1:
        read_address_zero()
    barrier()

run_distributed(work)
"""


@pytest.mark.concurrent
def test_a_crash_in_native_code_shows_its_line_of_python():
    with Program(sys.executable, "-c", CRASH, "--nproc-per-node", "2", raw=True) as program:
        assert program.code() == 1
        assert f"torchbearer_ddp: Rank 1 on {HOST} was killed by SIGSEGV." in program.text()
        assert "Fatal Python error: Segmentation fault" in program.text()
        assert "line 6 in read_address_zero\n" in program.text(), program.text()
