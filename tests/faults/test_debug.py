"""With ``--debug`` each rank says where it is."""

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
from torchbearer_ddp.launch.plan import make_plan

TRAINING = (sys.executable, "-m", "tests.programs", "train")
HOST = socket.gethostname()


def lines(program, rank, reason):
    """What a rank said about its place."""
    start = re.compile(rf"torchbearer_ddp: rank {rank} on {HOST}, process \d+ \({reason}\): (.*)\n")
    return [found[1] for line in program.errors if (found := start.fullmatch(line))]


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
        assert program.process.poll() is None
        program.process.terminate()
        assert program.code() == 143, program.text()


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


def test_nothing_is_said_or_kept_where_nobody_debugs(capfd):
    state = {}
    debug.note_hook("on_start", state)
    debug.note_exchange("apples")
    debug.report("no reason")
    assert capfd.readouterr().err == ""
    assert debug._place.state is None
    with debug.reporting(3):
        debug.report("so early")
        debug.note_hook("on_start", state)
        assert debug._place.state is state
    assert "rank 3 on" in capfd.readouterr().err
    assert debug._place.state is None
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
