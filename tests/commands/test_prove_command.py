"""``python -m torchbearer_ddp prove`` as a user calls it: exit codes and reports."""

import json
import signal
import sys

import pytest

from tests import proc
from tests.commands.prove_scripts import CORRECT, FAULTS, script
from tests.processes import Program, until
from torchbearer_ddp.__main__ import main
from torchbearer_ddp.commands import prove as command
from torchbearer_ddp.commands.proving.job import Job
from torchbearer_ddp.commands.proving.runs import started
from torchbearer_ddp.group.bounded import in_background

COMMAND = (sys.executable, "-m", "torchbearer_ddp", "prove", "--nproc-per-node", "2")
AFTER = ("--nproc-per-node", "2", "--steps=3", "--sample-streams", "--epochs", "3", "--steps", "9")


def prove(folder, *words):
    with Program(*COMMAND, *words, raw=True, folder=folder) as program:
        return program.code(120), "".join(program.output), "".join(program.errors)


@pytest.mark.concurrent
def test_an_equal_script(tmp_path):
    source = script(run="import sys\nassert sys.argv[1:] == ['--epochs', '3']\ntrial.run(3)")
    (tmp_path / "training.py").write_text(source)
    code, output, errors = prove(tmp_path, "--steps", "6", "-m", "training", "--epochs", "3")
    assert code == 0, errors
    assert output.startswith("training: 2 ranks are equal to one process over 6 steps\n")
    assert "running 6 steps on 2 ranks" in errors
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["training.py"]


@pytest.mark.concurrent
def test_a_script_that_differs(tmp_path):
    (tmp_path / "script.py").write_text(FAULTS["both"][0])
    words = ("--steps", "4", "--html", "proof.html", "--json=proof.json", "script.py")
    code, output, errors = prove(tmp_path, *words)
    assert code == 1, errors
    assert "script.py: 2 ranks differ from one process\n" in output
    assert "first tensor: step 0, the gradient of " in output
    assert "  - BatchNorm statistics per rank: " in output
    assert "  - dropout's random numbers (layer 2): " in output
    found = json.loads((tmp_path / "proof.json").read_text())
    assert [each["kind"] for each in found["reasons"]] == ["batch_norm", "dropout"]
    assert "<svg" in (tmp_path / "proof.html").read_text()


@pytest.mark.concurrent
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise ValueError('no such data')", "ValueError: no such data"),
        ("print('done')", "ended without a training step of a Trial with callbacks"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_script_that_cannot_be_compared(tmp_path, source, text):
    (tmp_path / "script.py").write_text(source)
    code, output, errors = prove(tmp_path, "script.py")
    assert code == 3
    assert output == ""
    assert text in errors


WAITING = """
import os, signal, sys, time
from pathlib import Path
from torchbearer_ddp import run_distributed, world_size

def work():
    if world_size() == int(sys.argv[1]):
        Path(f"begun-{os.getpid()}").touch()
        # As in native code: nothing but SIGKILL ends it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        time.sleep(600)

run_distributed(work)
"""


@pytest.mark.concurrent
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_proof_leaves_no_process_behind(signum, code, tmp_path):
    (tmp_path / "script.py").write_text(WAITING)
    (temporary := tmp_path / "temporary").mkdir()
    command = (*COMMAND, "script.py", "2")
    place = {"TMPDIR": str(temporary)}
    with Program(*command, raw=True, folder=tmp_path, environment=place) as program:
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, 60)
        program.process.send_signal(signum)
        assert program.code(30) == code, program.text()
        until(lambda: not program.alive(), 10)
    if signum == signal.SIGTERM:
        assert list(temporary.iterdir()) == []


def test_a_single_run_ends_with_the_proof(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(WAITING)
    job = Job("script.py", False, ("1",), 1, 4, 0)
    with started({"nproc_per_node": 1}, lambda line: None) as runs:
        failing = in_background(lambda: runs.alone(job, "one process"))
        until(lambda: list(tmp_path.glob("begun-*")), 60)
        (begun,) = tmp_path.glob("begun-*")
        runs.close()
        assert failing.exception(30) is not None
    pid = int(begun.name.partition("-")[2])
    until(lambda: not proc.is_running(pid), 10)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["script.py"], "--nproc-per-node N is missing"),
        (["--nproc-per-node", "1", "script.py"], "there is nothing to compare"),
        (["--nproc-per-node", "2"], "no script is named"),
        (["--nproc-per-node", "2", "nowhere.py"], "can't open file 'nowhere.py'"),
        (["--nproc-per-node", "2", "--steps", "0", "script.py"], "at least 1"),
        (["--nproc-per-node", "2", "--html", "nowhere/a.html", "script.py"], "cannot be written"),
        (["--nproc-per-node", "2", "--json", ".", "script.py"], "--json . cannot be written"),
        (["--nproc-per-nod", "2", "script.py"], "error: --nproc-per-nod is unknown; did you mean"),
    ],
)
def test_mistakes_end_before_anything_starts(words, text, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(CORRECT["adam"])
    with pytest.raises(SystemExit, match="2"):
        main(["prove", *words])
    assert text in capsys.readouterr().err


def test_flags_may_follow_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("pass")
    options = command._options(["script.py", *AFTER])
    assert (options.nproc_per_node, options.steps, options.sample_streams) == (2, 3, True)
    assert options.command == ["script.py", "--epochs", "3", "--steps", "9"]
    # Once our flags come before the script, all that follows is the script's.
    options = command._options(["--nproc-per-node", "3", "script.py", *AFTER])
    assert (options.nproc_per_node, options.steps) == (3, 20)
    assert options.command == ["script.py", *AFTER]


def test_an_error_of_its_own_is_no_verdict(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise KeyError("unforeseen")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "prove", fail)
    (tmp_path / "script.py").write_text("pass")
    with pytest.raises(SystemExit, match=str(command.COULD_NOT_RUN)):
        command.main(["--nproc-per-node", "2", "script.py"])
    assert "KeyError: 'unforeseen'" in capsys.readouterr().err
