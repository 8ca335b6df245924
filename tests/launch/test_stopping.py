"""A signal: the ranks agree on a step and stop, or are ended; the exit code says which signal."""

import os
import signal
import sys

import pytest

from tests.processes import Program, free_port, python_words, until
from torchbearer_ddp.launch.starting import VARIABLE

pytestmark = pytest.mark.concurrent

BOUND = 5.0
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_training_stops_when_the_launcher_gets_a_signal(signum, code):
    with Program("steps", "polite", "--nproc-per-node", "2") as program:
        program.pids(2)
        program.process.send_signal(signum)
        assert program.code(BOUND) == code, program.text()
        assert sorted(program.output[-2:]) == ["rank 0 saved\n", "rank 1 saved\n"]
        assert not program.alive()


def test_the_signal_before_slurm_s_time_limit_reaches_the_ranks_of_a_launcher():
    job = {"SLURM_JOB_ID": "7"}
    with Program("steps", "polite", "--nproc-per-node", "2", environment=job) as program:
        pids = program.pids(2)
        for pid in (program.process.pid, *pids):  # to every process of a step
            os.kill(pid, signal.SIGUSR2)
        assert program.code(BOUND) == 128 + signal.SIGUSR2, program.text()
        assert sorted(program.output[-2:]) == ["rank 0 saved\n", "rank 1 saved\n"]
        assert "got SIGUSR2, all ranks have ended" in program.said()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_ctrl_c_in_the_terminal_reaches_every_rank_once(method):
    start = {VARIABLE: method}
    with Program("steps", "polite", "--nproc-per-node", "2", environment=start) as program:
        program.pids(2)
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.code(BOUND) == 130, program.text()
        assert sorted(program.output[-2:]) == ["rank 0 saved\n", "rank 1 saved\n"]


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_training_stops_when_one_rank_gets_a_signal(signum, code):
    with Program("steps", "polite", "--nproc-per-node", "2") as program:
        os.kill(program.pids(2)[1], signum)
        assert program.code(BOUND) == code, program.text()
        assert sorted(program.output[-2:]) == ["rank 0 saved\n", "rank 1 saved\n"]
        assert f"rank 1 got {signum.name}" in program.said()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_a_worker_that_never_asks_is_interrupted(signum, code, method):
    start = {VARIABLE: method}
    with Program("steps", "none", "--nproc-per-node", "2", environment=start) as program:
        program.pids(2)
        program.process.send_signal(signum)
        assert program.code(BOUND) == code, program.text()
        assert "Traceback" not in program.text()
        assert not program.alive()


def test_one_rank_that_never_asks_gets_a_signal():
    with Program("steps", "none", "--nproc-per-node", "2") as program:
        os.kill(program.pids(2)[1], signal.SIGTERM)
        assert program.code(BOUND) == 143, program.text()
        assert program.said() == "torchbearer_ddp: rank 1 got SIGTERM, all ranks have ended\n"


def test_the_grace_is_bounded():
    with Program("steps", "stubborn", "--nproc-per-node", "2", "--grace", "1") as program:
        program.pids(2)
        program.process.terminate()
        assert program.code(1 + BOUND) == 143, program.text()
        assert not program.alive()
        waits = "torchbearer_ddp: SIGTERM: ranks 0, 1 may still stop and save, for 1 s (--grace)"
        assert waits in program.said()
        assert "all ranks have ended; ranks 0, 1 had not stopped after 1 s" in program.said()


def test_the_grace_is_bounded_for_a_frozen_rank():
    with Program("steps", "polite", "--nproc-per-node", "2", "--grace", "1") as program:
        os.kill(program.pids(2)[1], signal.SIGSTOP)
        program.process.terminate()
        assert program.code(1 + BOUND) == 143, program.text()
        assert not program.alive()


def test_a_signal_while_the_ranks_start():
    with Program("steps", "none", "--nproc-per-node", "2") as program:
        until(lambda: len(program.alive()) == 3, 60)
        program.process.send_signal(signal.SIGINT)
        assert program.code(BOUND) == 130, program.text()
        assert "Traceback" not in program.text()


def test_the_grace_is_bounded_without_a_launcher():
    port = str(free_port())
    flags = ("stubborn", "--world-size", "2", "--host", "127.0.0.1", "--port", port)
    with (
        Program("steps", *flags, "--grace", "1", "--rank", "1") as one,
        Program("steps", *flags, "--grace", "1", "--rank", "0") as zero,
    ):
        until(lambda: zero.output and one.output, 60)
        one.process.terminate()
        assert one.code(1 + BOUND) == 143, one.text()
        # It looks for the cause, and then holds the store for others: 3.5 s already.
        assert zero.code(8) == 1, zero.text()


