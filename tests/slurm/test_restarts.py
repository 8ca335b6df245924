"""Jobs that are stopped and started again end with the parameters of one that was not."""

from __future__ import annotations

import json
import re

import pytest

from tests.programs import stop_early_and_hold, train_and_hold, wait_for_signal
from tests.slurm.conftest import LoggedLines, wait_until
from torchbearer_ddp import WorkerError, submit_slurm

pytestmark = pytest.mark.concurrent(6)


def submit(folder, places, *, every_steps=None, **parameters):
    """Submits the training on two nodes with two ranks each."""
    return submit_slurm(
        train_and_hold,
        args=(str(folder / "checkpoints"), places, every_steps),
        nodes=2,
        tasks_per_node=2,
        folder=folder / "jobs",
        seed=7,
        **{"timeout_min": 60, **parameters},
    )


def wait_until_held(folder, place=0, ranks=4):
    """Waits until every rank has come to that place."""
    marks = [folder / f"holds-{place}-{rank}" for rank in range(ranks)]
    wait_until(lambda: all(mark.exists() for mark in marks))


def logs(folder):
    """What the ranks of a job have logged."""
    return "".join(path.read_text() for path in (folder / "jobs").glob("*_log.err"))


def assert_same(results, reference, restarts):
    assert [result["restarts"] for result in results] == [restarts] * 4
    assert all(result["epochs"] == 3 for result in results)
    assert all(result["parameters"] == reference for result in results)


@pytest.mark.timeout(360)  # a busy machine takes several starts until one trains before the signal
def test_time_limit(cluster, uninterrupted, tmp_path):
    # Slurm looks at the limits every 30 seconds and sends the signal up to 30 seconds too early:
    # 5 to 35 seconds after a start. On a slow machine that may be before the training.
    job = submit(tmp_path, [4], timeout_min=1, slurm_signal_delay_s=25)
    results = job.results()
    assert_same(results, uninterrupted.result(), results[0]["restarts"])
    assert results[0]["restarts"] > 0


def test_requeue_without_a_signal_and_a_crashed_node(cluster, uninterrupted, tmp_path):
    job = submit(tmp_path, [6, 5], every_steps=2, partition="fragile")
    wait_until_held(tmp_path, 0)
    cluster.command("scontrol", "requeue", job.job_id)
    wait_until_held(tmp_path, 1)
    nodes = cluster.command("sinfo", "-h", "-p", "fragile", "-o", "%N")
    cluster.crash(cluster.command("scontrol", "show", "hostnames", nodes).split()[1])
    cluster.start()
    assert_same(job.results(), uninterrupted.result(), 2)


def test_a_run_that_was_stopped_early_trains_no_further_after_a_requeue(cluster, tmp_path):
    job = submit_slurm(
        stop_early_and_hold,
        args=(str(tmp_path / "checkpoints"),),
        tasks_per_node=2,
        folder=tmp_path / "jobs",
        partition="fragile",
    )
    wait_until_held(tmp_path, ranks=2)
    before = [json.loads((tmp_path / f"holds-0-{rank}").read_text()) for rank in range(2)]
    assert [each["epochs"] for each in before] == [2, 2]
    cluster.command("scontrol", "requeue", job.job_id)
    assert job.results() == [{**each, "restarts": 1} for each in before]


def test_preemption_by_a_job_of_a_higher_partition(cluster, uninterrupted, tmp_path):
    job = submit(tmp_path, [7], exclusive=True, partition="preemptable")
    wait_until_held(tmp_path)
    urgent = cluster.command(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null",
        "--wrap", "srun true",
    )  # fmt: skip
    with LoggedLines() as shown:
        assert_same(job.follow(), uninterrupted.result(), 1)
    assert cluster.state_of(urgent) == "COMPLETED"
    mine = "\n".join(line for line in shown if job.job_id in line)
    assert re.search(r"is requeued, pending .*, restart 1$", mine, re.DOTALL | re.MULTILINE)
    assert "SIGUSR2, all ranks stop" in logs(tmp_path)
    assert "is requeued (1 of at most 10)" in logs(tmp_path)
    assert "restart 1 of at most 10" in logs(tmp_path)
    assert "no Checkpoint was in use" not in logs(tmp_path)
    assert (tmp_path / "checkpoints" / "step-0000008.pt").exists()


def test_before_the_first_checkpoint_the_job_starts_from_the_beginning(cluster, tmp_path):
    job = submit_slurm(
        wait_for_signal, args=(str(tmp_path),), tasks_per_node=2, folder=tmp_path / "jobs"
    )
    wait_until_held(tmp_path, ranks=2)
    cluster.command("scancel", "--signal=USR2", job.job_id)
    assert job.results() == [1, 1]
    warning = rf"no Checkpoint was in use.* job {job.job_id} starts"
    assert len(re.findall(warning, logs(tmp_path))) == 1


def test_no_more_than_max_requeues(cluster, tmp_path):
    job = submit_slurm(
        wait_for_signal, args=(str(tmp_path),), folder=tmp_path / "jobs", max_requeues=0
    )
    wait_until_held(tmp_path, ranks=1)
    cluster.command("scancel", "--signal=USR2", job.job_id)
    with pytest.raises(WorkerError, match="max_requeues is 0"):
        job.results()


def test_a_cancelled_job_saves_and_is_not_requeued(cluster, tmp_path):
    job = submit(tmp_path, [3])
    wait_until_held(tmp_path)
    job.cancel()
    with pytest.raises(WorkerError, match="CANCELLED"):
        job.results()
    assert cluster.state_of(job.job_id) == "CANCELLED"
    assert (tmp_path / "checkpoints" / "step-0000004.pt").exists()
