"""Submission to Slurm: ``submit_slurm``, and ``run_distributed`` with ``--launcher slurm``.

submitit is imported only when a job is submitted.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchbearer_ddp.launch.bound_methods import warn_of_copy
from torchbearer_ddp.launch.main_module import check_launch
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.rank import run_slurm_rank
from torchbearer_ddp.launch.settings import checked_count
from torchbearer_ddp.launch.token import new_token
from torchbearer_ddp.launch.worker import Task, pack
from torchbearer_ddp.log import logger

if TYPE_CHECKING:
    from torchbearer_ddp.slurm.job import SlurmJob
    from torchbearer_ddp.slurm.submit import Submission

DEFAULT_FOLDER = "slurm"
DEFAULT_REQUEUES = 10
#: Settings of the ranks, not of the submission.
_LAUNCH_SETTINGS = ("backend", "device", "timeout", "seed", "grace", "debug")


def submit_slurm(
    worker_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    nodes: int = 1,
    tasks_per_node: int = 1,
    folder: str | os.PathLike[str] = DEFAULT_FOLDER,
    max_requeues: int = DEFAULT_REQUEUES,
    **parameters: Any,
) -> SlurmJob:
    """Submits a job that runs the worker on every rank, and returns at once.

    A job that reaches its time limit or is preempted starts again; only with a
    :class:`~torchbearer_ddp.Checkpoint` in the Trial does it then continue where it stopped.

    Example: ::

        >>> from torchbearer_ddp import submit_slurm
        >>> job = submit_slurm(train, args=(10,), nodes=2, tasks_per_node=4, timeout_min=60)
        >>> job.results()  # of all 8 ranks, once they are there

    Args:
        worker_fn: The function to run on every rank.
        args: Its arguments.
        kwargs: Its keyword arguments.
        nodes: The number of nodes.
        tasks_per_node: The number of ranks on each.
        folder: Where the job's files and logs go, on a file system that the nodes share. It is made
            for its owner only, because anyone who can write there can run code in the job.
        max_requeues: How often the job may start again, for example after a time limit.
        parameters: Parameters of submitit or sbatch, such as ``timeout_min``, ``partition``,
            ``gpus_per_node``, ``cpus_per_task``, ``mem_gb``, ``name`` or
            ``slurm_additional_parameters``; and ``backend``, ``device``, ``timeout``, ``seed``,
            ``grace`` and ``debug`` as in :func:`run_distributed`.

    Raises:
        ValueError: If an argument makes no sense.
        LaunchError: If the job cannot be submitted; nothing is left behind.
    """
    check_launch("submit_slurm")
    warn_of_copy(worker_fn)
    task = (worker_fn, tuple(args), kwargs or {})
    given = {"nodes": nodes, "tasks_per_node": tasks_per_node, "folder": folder, **parameters}
    return _prepare(task, {**given, "max_requeues": max_requeues}).submit()


def submit_and_follow(plan: Plan, task: Task) -> list[Any]:
    """Submits the worker for ``--launcher slurm``, shows its output and waits for the job.

    Raises:
        SystemExit: With ``--dry-run`` and ``--detach``, which do not wait.
    """
    flags = {"timeout": plan.member.timeout, "seed": plan.member.seed, "grace": plan.grace}
    flags = {**flags, "debug": plan.debug or None, **plan.slurm}
    detach, dry_run = flags.pop("detach", False), flags.pop("dry_run", False)
    submission = _prepare(task, flags)
    if dry_run:
        print(submission.script())
        raise SystemExit(0)
    job = submission.submit()
    files = f"{job.paths_of(0).stdout} and the files beside it"
    logger.info("submitted job %s; its output goes to %s", job.job_id, files)
    if detach:
        print(job.job_id)
        raise SystemExit(0)
    return job.follow()


def _prepare(task: Task, given: dict[str, Any]) -> Submission:
    """The submission of a worker; nothing is written yet."""
    from torchbearer_ddp.slurm.submit import Submission

    given = {name: value for name, value in given.items() if value is not None}
    requeues = checked_count("max_requeues", given.pop("max_requeues", DEFAULT_REQUEUES), 0)
    for name, other in (("nodes", "nodes"), ("tasks_per_node", "ntasks_per_node")):
        found = name if name in given else other
        given[found] = checked_count(found, given.get(found, 1), 1)
    settings = {name: given.pop(name) for name in _LAUNCH_SETTINGS if name in given}
    folder = given.pop("folder", DEFAULT_FOLDER)
    run = functools.partial(run_slurm_rank, settings, pack(task), new_token())
    name = getattr(task[0], "__name__", type(task[0]).__name__)
    return Submission(run, name, folder, given, requeues)
