"""A started rank ends as Python programs do, though it skips the unloading of its modules."""

import subprocess
import sys

import pytest

from tests.processes import Program, own_environment
from torchbearer_ddp.errors import WorkerError
from torchbearer_ddp.group import failures
from torchbearer_ddp.launch.starting import VARIABLE

pytestmark = pytest.mark.concurrent

#: Prints into a pipe or a file wait in a buffer.
BUFFERED = {"PYTHONUNBUFFERED": ""}
SCRIPT = """
import atexit, concurrent.futures, os, sys, threading, time
from pathlib import Path
from torchbearer_ddp import rank, run_distributed

folder = Path(sys.argv[1])

def write(name):
    (folder / f"{name}-{rank_number}").write_text("written")

def work():
    global rank_number, unclosed
    rank_number = rank()
    atexit.register(write, "handler")
    thread = threading.Thread(target=lambda: (released.wait(), write("thread")))
    thread.start()
    concurrent.futures.ThreadPoolExecutor(1).submit(lambda: (released.wait(), write("pool")))
    threading.Timer(0.3, released.set).start()  # after the worker has returned
    unclosed = open(folder / f"unclosed-{rank_number}", "w")
    unclosed.write("written")
    print("printed", rank_number)  # into a pipe, so buffered
    sys.stderr.write("complained")

released = threading.Event
def start():
    global released
    released = threading.Event()
    return work()

run_distributed(start)
"""


def test_threads_exit_handlers_open_files_and_prints(tmp_path):
    flags = (str(tmp_path), "--nproc-per-node", "2")
    with Program(sys.executable, "-c", SCRIPT, *flags, raw=True, environment=BUFFERED) as program:
        assert program.code() == 0, program.text()
        assert sorted(program.output) == ["printed 0\n", "printed 1\n"]
        assert program.text().count("complained") == 2
        names = ("handler", "pool", "thread", "unclosed")
        expected = sorted(f"{name}-{rank}" for name in names for rank in (0, 1))
        assert sorted(path.name for path in tmp_path.iterdir()) == expected
        assert {path.read_text() for path in tmp_path.iterdir()} == {"written"}


@pytest.mark.parametrize(
    "handler",
    [
        "threading.Thread(target=hang).start()",
        "atexit.register(hang)",
        # A forked process has a copy of every descriptor, that of the report too.
        "os.fork() or hang(); threading.Thread(target=hang).start()",
    ],
)
def test_what_never_ends_is_killed_after_the_grace_time(handler):
    script = f"""
import atexit, os, threading, time
from torchbearer_ddp import rank, run_distributed

def hang():
    time.sleep(600)

def work():
    {handler}
    return rank()

print(run_distributed(work, grace=1.0))
"""
    with Program(sys.executable, "-c", script, "--nproc-per-node", "2", raw=True) as program:
        assert program.code(30) == 0, program.text()
        assert program.output == ["[0, 1]\n"]
        assert not program.alive()


DETACHED = """
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")
from torchbearer_ddp import rank, run_distributed

if __name__ == "__main__":
    print(run_distributed(rank))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_stdout_of_another_encoding_is_no_failure(tmp_path, method):
    path = tmp_path / "detached.py"
    path.write_text(DETACHED)
    command, start = (sys.executable, str(path), "--nproc-per-node", "2"), {VARIABLE: method}
    with Program(*command, raw=True, environment=start) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["[0, 1]\n"]
        assert "Traceback" not in program.text()


WRAPPED = """
import atexit, time
from torchbearer_ddp import barrier, rank, run_distributed

def work():
    try:
        if rank() == 1:
            atexit.register(time.sleep, 1.5)  # the other rank ends before this one
            raise KeyError("a missing column")
        barrier()
    except Exception as error:
        raise RuntimeError("training failed") from error

if __name__ == "__main__":
    run_distributed(work)
