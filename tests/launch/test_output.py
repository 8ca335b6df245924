"""What ranks print: whole lines, log files, prefixes, one bar, and equal warnings once."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.processes import Program, until
from tests.terminal import COLUMNS, TerminalProgram
from torchbearer_ddp.launch import output
from torchbearer_ddp.launch.plan import Plan

pytestmark = pytest.mark.concurrent

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
LINES = 150

PRINTING = """
import os, subprocess, sys, time, warnings
from tqdm import tqdm
from torchbearer_ddp import barrier, rank, run_distributed

def work():
    barrier()
    for number in range(150):
        for piece in ("line ", str(number), " of ", str(rank())):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
    subprocess.run(["echo", f"native {rank()}"], check=True)
    os.write(2, f"native error {rank()}\\n".encode())
    for _ in tqdm(range(400), desc="bar", mininterval=0, miniters=1):
        pass
    barrier()  # alike means: within a few seconds
    warnings.warn("raised alike")
    warnings.warn(f"raised by {rank()}")
    # A process that the rank leaves behind keeps its stdout open.
    subprocess.Popen(["sleep", "100"], start_new_session=True)
    print(f"without an end {rank()}", end="")

if __name__ == "__main__":
    run_distributed(work)
    print("all have ended")
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_whole_lines_one_file_for_each_rank_and_warnings_once(tmp_path):
    command = (sys.executable, script(tmp_path, PRINTING), "--nproc-per-node", "2")
    logs = tmp_path / "logs"
    with Program(*command, "--log-dir", str(logs), raw=True, environment=UNBUFFERED) as program:
        assert program.code() == 0, program.text()
        every = [f"line {n} of {r}\n" for n in range(LINES) for r in range(2)]
        last = [f"{text} {r}\n" for text in ("native", "without an end") for r in range(2)]
        assert sorted(program.output) == sorted([*every, *last, "all have ended\n"])
        assert program.output[-1] == "all have ended\n"
        errors = program.said()
        assert errors.count("UserWarning: raised alike (from all 2 ranks)\n") == 1
        assert errors.count("raised alike") == 2  # and the line of source below
        assert len(re.findall(r"^bar: 100%\|.*400/400 .*$", errors, re.MULTILINE)) == 2
        assert "\r" not in program.text()
        assert sorted(path.name for path in logs.iterdir()) == ["rank-0.log", "rank-1.log"]
        for rank in range(2):
            assert errors.count(f"UserWarning: raised by {rank}\n") == 1
            lines = (logs / f"rank-{rank}.log").read_text().splitlines()
            wanted = [f"line {n} of {rank}" for n in range(LINES)]
            assert [line for line in lines if line.startswith("line ")] == wanted
            for text in ("native", "native error", "without an end"):
                assert f"{text} {rank}" in lines
            assert sum("UserWarning: raised alike" in line for line in lines) == 1
            assert sum(line.startswith("bar: 100%") for line in lines) == 1


def test_tee_shows_whose_line_it_is_without_a_terminal(tmp_path):
    command = (sys.executable, script(tmp_path, PRINTING), "--nproc-per-node", "2", "--tee")
    with Program(*command, raw=True, environment=UNBUFFERED) as program:
        assert program.code() == 0, program.text()
        shown = [line for line in program.output if line != "all have ended\n"]
        assert len(shown) == 2 * (LINES + 2)
        for line in shown:
            assert re.fullmatch(r"\[rank (\d)\] (line \d+ of|native|without an end) \1\n", line)


IN_TERMINAL = """
import logging, os, sys, time
from tqdm import tqdm
from torchbearer_ddp import barrier, rank, run_distributed

def work():
    barrier()
    if rank() == 0:
        size = os.get_terminal_size(2).columns
        print("terminal", sys.stdout.isatty(), sys.stderr.isatty(), size)
        for number in tqdm(range(60), desc="bar", leave=True):
            time.sleep(0.02)
            if number == 30:
                logging.getLogger("torchbearer_ddp").warning("a line of its own")
    else:
        for number in range(12):
            time.sleep(0.1)
            print(f"line {number}", "x" * 40)
    barrier()
    print("end of", rank())

if __name__ == "__main__":
    run_distributed(work)
"""


