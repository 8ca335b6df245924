"""``python -m torchbearer_ddp run``: a script runs on each rank as python would run it."""

import signal
import sys

import pytest

from tests.processes import SCRIPTS, Program, until

pytestmark = pytest.mark.concurrent

PLAIN = str(SCRIPTS / "plain.py")
RUN = (sys.executable, "-m", "torchbearer_ddp", "run")


def both(*words, ranks=1, flags=()):
    """The same words given to python and to ``run``."""
    many = ("--nproc-per-node", str(ranks)) if ranks > 1 else ()
    return (
        Program(sys.executable, *flags, *words, raw=True),
        Program(*RUN, *many, *flags, *words, raw=True),
    )


def without_our_lines(program):
    return [line for line in program.errors if not line.startswith("torchbearer_ddp: 1 process")]


@pytest.mark.parametrize("words", [("a", "--rate=3"), ("fail",), ("exit",)])
def test_one_process_is_that_of_python(words):
    plain, ours = both(PLAIN, *words)
    with plain, ours:
        assert ours.code() == plain.code()
        assert ours.output == plain.output
        assert without_our_lines(ours) == plain.errors


def test_a_module_on_two_ranks():
    plain, ours = both("tests.launch.scripts.plain", "a", ranks=2, flags=("-m",))
    with plain, ours:
        assert (ours.code(), plain.code()) == (0, 0), ours.text() + plain.text()
        assert ours.output == plain.output * 2


def test_two_ranks_and_a_script_that_launches_itself():
    plain, ours = both(PLAIN, "a", "launch", ranks=2)
    with plain, ours:
        assert (ours.code(), plain.code()) == (0, 0), ours.text() + plain.text()
        lines = [line for line in ours.output if not line.startswith("result")]
        assert lines == plain.output[:6] * 2
        assert sorted(set(ours.output) - set(lines)) == ["result [0]\n", "result [1]\n"]
        assert plain.output[-1] == "result [0, 1, 2, 3]\n"
        assert "run_distributed ignores nproc_per_node=4" in ours.text()


@pytest.mark.parametrize(("word", "code"), [("fail", 1), ("exit", 5)])
def test_the_first_cause_and_its_exit_code(word, code):
    _, ours = both(PLAIN, word, ranks=2)
    with ours:
        assert ours.code() == code, ours.text()
        assert ours.text().count("Traceback") == 1
        cause = {"fail": "raised KeyError: 'age'", "exit": "called sys.exit(5)"}[word]
        assert cause in ours.text()
        assert "torchbearer_ddp/launch" not in ours.text()
        assert not ours.alive()


def test_trials_of_the_script_are_data_parallel():
    two_lines = str(SCRIPTS / "two_lines.py")
    with (
        Program(sys.executable, two_lines, "train", "8", raw=True) as alone,
        Program(*RUN, "--nproc-per-node", "2", two_lines, "train", "4", raw=True) as ours,
    ):
        assert (ours.code(), alone.code()) == (0, 0), ours.text()
        assert ours.output == alone.output * 2


# The kernel may give a signal to any thread; a blocked one never comes to the main thread.
@pytest.mark.parametrize("blocked", ["", "SIGTERM"])
def test_a_signal_to_the_launcher(tmp_path, blocked):
    path = tmp_path / "waits.py"
    path.write_text(
        "import os, signal, time\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{blocked and f'signal.{blocked}'}])\n"
        "os.write(1, b'here\\n')\n"
        "time.sleep(60)\n"
    )
    with Program(*RUN, "--nproc-per-node", "2", str(path), raw=True) as program:
        until(lambda: len(program.output) == 2, 60)
        program.process.send_signal(signal.SIGTERM)
        assert program.code(10) == 143, program.text()
        assert "Traceback" not in program.text()
        assert not program.alive()