def test_training_stops_without_a_launcher():
    port = str(free_port())
    flags = ("polite", "--world-size", "2", "--host", "127.0.0.1", "--port", port, "--rank")
    with (
        Program("steps", *flags, "1") as one,
        Program("steps", *flags, "0") as zero,
    ):
        until(lambda: zero.output and one.output, 60)
        one.process.terminate()
        assert one.code(BOUND) == 143, one.text()
        assert zero.code(BOUND) == 0, zero.text()  # agreed on the stop, but was not told why
        assert one.output[-1] == "rank 1 saved\n"


AGAIN = """
import atexit, signal, sys, time
from torchbearer_ddp.group import stop_request
from torchbearer_ddp.launch import signals

atexit.register(print, "left")
with signals.handled(30.0, signal.SIGUSR2):
    stop_request.requested()
    signal.raise_signal(signal.SIGUSR2)
    stop_request.current().at -= 2 * stop_request.ECHO_SECONDS
    signal.raise_signal(signal.Signals[sys.argv[1]])
print("stayed")
"""


@pytest.mark.parametrize(
    ("name", "code", "output"),
    [("SIGTERM", 0, ["stayed\n", "left\n"]), ("SIGINT", 130, ["left\n"])],
)
def test_after_the_signal_of_slurm_a_sigterm_leaves_the_time_and_ctrl_c_ends_it(name, code, output):
    with Program(sys.executable, "-c", AGAIN, name, raw=True) as program:
        assert program.code() == code, program.text()
        assert program.output == output


def test_training_stops_under_torchrun():
    program = python_words("steps", "polite")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program)
    with Program(sys.executable, *command, raw=True) as program:
        program.pids(2)
        program.process.terminate()
        assert program.code(2 * BOUND) == 1, program.text()  # torchrun's own, for any signal
        saved = [line for line in program.output if "saved" in line]
        assert sorted(saved) == ["rank 0 saved\n", "rank 1 saved\n"], program.text()


def test_one_process_is_interrupted_as_any_other():
    with Program("steps", "none", "--on", "5") as program:
        program.pids(1)
        program.process.send_signal(signal.SIGINT)
        assert program.code(BOUND) == -signal.SIGINT
        assert "KeyboardInterrupt" in program.text()


STALE = """
import os, signal, threading
from tests.programs import train_with_events
from torchbearer_ddp import run_distributed
from torchbearer_ddp.group import stop_request

def stopped():
    stop_request.requested()
    os.kill(os.getpid(), signal.SIGTERM)

try:
    run_distributed(stopped)
except SystemExit as end:
    print(end.code)
print(train_with_events([], 5)[0])
thread = threading.Thread(target=lambda: print(run_distributed(lambda: 7)))
thread.start()
thread.join()
"""


def test_a_stop_request_ends_with_its_run():
    with Program(sys.executable, "-c", STALE, raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["143\n", "5\n", "[7]\n"]


CAUGHT = """
import os, signal, time
from tests.programs import train_with_events
from torchbearer_ddp import run_distributed

def work():
    try:
        train_with_events([{"rank": 0, "step": 2, "do": "raise"}], 5)
    except ValueError:
        print("caught", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
    print("slept", flush=True)

run_distributed(work)
"""


def test_after_a_caught_error_a_signal_interrupts_again():
    with Program(sys.executable, "-c", CAUGHT, "--nproc-per-node", "1", raw=True) as program:
        assert program.code() == 130, program.text()
        assert program.output == ["caught\n"]


FAILING = """
import os, signal, sys, time
from torchbearer_ddp import barrier, rank, run_distributed

class Bad(ValueError):
    def __str__(self):  # asked for while the failure is being reported
        os.kill(os.getpid(), signal.SIGTERM)
        return "a bad sample"

def work():
    barrier()
    if rank() == 1:
        raise Bad
    barrier()

try:
    run_distributed(work)
except ValueError:
    if "catch" not in sys.argv:
        raise
    print("caught", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("catch", "code"), [((), 1), (("catch",), -signal.SIGTERM)])
def test_a_rank_that_has_failed_says_so_before_a_signal_ends_it(catch, code):
    place = ("--world-size", "2", "--host", "127.0.0.1", "--port", str(free_port()), "--rank")
    with (
        Program(sys.executable, "-c", FAILING, *place, "0", *catch, raw=True) as zero,
        Program(sys.executable, "-c", FAILING, *place, "1", *catch, raw=True) as one,
    ):
        # A script that has caught the error is ended by the signal a little later.
        assert one.code() == code, one.text()
        assert one.output == ["caught\n"] * len(catch)
        assert zero.code() == 1, zero.text()
        assert "Bad: a bad sample" in zero.said(), zero.text()
        if not catch:
            assert "Bad: a bad sample" in one.said(), one.text()