def test_in_a_terminal_the_bar_of_rank_zero_is_not_broken(tmp_path):
    command = (sys.executable, script(tmp_path, IN_TERMINAL), "--nproc-per-node", "2")
    with TerminalProgram(*command, raw=True) as program:
        assert program.code() == 0, program.text()
        lines = program.screen()
        assert f"[rank 0] terminal True True {COLUMNS}" in lines
        assert "torchbearer_ddp: a line of its own" in lines
        others = [line for line in lines if line.startswith("[rank 1] line")]
        assert others == [f"[rank 1] line {number} {'x' * 40}" for number in range(12)]
        bars = [line for line in lines if "bar:" in line]
        assert len(bars) == 1
        assert re.fullmatch(r"bar: 100%\|.*\| 60/60 \[.*it/s\]", bars[0])
        assert len(bars[0]) <= COLUMNS
        assert program.text().count("bar:") > 10  # it has moved
        assert {"[rank 0] end of 0", "[rank 1] end of 1"} <= set(lines)


DYING = """
import os, sys
from torchbearer_ddp import barrier, rank, run_distributed

def work():
    barrier()
    print("words of", rank(), flush=True)
    barrier()  # when one has died, the others are ended at once
    if rank() == 1:
        print("the last words")
        sys.stdout.write("and half a line")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    barrier()

if __name__ == "__main__":
    run_distributed(work)
"""


def test_quiet_ranks_are_heard_when_they_die(tmp_path):
    command = (sys.executable, script(tmp_path, DYING), "--nproc-per-node", "3", "--quiet-ranks")
    with Program(*command, raw=True) as program:
        assert program.code() == 1, program.text()
        assert program.output == ["words of 0\n"]
        assert "words of 2" not in program.text()
        said = program.said()
        assert "[rank 1] words of 1\n[rank 1] the last words\n" in said
        assert "[rank 1] and half a line\n" in said
        assert "was killed by SIGKILL" in said


CLOSED = """
import sys
from pathlib import Path
from torchbearer_ddp import barrier, rank, run_distributed

def work():
    for number in range(2000):
        print("a line that nobody reads", "x" * 200)
    barrier()
    Path(sys.argv[1], f"done-{rank()}").touch()

if __name__ == "__main__":
    run_distributed(work)
"""


def test_a_closed_stdout_ends_no_training(tmp_path):
    command = f"{sys.executable} {script(tmp_path, CLOSED)} {tmp_path} --nproc-per-node 2"
    shell = ("bash", "-c", f"set -o pipefail; {command} | head -n 1")
    with Program(*shell, raw=True) as program:
        assert program.code() == 0, program.text()
        assert len(program.output) == 1
        assert program.said().count("stdout of this command cannot be written (Broken pipe)") == 1
        assert all((tmp_path / f"done-{rank}").exists() for rank in range(2))


UNREAD = """
import sys
from torchbearer_ddp import run_distributed

def work():
    print("started", file=sys.stderr, flush=True)
    while True:
        print("x" * 1000)

if __name__ == "__main__":
    run_distributed(work)
"""


def test_output_that_nobody_reads_does_not_keep_a_run_from_ending(tmp_path):
    command = (sys.executable, script(tmp_path, UNREAD), "--nproc-per-node", "2")
    reader, writer = os.pipe()
    shell = ("bash", "-c", f'exec "$@" >&{writer}', "bash", *command)
    with Program(*shell, raw=True, pass_fds=(writer,)) as program:
        os.close(writer)
        until(lambda: len(program.errors) == 3 or program.process.poll() is not None, 60)
        program.process.terminate()
        assert program.code() == 143, program.text()
        assert not program.alive()
    os.close(reader)


def test_a_log_folder_that_cannot_be_made_starts_nothing(tmp_path):
    (tmp_path / "file").touch()
    flags = ("10", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "file"))
    with Program("sum.py", *flags) as program:
        assert program.code() == 2
        assert "log folder" in program.said()
        assert "Give --log-dir a folder" in program.said()


def test_other_launchers_say_that_they_ignore_it():
    with Program("sum.py", "10", "--log-dir", "logs", "--max-restarts", "2") as program:
        assert program.code() == 0, program.text()
        assert "--log-dir logs, --max-restarts 2 is for ranks that this" in program.said()


def test_a_log_file_is_a_file_and_not_what_a_link_leads_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    plan = Plan(log_dir=str(tmp_path))
    (tmp_path / "rank-0.log").symlink_to(precious)
    with pytest.raises(ValueError, match=r"The log folder .* cannot be used"):
        output.prepare(plan)
    (tmp_path / "rank-0.log").unlink()
    os.mkfifo(tmp_path / "rank-0.log")
    with pytest.raises(ValueError, match=r"The log folder .* cannot be used"):
        output.prepare(plan)
    assert precious.read_text() == "mine"
