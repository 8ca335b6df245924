"""Ranks are forked from the launcher, from a clean process, or started: the same holds for them."""

import json
import os
import sys

import pytest

from tests.forked import run_script
from tests.processes import Program, until
from torchbearer_ddp.launch.starting import VARIABLE

#: How often the script's module level runs, with two ranks.
WAYS = {"fork": 1, "forkserver": 2, "spawn": 3}


def facts_of(method, folder):
    """What a script of two ranks reports that were started in this way, and its output."""
    folder.mkdir()
    reader, writer = os.pipe()
    words = ("starting.py", str(folder), str(os.fstat(writer).st_ino))
    try:
        with Program(*words, environment={VARIABLE: method}, pass_fds=(writer,)) as program:
            assert program.code() == 0, program.text()
            *lines, facts = program.output[:-1]
            lines.append(program.output[-1])
            return json.loads(facts), lines, (folder / "journal").read_text()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ways")
    return {method: facts_of(method, folder / method) for method in WAYS}


@pytest.mark.parametrize("method", WAYS)
def test_a_rank_has_what_the_script_did_and_is_a_process_of_its_own(method, found):
    facts, lines, journal = found[method]
    cores = len(os.sched_getaffinity(0))
    for each in facts:
        assert each["read"] == ["line 1\n", "line 2\n", "line 3\n"]
        assert each["session"]
        assert each["parent"]
        assert each["blocked"] == []
        assert each["ignored"]
        assert each["stdin"] == ""
        assert not each["pipe"]
        assert each["variables"] == [str(max(1, cores // 2)), os.getenv("HOME")]
        assert each["threads"] == max(1, cores // 2)
        assert each["total"] == 2e6
        assert each["dtype"] == "torch.float64"
    assert facts == found["spawn"][0]
    assert lines.count("module level\n") == WAYS[method]
    for name in ("rank 0", "rank 1", "the launcher"):
        assert lines.count(f"exit handler of {name}\n") == 1
    assert lines[-1] == "exit handler of the launcher\n"
    assert journal == "once\n"


OBSTACLES = """
import io, os, socket, sys, threading
import torch
from torchbearer_ddp.group import rendezvous
from torchbearer_ddp.launch import fork_safety
from torchbearer_ddp.launch.fork_safety import obstacle

def assert_none(case=""):
    assert obstacle(own) is None, (case, obstacle(own))

def threads():
    return len(os.listdir("/proc/self/task"))

sys.stdin = sys.__stdin__ = None  # multiprocessing has replaced it
own = [descriptor for descriptor, _, _ in fork_safety.open_descriptors()]
assert_none()
torch.set_num_threads(2)
(torch.ones(1000, 1000) + 1).sum()
assert threads() > 1
assert_none("idle threads of OpenMP")
assert threads() == 1
assert (torch.ones(1000, 1000) + 1).sum() == 2e6 and threads() > 1, "they start again"
with fork_safety.store_begins():
    store = rendezvous.serve_store("127.0.0.1", 0, 5)
assert obstacle(own) == "libraries have threads in it"
del store
assert_none()
with socket.socket() as connection:
    assert obstacle(own).startswith("a connection is open (socket:[")
    connection.set_inheritable(True)
    assert_none("one that was inherited is closed in the ranks")
with open(__file__):
    assert_none("a file is opened again")
fork_safety._ACCELERATORS = ("/dev/null",)
with open("/dev/null"):
    assert obstacle(own) == "/dev/null is open"
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
assert obstacle(own) == "it has several threads"
end.set()
thread.join()
sys.settrace(lambda *words: None)
assert obstacle(own) == "a debugger or a profiler traces it"
sys.settrace(None)
sys.stdout = io.StringIO()
assert obstacle(own) == "sys.stdout was replaced"
sys.stdout = sys.__stdout__
assert_none()
"""


def test_what_makes_a_fork_unsafe(tmp_path):
    path = tmp_path / "obstacles.py"
    path.write_text(OBSTACLES)
    code, output = run_script(path)
    assert code == 0, output


THREADED = """
import os, sys, threading
from torchbearer_ddp import run_distributed

print("module level", flush=True)
end = threading.Event()
if sys.argv[1] == "module":
    threading.Thread(target=end.wait, daemon=True).start()

def work():
    return os.getppid()

if __name__ == "__main__":
    threading.Thread(target=end.wait, daemon=True).start()
    assert run_distributed(work, nproc_per_node=2) == [os.getpid()] * 2
    end.set()
"""


@pytest.mark.parametrize(("place", "times"), [("main", 2), ("module", 4)])
def test_a_launcher_with_threads_is_not_forked(place, times, tmp_path):
    """Nor is the clean process if the script's module level starts one."""
    path = tmp_path / "threaded.py"
    path.write_text(THREADED)
    with Program(sys.executable, str(path), place, raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["module level\n"] * times


TWICE = """
import os, sys
import torch
from torchbearer_ddp import run_distributed

print("module level", flush=True)

def work(number):
    return os.getpid(), torch.distributed.TCPStore("127.0.0.1", 0, is_master=True).port > 0

if __name__ == "__main__":
    assert [each for each in run_distributed(work, (1,), nproc_per_node=2)] != []
    assert all(served for _, served in run_distributed(work, (2,), nproc_per_node=2))
"""


def test_a_launcher_is_forked_again_for_the_next_run(tmp_path):
    """Its store has ended; the ranks can have stores of their own."""
    path = tmp_path / "twice.py"
    path.write_text(TWICE)
    with Program(sys.executable, str(path), raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["module level\n"]


POOL = """
import multiprocessing, os, threading
from torchbearer_ddp import rank, run_distributed

# Its threads keep the launcher, and a clean process that runs this too, from being forked.
pool = multiprocessing.get_context("fork").Pool(1)

if __name__ == "__main__":
    print(run_distributed(rank, nproc_per_node=2))
    pool.terminate()
"""


def test_a_clean_process_that_cannot_be_forked_leaves_nothing_behind(tmp_path):
    path = tmp_path / "pool.py"
    path.write_text(POOL)
    with Program(sys.executable, str(path), raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["[0, 1]\n"]
        until(lambda: not program.alive(), 10)


def test_a_way_that_is_none_is_refused():
    with Program("steps", "none", "--nproc-per-node", "2", environment={VARIABLE: "thread"}) as one:
        assert one.code() == 2, one.text()
        assert f"{VARIABLE} is 'thread'; it can be fork, forkserver, spawn.\n" in one.said()


REFUSED = """
import ctypes, errno, os, sys
from torchbearer_ddp import LaunchError, rank, run_distributed
from torchbearer_ddp.launch import fork_safety

forks = []
fork = os.fork

def refused():
    forks.append(None)
    if len(forks) > 1:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

if __name__ == "__main__":
    if sys.argv[1] == "fork":
        os.fork = refused
    else:
        sys.executable = "/nowhere/python"
    before = [descriptor for descriptor, _, _ in fork_safety.open_descriptors()]
    try:
        run_distributed(rank, nproc_per_node=2)
    except LaunchError as error:
        print(error)
    left = [each for each, _, _ in fork_safety.open_descriptors() if each not in before]
    adopts = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)
    print(left, adopts.value)
"""


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fork", "Rank 1 cannot be started ([Errno 11] Resource temporarily unavailable). "),
        ("forkserver", "The process that the ranks are forked from cannot be started ([Errno 2] "),
        ("spawn", "Rank 0 cannot be started ([Errno 2] "),
    ],
)
def test_a_process_that_the_system_refuses_is_named(method, expected, tmp_path):
    path = tmp_path / "refused.py"
    path.write_text(REFUSED)
    start = {VARIABLE: method}
    with Program(sys.executable, str(path), method, raw=True, environment=start) as program:
        assert program.code() == 0, program.text()
        text, left = program.output
        assert text.startswith(expected)
        assert text.endswith("or start fewer ranks.\n")
        assert left == "[] 0\n"
        assert not program.alive()


FROZEN = """
import os, signal, sys, time
from torchbearer_ddp import LaunchError, rank, run_distributed
from torchbearer_ddp.launch.fork_server import ForkServer

original = ForkServer.start

def frozen(server, index, *words):
    if index:
        os.kill(server._process.pid, signal.SIGSTOP)
        print("frozen", flush=True)
    return original(server, index, *words)

if __name__ == "__main__":
    ForkServer.start = frozen
    try:
        run_distributed(rank, nproc_per_node=2, timeout=float(sys.argv[1]))
    except LaunchError as error:
        print(error)
"""


@pytest.mark.parametrize(("timeout", "code"), [("2", 0), ("600", 143)])
def test_a_frozen_process_to_fork_from_is_not_waited_for(timeout, code, tmp_path):
    path = tmp_path / "frozen.py"
    path.write_text(FROZEN)
    command, start = (sys.executable, str(path), timeout), {VARIABLE: "forkserver"}
    with Program(*command, raw=True, environment=start) as program:
        until(lambda: "frozen\n" in program.output, 60)
        if code:
            program.process.terminate()
        assert program.code(20) == code, program.text()
        if not code:
            assert "did not answer within 2 s (--timeout)" in program.output[-1]
        assert not program.alive()


AGAIN = """
import os, sys
from torchbearer_ddp import run_distributed, rank

print("module level", flush=True)

def work(mark):
    if rank() == 1 and not os.path.exists(mark):
        os.close(os.open(mark, os.O_CREAT))
        raise ValueError("the first time")
    return rank(), os.environ.get("TORCHBEARER_DDP_RESTART_COUNT")

if __name__ == "__main__":
    print(run_distributed(work, sys.argv[1:], nproc_per_node=2, max_restarts=1))
"""


def test_a_restart_forks_again(tmp_path):
    path = tmp_path / "again.py"
    path.write_text(AGAIN)
    with Program(sys.executable, str(path), str(tmp_path / "mark"), raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["module level\n", "[(0, '1'), (1, '1')]\n"]