"""


def test_an_error_that_follows_from_another_is_not_the_first_cause_if_a_script_wraps_it(tmp_path):
    path = tmp_path / "wrapped.py"
    path.write_text(WRAPPED)
    with Program(sys.executable, str(path), "--nproc-per-node", "2", raw=True) as program:
        assert program.code() == 1, program.text()
        first = next(line for line in program.said().splitlines() if "raised" in line)
        assert "Rank 1 on " in first, program.text()
        assert "KeyError: 'a missing column'" in program.said()


@pytest.mark.parametrize("is_named", [True, False])
def test_an_error_with_that_of_another_rank_behind_it_follows_from_it(is_named):
    lost = WorkerError("Rank 1 raised KeyError")
    lost.secondary = True
    with pytest.raises(RuntimeError) as wrapped:
        try:
            raise lost
        except WorkerError as error:
            if is_named:
                raise RuntimeError from error
            raise RuntimeError  # noqa: B904 - as scripts do it
    assert failures.report_of(wrapped.value, 0)["secondary"]
    assert not failures.report_of(RuntimeError("of its own"), 0)["secondary"]


@pytest.mark.parametrize(
    ("given", "code"), [("np.int64(3)", 3), ("1.0", 1), ("True", 1), ("'text'", 1), ("256", 1)]
)
def test_an_exit_code_of_another_type_does_not_hide_what_has_happened(given, code):
    script = f"""
import sys
import numpy as np
from torchbearer_ddp import WorkerError, run_distributed

try:
    run_distributed(lambda: sys.exit({given}))
except WorkerError as error:
    print(error.exitcode, str(error).splitlines()[0])
"""
    with Program(sys.executable, "-c", script, "--nproc-per-node", "1", raw=True) as program:
        assert program.code() == 0, program.text()
        (found,) = program.output
        assert found.startswith(f"{code} Rank 0 on "), program.text()
        assert "called sys.exit(" in found


def test_a_failing_exit_handler_is_shown_and_does_not_stop_the_others():
    script = """
import atexit
from torchbearer_ddp import rank, run_distributed

def fail():
    raise ValueError("in a handler")

def work():
    atexit.register(print, "the other handler")
    atexit.register(fail)
    return rank()

print(run_distributed(work))
"""
    with Program(sys.executable, "-c", script, "--nproc-per-node", "1", raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["the other handler\n", "[0]\n"]
        assert "ValueError: in a handler" in program.text()


def test_prints_that_cannot_be_written_change_the_exit_code_as_in_python():
    program = "print('lost'); "
    ours = "from torchbearer_ddp.group.failures import exit_normally; exit_normally(0)"
    for end in ("", ours):
        with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
            done = subprocess.run(
                [sys.executable, "-c", program + end],
                env={**own_environment(), **BUFFERED},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        assert done.returncode == 120
        assert "No space left on device" in done.stderr


LAUNCHER = """
import atexit, gc, sys

atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))  # the last to be called

from torchbearer_ddp import run_distributed

if sys.argv[2] == "finalizer":
    class Last:
        # Python may have cleared the names of the module by then.
        def __del__(self, out=sys.stdout):
            out.write("deleted\\n")

    last = Last()

def work():
    return 1

if __name__ == "__main__":
    atexit.register(print, "exit handler")
    gc.disable()  # a collection right here would lose what is in the buffer, as in any script
    file = open(sys.argv[1], "w")
    cycle = [file]
    cycle.append(cycle)
    file.write("written")
    del file, cycle
    print(run_distributed(work, nproc_per_node=2), flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("case", "expected"),
    [("plain", ["frozen: True\n"]), ("finalizer", ["frozen: False\n", "deleted\n"])],
)
def test_the_launcher_itself_ends_as_python_does(case, expected, tmp_path):
    """It does not collect its modules, unless a class of the script's own counts on that."""
    path, found = tmp_path / "launcher.py", tmp_path / "found"
    path.write_text(LAUNCHER)
    with Program(sys.executable, str(path), str(found), case, raw=True, fresh=True) as program:
        assert program.code() == 3, program.text()
        assert program.output == ["[1, 1]\n", "exit handler\n", *expected]
    assert found.read_text() == "written"
