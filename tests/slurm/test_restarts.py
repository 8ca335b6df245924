"""Jobs that are stopped and started again end with the parameters of one that was not."""

from __future__ import annotations

import re

import pytest

from tests.slurm import training
from torchbearer_ddp.errors import WorkerError
from torchbearer_ddp.launch.submission import submit_slurm

_RANKS = range(4)


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits the training on two nodes with two ranks each."""

    def submit(places, *, every_steps=None, **parameters):
        return submit_slurm(
            training.train,
            args=(str(tmp_path / "checkpoints"), places, every_steps),
            nodes=2,
            tasks_per_node=2,
            folder=tmp_path / "jobs",
            seed=7,
            **{"timeout_min": 60, **parameters},
        )

    return submit


@pytest.fixture
def wait_until_held(tmp_path, wait_until):
    """Waits until every rank has come to that place."""

    def wait(place=0, ranks=_RANKS):
        wait_until(lambda: all((tmp_path / f"holds-{place}-{r}").exists() for r in ranks))

    return wait


def _logs(folder):
    return "".join(path.read_text() for path in (folder / "jobs").glob("*_log.err"))


def _assert_same(results, reference, restarts):
    assert [result["restarts"] for result in results] == [restarts] * 4
    assert all(result["epochs"] == 3 for result in results)
    assert all(result["parameters"] == reference for result in results)


def test_preemption_by_a_job_of_a_higher_partition(
    cluster, submit, wait_until_held, uninterrupted, tmp_path, caplog
):
    job = submit([7], exclusive=True)
    wait_until_held()
    urgent = cluster.command(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null",
        "--wrap", "srun true",
    )  # fmt: skip
    with caplog.at_level("INFO", logger="torchbearer_ddp"):
        _assert_same(job.follow(), uninterrupted, 1)
    assert cluster.state_of(urgent) == "COMPLETED"
    assert re.search(r"is requeued, pending .*, restart 1\n", caplog.text, re.DOTALL)
    logs = _logs(tmp_path)
    assert "SIGUSR2, all ranks stop" in logs
    assert "is requeued (1 of at most 10)" in logs
    assert "restart 1 of at most 10" in logs
    assert (tmp_path / "checkpoints" / "step-0000008.pt").exists()


def test_time_limit(submit, uninterrupted):
    # Slurm looks at the limits every 30 seconds and sends the signal up to 30 seconds too early:
    # 20 to 50 seconds after a start. On a slow machine that may be before the training.
    job = submit([4], timeout_min=1, slurm_signal_delay_s=10)
    results = job.results()
    _assert_same(results, uninterrupted, results[0]["restarts"])
    assert results[0]["restarts"] > 0


def test_requeue_without_a_signal_and_a_crashed_node(
    cluster, submit, wait_until_held, uninterrupted
):
    job = submit([6, 5], every_steps=2)
    wait_until_held(0)
    cluster.command("scontrol", "requeue", job.job_id)
    wait_until_held(1)
    node = cluster.command("scontrol", "show", "hostnames", "node[1-2]").split()[1]
    cluster.crash(node)
    cluster.start()
    _assert_same(job.results(), uninterrupted, 2)


def test_before_the_first_checkpoint_the_job_starts_from_the_beginning(
    cluster, tmp_path, wait_until_held
):
    job = submit_slurm(
        training.wait_for_signal,
        args=(str(tmp_path),),
        tasks_per_node=2,
        folder=tmp_path / "jobs",
    )
    wait_until_held(0, range(2))
    cluster.command("scancel", "--signal=USR2", job.job_id)
    assert job.results() == [1, 1]
    warning = f"no Checkpoint was in use when SIGUSR2 came. Without one, job {job.job_id} starts"
    assert _logs(tmp_path).count(warning) == 1


def test_no_more_than_max_requeues(cluster, tmp_path, wait_until_held):
    job = submit_slurm(
        training.wait_for_signal,
        args=(str(tmp_path),),
        folder=tmp_path / "jobs",
        max_requeues=0,
    )
    wait_until_held(0, range(1))
    cluster.command("scancel", "--signal=USR2", job.job_id)
    with pytest.raises(WorkerError, match="max_requeues is 0"):
        job.results()


def test_a_cancelled_job_saves_and_is_not_requeued(cluster, submit, wait_until_held, tmp_path):
    job = submit([3])
    wait_until_held()
    job.cancel()
    with pytest.raises(WorkerError, match="CANCELLED"):
        job.results()
    assert cluster.state_of(job.job_id) == "CANCELLED"
    assert (tmp_path / "checkpoints" / "step-0000004.pt").exists()
