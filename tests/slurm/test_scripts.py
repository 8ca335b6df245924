"""Whole scripts on a real cluster: submitted by ``run``, and in an interactive shell."""

from __future__ import annotations

import ast
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from tests.processes import SCRIPTS, bound
from tests.programs import PATIENCE

pytestmark = pytest.mark.concurrent(4)

RUN = (sys.executable, "-m", "torchbearer_ddp", "run")
SLURM = ("--launcher", "slurm", "--time", "60", "--folder", "jobs")


def run(folder, *command):
    seconds = bound(PATIENCE)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)


def lines_of(done):
    """What the script printed, without the lines of submitit."""
    return [line for line in done.stdout.splitlines() if not line.startswith("submitit ")]


def test_run_submits_an_unchanged_script(cluster, tmp_path):
    two_lines = str(SCRIPTS / "two_lines.py")
    job = run(tmp_path, *RUN, *SLURM, "--nodes", "2", two_lines, "train", "4")
    assert job.returncode == 0, job.stdout + job.stderr
    alone = run(tmp_path, sys.executable, two_lines, "train", "8")
    (total,) = map(float, lines_of(job))  # that of rank zero
    assert total == pytest.approx(float(alone.stdout), abs=1e-6)
    assert (tmp_path / "jobs").is_dir()


def test_an_exit_code_comes_back(cluster, tmp_path):
    job = run(tmp_path, *RUN, *SLURM, str(SCRIPTS / "plain.py"), "exit")
    assert job.returncode == 5, job.stdout + job.stderr
    assert "called sys.exit(5)" in job.stderr


def test_module_level_and_loaders_with_spawn(cluster, tmp_path):
    script = (str(SCRIPTS / "module_level.py"), "object", "spawn")
    job = run(tmp_path, sys.executable, *script, *SLURM, "--ntasks-per-node", "2")
    assert job.returncode == 0, job.stdout + job.stderr
    first, second = map(ast.literal_eval, lines_of(job))
    assert first == second
    assert (first["dtype"], first["loaded"]) == ("torch.float64", [[0.0, 1.0], [2.0, 3.0]])
    assert (first["pickled"], first["config"]) == (True, (0.5, "object"))


def test_doctor_under_srun(cluster, tmp_path):
    """Two tasks on each of two nodes, in one step: rank zero prints one report."""
    words = (sys.executable, "-m", "torchbearer_ddp", "doctor", "--json", "--folder", "runs")
    done = run(tmp_path, "srun", "--nodes", "2", "--ntasks-per-node", "2", *words)
    report = json.loads(done.stdout)
    assert done.returncode in (0, 1), done.stderr
    assert list(report["ranks"]) == ["0", "1", "2", "3"]
    assert [each["host"] for each in report["ranks"].values()] == ["node1"] * 2 + ["node2"] * 2
    assert report["missing"] == []
    assert report["lost"] == {}
    assert len(report["links"]) == 12
    assert all("round trip" in link for link in report["links"].values())
    assert report["group"]["bytes"] > 0
    assert report["folder"]["durable"] > 0
    assert done.returncode == any(finding["problem"] for finding in report["findings"])


class Terminal:
    """A shell that ``srun --pty`` has opened, and what is typed there."""

    def __init__(self, *words: str) -> None:
        self._pid, self._master = pty.fork()
        if self._pid == 0:
            os.execvp(words[0], words)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, f"{text}\n".encode())

    def shows(self, text: str) -> str:
        """Waits until the terminal shows the text."""
        deadline = time.monotonic() + bound(PATIENCE)
        while text not in self._shown:
            assert time.monotonic() < deadline, self._shown
            if select.select([self._master], [], [], 0.1)[0]:
                self._shown += os.read(self._master, 4096).decode(errors="replace")
        return self._shown

    def close(self) -> None:
        self.type("exit")
        os.waitpid(self._pid, 0)
        os.close(self._master)


def test_an_interactive_shell_is_one_process_and_a_step_in_it_is_not(cluster, tmp_path):
    shell = Terminal("srun", "--pty", "--ntasks", "2", "--nodes", "1", "bash", "--norc", "-i")
    two_lines = f"{sys.executable} {SCRIPTS / 'two_lines.py'} train 4"
    try:
        shell.type(f"{two_lines}; echo alone $?")
        text = shell.shows("alone 0")
        assert "1 process (interactive shell of Slurm job" in text
        assert "'srun --overlap python ...' starts all 2 tasks" in text
        shell.type(f"srun --overlap --ntasks 2 {two_lines}; echo together $?")
        assert "2 ranks on this host (from the Slurm step of job" in shell.shows("together 0")
    finally:
        shell.close()
