"""What a submission can be told without a cluster."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import torchbearer_ddp
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import collectives
from torchbearer_ddp.launch.run import run_distributed
from torchbearer_ddp.launch.submission import submit_slurm
from torchbearer_ddp.slurm import submit
from torchbearer_ddp.slurm.job import SlurmJob, _describe, slurm_command


def _worker() -> int:
    return collectives.rank()


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A PATH on which sbatch and srun are found, and refuse."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun"):
        program = programs / name
        program.write_text("#!/bin/sh\necho 'sbatch: error: no room' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def test_without_sbatch_there_is_one_clear_error_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"No sbatch on the PATH.*login node"):
        submit_slurm(_worker, folder=tmp_path / "jobs")
    assert not (tmp_path / "jobs").exists()


def test_a_refusal_leaves_nothing_behind_but_keeps_what_was_there(sbatch, tmp_path):
    kept = tmp_path / "jobs"
    kept.mkdir(0o700)
    (kept / "older.pkl").touch()
    for folder in (kept, tmp_path / "a" / "b"):
        with pytest.raises(LaunchError, match=r"sbatch rejected the job: no room\. See"):
            submit_slurm(_worker, folder=folder)
    assert [path.name for path in kept.iterdir()] == ["older.pkl"]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_a_folder_that_others_can_write_is_refused(sbatch, tmp_path, mode):
    folder = tmp_path / "jobs"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(LaunchError, match=rf"written by others \(mode {mode:04o}\).*chmod 700"):
        submit_slurm(_worker, folder=folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(sbatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be written \(Not a directory"):
        submit_slurm(_worker, folder=tmp_path / "file" / "jobs")


def test_a_folder_that_cannot_be_written_is_refused(sbatch):
    with pytest.raises(LaunchError, match=r"The submission folder /proc/self cannot be written"):
        submit_slurm(_worker, folder="/proc/self")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"nodes": 0}, "nodes is 0; it must be a whole number from 1"),
        ({"tasks_per_node": "2"}, "tasks_per_node is '2'"),
        ({"max_requeues": -1}, "max_requeues is -1"),
        ({"slurm_additional_parameters": {"array": "0-3"}}, "array is '0-3' but"),
    ],
)
def test_arguments_that_make_no_sense(sbatch, tmp_path, parameters, message):
    with pytest.raises(ValueError, match=message):
        submit_slurm(_worker, folder=tmp_path / "jobs", **parameters)
    assert not (tmp_path / "jobs").exists()


def test_a_worker_that_cannot_be_sent(sbatch, tmp_path):
    with pytest.raises(
        LaunchError, match="_worker or its arguments cannot be sent to other processes"
    ):
        submit_slurm(_worker, args=(threading.Lock(),), folder=tmp_path / "jobs")


def _submission(capsys, **slurm):
    with pytest.raises(SystemExit) as ended:
        run_distributed(_worker, launcher="slurm", slurm={"dry_run": True, **slurm})
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_what_is_sent(sbatch, capsys, tmp_path):
    lines = _submission(capsys, folder=str(tmp_path / "jobs"), nodes=2, ntasks_per_node=4, time=60)
    for flag in ("nodes=2", "ntasks-per-node=4", "time=60", "requeue", "signal=USR2@90"):
        assert f"#SBATCH --{flag}" in lines
    assert "--kill-on-bad-exit=1" in lines[-1] or "--kill-on-bad-exit=1" in lines[-2]
    assert not any("gpu" in line or "cpus" in line for line in lines)
    assert not (tmp_path / "jobs").exists()
    # The tasks start a file by its path, so that nothing is imported before its first line.
    start = Path(torchbearer_ddp.__file__).parent / "slurm" / "start.py"
    assert start.is_file()
    assert f"{sys.executable} -u {start} " in "\n".join(lines)


def test_what_the_user_asks_for_goes_before_what_we_would(sbatch, capsys):
    text = "\n".join(
        _submission(
            capsys,
            cpus_per_task=3,
            gpus_per_node=0,
            mem_gb=1.5,
            srun_args=["--kill-on-bad-exit=0"],
            slurm_additional_parameters={"no-requeue": True},
            reservation="ours",
            slurm_signal_delay_s=30,
        )
    )
    for part in ("--mem=1536MB", "--no-requeue", "--reservation=ours", "signal=USR2@30"):
        assert f"#SBATCH {part}" in text or f"#SBATCH --{part}" in text
    assert "--kill-on-bad-exit=1" not in text
    assert "#SBATCH --requeue" not in text
    assert "gpus" not in text
    # srun does not inherit this one from sbatch
    assert text.count("--cpus-per-task=3") == 2


def test_ranks_are_not_placed_by_hand_in_a_submission(sbatch):
    with pytest.raises(ValueError, match=r"nproc_per_node=2 does not go with --launcher slurm"):
        run_distributed(_worker, launcher="slurm", nproc_per_node=2)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"State": "PENDING", "Reason": "Priority"}, "pending (Priority)"),
        (
            {"State": "PENDING", "Reason": "BeginTime", "Restarts": "1"},
            "requeued, pending (BeginTime)",
        ),
        ({"State": "RUNNING", "NodeList": "a[1-2]"}, "running on a[1-2]"),
        ({"State": "RUNNING", "NodeList": "a1", "Restarts": "2"}, "running on a1, restart 2"),
        ({"State": "OUT_OF_MEMORY"}, "out of memory"),
        ({}, ""),
    ],
)
def test_the_state_in_words(info, words):
    assert _describe(info) == words


@pytest.mark.parametrize("state", ["SUSPENDED", "SIGNALING", "CONFIGURING", "A_NEW_ONE", "UNKNOWN"])
def test_a_job_in_a_strange_state_is_not_taken_for_done(state, tmp_path):
    job = SlurmJob(tmp_path, "1")
    job.watcher._info_dict["1"] = {"State": state}
    assert not job.watcher.is_done("1", mode="cache")


def test_a_command_of_slurm_survives_the_end_of_its_step(tmp_path, monkeypatch):
    # As after a requeue: scontrol gets the step's SIGTERM before it has printed its answer.
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\nkill -TERM $$\necho requeued $1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = slurm_command("scontrol", "7")
    assert (done.returncode, done.stdout) == (0, "requeued 7\n")
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


_SHIELDED = """
import os, signal, subprocess, sys, time
from torchbearer_ddp.group import stop_request
from torchbearer_ddp.launch import signals
from torchbearer_ddp.slurm import task

