"""Submission to a real cluster: what is sent, what comes back, and what goes wrong."""

from __future__ import annotations

import atexit
import contextlib
import re
import signal
import stat
import subprocess
import sys
from unittest import mock

import pytest
import torch

from tests.programs import PATIENCE, read_variables, train_and_hold
from tests.ranks import run_ranks
from tests.stand_ins import cuda
from torchbearer_ddp import LaunchError, submit_slurm
from torchbearer_ddp.slurm.job import SlurmJob

pytestmark = pytest.mark.concurrent(4)

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


@contextlib.contextmanager
def script(folder, text, *flags, merge=False):
    """A Python script of this text that runs in a folder of its own."""
    path = folder / "script.py"
    path.write_text(text)
    process = subprocess.Popen(
        [sys.executable, str(path), *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge else subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def output_of(folder, *flags):
    """What the script prints when it is run to its end."""
    with script(folder, _SCRIPT, *flags) as process:
        return process.communicate(timeout=PATIENCE)[0]


def test_two_nodes_train_to_the_parameters_of_local_ranks(uninterrupted, tmp_path):
    local = run_ranks(train_and_hold, 4, (str(tmp_path / "checkpoints"),), timeout=120, seed=7)
    torch.testing.assert_close(
        torch.tensor(uninterrupted.result()),
        torch.tensor(local[0]["parameters"]),
        rtol=0,
        atol=1e-6,
    )


def result_of_a_gpu():
    """What a rank on a GPU returns; the GPU is there until the process has ended."""
    gpu = contextlib.ExitStack()
    gpu.enter_context(cuda.pretended())
    gpu.enter_context(mock.patch.object(torch.accelerator, "is_available", return_value=True))
    atexit.register(gpu.close)
    return {"loss": cuda.CudaTensor(torch.tensor(2.5)), "name": "net"}


def test_results_of_gpus_come_back_on_the_cpu(cluster, tmp_path):
    """A login node has no GPU, and could not unpickle them."""
    job = submit_slurm(result_of_a_gpu, folder=tmp_path / "jobs", timeout_min=60)
    (result,) = job.results()
    assert type(result["loss"]) is torch.Tensor
    assert result == {"loss": torch.tensor(2.5), "name": "net"}


def test_parameters_reach_the_job_and_none_are_sent_for_gpus_unless_asked(cluster, tmp_path):
    names = ("SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")
    folder = tmp_path / "in" / "a folder with spaces"
    with_gpus = submit_slurm(
        read_variables,
        names,
        tasks_per_node=2,
        folder=folder,
        gpus_per_node=2,
        cpus_per_task=2,
        mem_gb=0.2,
        name="mine",
        slurm_partition="other",
        comment="known to submitit",
        nice=5,  # known to sbatch alone
        slurm_additional_parameters={"begin": "now"},
    )
    plain = submit_slurm(read_variables, names, tasks_per_node=2, folder=folder)  # both at once
    assert with_gpus.results() == [["mine", "other", "2", "2"]] * 2
    assert plain.results() == [["read_variables", "main", None, None]] * 2
    sent = with_gpus.paths.submission_file.read_text()
    for flag in ("--mem=204MB", "--nice=5", "--begin=now", "--gpus-per-node=2", "--requeue"):
        assert f"#SBATCH {flag}\n" in sent
    assert "gpu" not in plain.paths.submission_file.read_text()
    assert "--time" not in plain.paths.submission_file.read_text()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_dry_run_shows_what_is_sent_and_detaching_prints_the_id(cluster, tmp_path):
    flags = ("--launcher", "slurm", "--nodes", "2", "--ntasks-per-node", "2", "--time", "60")
    shown = output_of(tmp_path, *flags, "--dry-run")
    assert not cluster.live_jobs(str(tmp_path))
    assert not (tmp_path / "slurm").exists()
    job_id = output_of(tmp_path, *flags, "--detach").strip()
    assert (tmp_path / "slurm" / f"{job_id}_submission.sh").read_text().strip() == shown.strip()
    assert SlurmJob(tmp_path / "slurm", job_id, tasks=range(4)).results() == [0, 1, 2, 3]


def test_a_job_is_followed_while_it_is_pending_and_running_and_survives_ctrl_c(cluster, tmp_path):
    text = _SCRIPT.replace("run_distributed(work)", "run_distributed(work, slurm={'hold': True})")
    with script(tmp_path, text, "--launcher", "slurm", "--wait", merge=True) as process:
        seen = _read_until(process, "is pending (JobHeldUser)")
        job_id = re.search(r"submitted job (\d+)", seen)[1]
        cluster.command("scontrol", "release", job_id)
        # The worker is still waiting: this is its output while it runs.
        for line in ("is running on", "rank 0 of 1 is at work"):  # in either order
            if line not in seen:
                seen += _read_until(process, line)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"scancel {job_id}" in rest
    assert cluster.state_of(job_id) == "RUNNING"
    (tmp_path / "go").touch()
    assert SlurmJob(tmp_path / "slurm", job_id).results() == [0]


def test_a_failing_rank_ends_the_job_and_its_traceback_is_shown(cluster, tmp_path):
    flags = ("--launcher", "slurm", "--nodes", "2", "--ntasks-per-node", "2", "--fail")
    with script(tmp_path, _SCRIPT, *flags) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    first = errors[: errors.index("Traceback")].rstrip().splitlines()[-1]
    assert re.search(r"Rank 3 on \S+ ", first)
    assert re.search(r"^torchbearer_ddp: Rank 3 on \S+ raised ValueError: no good$", errors, re.M)
    assert "raise ValueError('no good')" in errors
    assert not cluster.live_jobs(str(tmp_path))


def test_each_task_of_srun_is_a_rank_also_in_an_array(cluster, tmp_path):
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


def test_a_shell_of_salloc_is_one_process(cluster, tmp_path):
    program = tmp_path / "script.py"
    program.write_text(_SCRIPT)
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
        submit_slurm(
            read_variables, folder=tmp_path / "new" / "jobs", name=tmp_path.name, **parameters
        )
    assert not (tmp_path / "new").exists()
    assert not cluster.live_jobs(tmp_path.name)


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"no {text!r} in {seen}")
