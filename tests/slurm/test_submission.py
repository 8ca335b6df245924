"""Submission to a real cluster: what is sent, what comes back, and what goes wrong."""

from __future__ import annotations

import re
import signal
import stat
import subprocess
import sys

import pytest
import torch

from tests.ranks import run_ranks
from tests.slurm import training
from tests.slurm.conftest import PATIENCE
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.launch.submission import submit_slurm
from torchbearer_ddp.slurm.job import SlurmJob

_SCRIPT = """
import sys, time
from pathlib import Path
from torchbearer_ddp import rank, run_distributed, world_size

def work():
    print(f'rank {rank()} of {world_size()} is at work', flush=True)
    if '--fail' in sys.argv and rank() == 3:
        raise ValueError('no good')
    while '--wait' in sys.argv and not Path('go').exists():
        time.sleep(0.05)
    return rank()

if __name__ == '__main__':
    print('results:', run_distributed(work))
"""


def test_two_nodes_train_to_the_parameters_of_local_ranks(uninterrupted, tmp_path):
    local = run_ranks(training.train, 4, (str(tmp_path / "checkpoints"),), timeout=120, seed=7)
    torch.testing.assert_close(
        torch.tensor(uninterrupted), torch.tensor(local[0]["parameters"]), rtol=0, atol=1e-6
    )


def test_parameters_reach_the_job_and_none_are_sent_for_gpus_unless_asked(cluster, tmp_path):
    names = ("SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")
    folder = tmp_path / "in" / "a folder with spaces"
    with_gpus = submit_slurm(
        training.tell,
        names,
        tasks_per_node=2,
        folder=folder,
        gpus_per_node=2,
        cpus_per_task=2,
        mem_gb=0.2,
        name="mine",
        slurm_partition="urgent",
        comment="known to submitit",
        nice=5,  # known to sbatch alone
        slurm_additional_parameters={"begin": "now"},
    )
    plain = submit_slurm(training.tell, names, tasks_per_node=2, folder=folder)  # both at once
    assert with_gpus.results() == [["mine", "urgent", "2", "2"]] * 2
    assert plain.results() == [["tell", "main", None, None]] * 2
    sent = with_gpus.paths.submission_file.read_text()
    for flag in ("--mem=204MB", "--nice=5", "--begin=now", "--gpus-per-node=2", "--requeue"):
        assert f"#SBATCH {flag}\n" in sent
    assert "gpu" not in plain.paths.submission_file.read_text()
    assert "--time" not in plain.paths.submission_file.read_text()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_dry_run_shows_what_is_sent_and_detaching_prints_the_id(cluster, script, tmp_path):
    flags = ("--launcher", "slurm", "--nodes", "2", "--ntasks-per-node", "2", "--time", "60")
    shown, _ = script(_SCRIPT, *flags, "--dry-run").communicate(timeout=PATIENCE)
    assert cluster.live_jobs() == ""
    assert not (tmp_path / "slurm").exists()
    detached, _ = script(_SCRIPT, *flags, "--detach").communicate(timeout=PATIENCE)
    job_id = detached.strip()
    assert (tmp_path / "slurm" / f"{job_id}_submission.sh").read_text().strip() == shown.strip()
    assert SlurmJob(tmp_path / "slurm", job_id, tasks=range(4)).results() == [0, 1, 2, 3]


def test_a_job_is_followed_while_it_is_pending_and_running_and_survives_ctrl_c(
    cluster, script, tmp_path
):
    text = _SCRIPT.replace("run_distributed(work)", "run_distributed(work, slurm={'hold': True})")
    process = script(text, "--launcher", "slurm", "--wait", merge=True)
    seen = _read_until(process, "is pending (JobHeldUser)")
    job_id = re.search(r"submitted job (\d+)", seen)[1]
    cluster.command("scontrol", "release", job_id)
    # The worker is still waiting: this is its output while it runs.
    for words in ("is running on", "rank 0 of 1 is at work"):  # in either order
        if words not in seen:
            seen += _read_until(process, words)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"scancel {job_id}" in rest
    assert cluster.state_of(job_id) == "RUNNING"
    (tmp_path / "go").touch()
    assert SlurmJob(tmp_path / "slurm", job_id).results() == [0]


def test_a_failing_rank_ends_the_job_and_its_traceback_is_shown(cluster, script):
    process = script(
        _SCRIPT, "--launcher", "slurm", "--nodes", "2", "--ntasks-per-node", "2", "--fail"
    )
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    first = errors[: errors.index("Traceback")].rstrip().splitlines()[-1]
    assert re.search(r"Rank 3 on \S+ ", first)
    assert re.search(r"^torchbearer_ddp: Rank 3 on \S+ raised ValueError: no good$", errors, re.M)
    assert "raise ValueError('no good')" in errors
    assert cluster.live_jobs() == ""


def test_srun_sbatch_arrays_and_salloc_do_what_is_meant(cluster, tmp_path):
    program = tmp_path / "script.py"
    program.write_text(_SCRIPT)
    start = f"{sys.executable} {program}"
    cluster.command(
        "sbatch", "--array=0-1", "--ntasks=2", f"--output={tmp_path}/%a.out",
        "--wait", "--wrap", f"{start}; srun {start}",
    )  # fmt: skip
    for index in range(2):
        lines = (tmp_path / f"{index}.out").read_text().splitlines()
        assert "results: [0]" in lines
        assert "rank 0 of 1 is at work" in lines  # the batch script alone: no step, one process
        assert {"rank 0 of 2 is at work", "rank 1 of 2 is at work"} <= set(lines)
        assert "results: [1]" in lines
    shell = cluster.command("salloc", "-N1", "-n2", sys.executable, str(program))
    assert "rank 0 of 1 is at work" in shell


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"nodes": 3}, "Node count|node configuration|More processors"),
        ({"no_such_option": 1}, "unrecognized option"),
        ({"gpus_per_node": 99}, "not available"),
    ],
)
def test_what_slurm_refuses_is_one_clear_error_without_leftovers(
    cluster, tmp_path, parameters, reason
):
    with pytest.raises(LaunchError, match=f"(?i)sbatch rejected the job: .*({reason})"):
        submit_slurm(training.tell, folder=tmp_path / "new" / "jobs", **parameters)
    assert not (tmp_path / "new").exists()
    assert cluster.live_jobs() == ""


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"no {text!r} in {seen}")