signal.signal(signal.SIGUSR2, stop_request.handle)
task._receive_in_thread(signal.SIGUSR2)
program = 'import time; print("up", flush=True); time.sleep(60)'
child = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE)
child.stdout.readline()
try:
    with signals.handled(30.0, signal.SIGUSR2):
        os.kill(child.pid, signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(60)  # is interrupted
except SystemExit as end:
    print(end.code - 128 == signal.SIGUSR2, stop_request.received() == signal.SIGUSR2, child.poll())
child.kill()
child.wait()
"""


def test_the_signal_stops_the_rank_and_spares_the_processes_it_started():
    done = subprocess.run(
        [sys.executable, "-c", _SHIELDED], capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "True True None\n", done.stderr
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


_HELD_BACK = """
import os, signal, sys
sys.path[:0] = sys.argv[1:]
os.kill(os.getpid(), signal.SIGUSR2)  # while the task is still being imported
from torchbearer_ddp.group import stop_request
from torchbearer_ddp.slurm import task
signal.signal(signal.SIGUSR2, stop_request.handle)
try:
    task._receive_in_thread(signal.SIGUSR2)
    while True:
        pass
except SystemExit:
    print('handled')
"""


def test_a_signal_during_the_first_imports_waits_for_its_handler(tmp_path):
    start = submit._START_FILE.read_text()
    head = start[: start.index("    from submitit")]
    program = tmp_path / "start.py"
    program.write_text(head + _HELD_BACK.replace("\n", "\n    "))
    root = str(Path(torchbearer_ddp.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(program), root], capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "handled\n", done.stderr
