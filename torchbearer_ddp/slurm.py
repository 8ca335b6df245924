"""Submission to a Slurm cluster, through submitit."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from torchbearer_ddp.arguments import Plan
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.mentions import mentions
from torchbearer_ddp.slurm_job import SlurmJob, follow
from torchbearer_ddp.slurm_task import SlurmTask

DEFAULT_FOLDER = "slurm"
DEFAULT_REQUEUES = 10
#: What belongs to the launch of the ranks and not to the submission.
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
            for its owner alone: whoever can write there can run code in the job.
        max_requeues: How often the job may start again, after a time limit or a preemption, say.
        parameters: What submitit or sbatch know, such as ``timeout_min``, ``partition``,
            ``gpus_per_node``, ``cpus_per_task``, ``mem_gb``, ``name`` or
            ``slurm_additional_parameters``; and ``backend``, ``device``, ``timeout``, ``seed``,
            ``grace`` and ``debug`` as in :func:`run_distributed`.

    Raises:
        ValueError: If an argument makes no sense.
        LaunchError: If the job cannot be submitted; nothing is left behind.
    """
    if not mentions(worker_fn, "Checkpoint"):
        warnings.warn(_no_checkpoint(worker_fn), stacklevel=2)
    return _submit(
        worker_fn,
        tuple(args),
        kwargs or {},
        {
            "nodes": nodes,
            "tasks_per_node": tasks_per_node,
            "folder": folder,
            "max_requeues": max_requeues,
            **parameters,
        },
    )


def submit_and_follow(
    worker_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan
) -> list[Any]:
    """Submits the worker as ``--launcher slurm`` asks, and stays until the job has ended.

    Args:
        worker_fn: The user's function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        plan: The launch plan with the flags of the submission.

    Returns:
        The results of all ranks.

    Raises:
        SystemExit: If the job was only to be shown or to be left alone.
    """
    flags = {"timeout": plan.timeout, "seed": plan.seed, "grace": plan.grace, **plan.slurm}
    flags["debug"] = plan.debug or None
    detach, dry_run = flags.pop("detach", False), flags.pop("dry_run", False)
    if dry_run:
        print(_prepare(worker_fn, args, kwargs, flags)[1].script())
        raise SystemExit(0)
    if not mentions(worker_fn, "Checkpoint"):
        print(f"torchbearer_ddp: {_no_checkpoint(worker_fn)}", file=sys.stderr)
    job = _submit(worker_fn, args, kwargs, flags)
    print(
        f"torchbearer_ddp: submitted job {job.job_id}; its output goes to "
        f"{job._paths_of(0).stdout} and those beside it",
        file=sys.stderr,
        flush=True,
    )
    if detach:
        print(job.job_id)
        raise SystemExit(0)
    return follow(job)


def _no_checkpoint(worker_fn: Callable[..., Any]) -> str:
    return (
        f"No Checkpoint was found in {_name_of(worker_fn)}: if the job is preempted or reaches its "
        "time limit, it starts again from the beginning. Add torchbearer_ddp.Checkpoint to the "
        "Trial's callbacks."
    )


def _submit(
    worker_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: dict[str, Any],
) -> SlurmJob:
    task, executor = _prepare(worker_fn, args, kwargs, given)
    with _private_folder(executor.folder):
        return executor.submit_task(task)


def _prepare(
    worker_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: dict[str, Any],
) -> tuple[SlurmTask, _Executor]:
    """The task and an executor that knows how to submit it; nothing is written yet."""
    given = {name: value for name, value in given.items() if value is not None}
    requeues = _count("max_requeues", given.pop("max_requeues", DEFAULT_REQUEUES), 0)
    launch = {name: given.pop(name) for name in _LAUNCH_SETTINGS if name in given}
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise LaunchError(
            "No sbatch on the PATH, so there is no Slurm to submit to. Submit from a login node of "
            "the cluster, or load its Slurm module."
        )
    executor = _Executor(given.pop("folder", DEFAULT_FOLDER), max_num_timeout=requeues)
    parameters = executor.translate({name.removeprefix("slurm_"): v for name, v in given.items()})
    executor.update_parameters(**_completed(parameters, _name_of(worker_fn)))
    try:
        task = SlurmTask(worker_fn, args, kwargs, launch, requeues)
    except Exception as error:
        raise LaunchError(
            f"The worker {_name_of(worker_fn)} or its arguments cannot be sent to the cluster "
            f"({type(error).__name__}: {error}). Open files, locks and connections inside the "
            "worker instead of handing them over."
        ) from error
    return task, executor


def _completed(given: dict[str, Any], name: str) -> dict[str, Any]:
    """The parameters with what a job of ranks needs, for submitit's executor."""
    for count in ("nodes", "ntasks_per_node"):
        given[count] = _count(count, given.get(count, 1), 1)
    if given.get("gpus_per_node") == 0:
        del given["gpus_per_node"]  # a cluster without GPUs refuses even to give none
    known = {k: v for k, v in given.items() if k in SlurmExecutor._valid_parameters()}
    # sbatch knows more than submitit does; what it does not know either, it says so itself.
    others = {k: v for k, v in given.items() if k not in known}
    additional = {**others, **known.get("additional_parameters", {})}
    if "array" in additional:
        raise ValueError(
            f"array is {additional['array']!r} but submit_slurm submits one job. Call it once per "
            "job, or start the script with srun in an sbatch --array script."
        )
    if not {"requeue", "no-requeue", "no_requeue"} & set(additional):
        additional["requeue"] = True  # some clusters forbid it unless it is asked for
    srun = list(known.get("srun_args", ()))
    if not any(arg.startswith(("-K", "--kill-on-bad-exit")) for arg in srun):
        srun.append("--kill-on-bad-exit=1")  # else the others would run on without that rank
    if "cpus_per_task" in known:
        srun.append(f"--cpus-per-task={known['cpus_per_task']}")  # srun ignores sbatch's
    defaults = {"job_name": name, "time": None}  # the partition's own limit, not submitit's 5 min
    return {**defaults, **known, "additional_parameters": additional, "srun_args": srun}


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}.")
    return value


class _Executor(SlurmExecutor):
    """submitit's executor, for one task at a time and without leftovers when sbatch refuses."""

    job_class = SlurmJob

    def translate(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The parameters by sbatch's names instead of submitit's.

        Args:
            parameters: What the user gave.
        """
        shared = self._equivalence_dict() or {}
        common = self._convert_parameters({k: v for k, v in parameters.items() if k in shared})
        return {**{k: v for k, v in parameters.items() if k not in shared}, **common}

    @property
    def _submitit_command_str(self) -> str:
        start = Path(__file__).with_name("slurm_start.py")
        return f"{self.python} -u {shlex.quote(str(start))} {shlex.quote(str(self.folder))}"

    def script(self) -> str:
        """The script that sbatch is given."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def submit_task(self, task: SlurmTask) -> SlurmJob:
        """Submits the task.

        Args:
            task: What every rank runs.
        """
        delayed = DelayedSubmission(task)
        # Only submitit's own handler looks at these, before the task has put its own in place.
        delayed.set_timeout(self.parameters.get("time") or 60, self.max_num_timeout)
        pickled = self.folder / f"{uuid.uuid4().hex}.pkl"
        self._script_path = pickled
        try:
            delayed.dump(pickled)
            job = self._submit_command(self._submitit_command_str)
            job.paths.move_temporary_file(pickled, "submitted_pickle")
        except (FailedJobError, FailedSubmissionError) as error:
            reason = " ".join(str(error).replace("sbatch: error:", "").split())
            raise LaunchError(
                f"Slurm did not take the job: {reason}. See with sinfo what there is; --dry-run "
                "shows what would be sent."
            ) from error
        finally:
            for path in (pickled, self._script_path):
                if not path.is_symlink():
                    path.unlink(missing_ok=True)
        return cast(SlurmJob, job)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        self._script_path = submission_file_path
        return list(super()._make_submission_command(submission_file_path))


@contextlib.contextmanager
def _private_folder(folder: Path) -> Iterator[None]:
    """Makes the folder, or checks it; takes it away again if the submission fails."""
    made: list[Path] = []
    try:
        for path in [*reversed(folder.parents), folder]:
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
                made.append(path)
        _check_private(folder)
        yield
    except BaseException as error:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # somebody else uses it already
                path.rmdir()
        if isinstance(error, OSError):
            raise LaunchError(
                f"The submission folder {folder} cannot be written ({error.strerror}: "
                f"{error.filename}). Name another one, on a file system that the nodes share."
            ) from error
        raise


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise LaunchError(
            f"The submission folder {folder} belongs to another user (uid {found.st_uid}), who "
            "could run code in the job through the pickles in it. Name a folder of your own."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LaunchError(
            f"The submission folder {folder} can be written by others (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), who could run code in the job through the "
            f"pickles in it. Run chmod 700 {folder}, or name another one."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(folder))


def _name_of(worker_fn: Callable[..., Any]) -> str:
    return getattr(worker_fn, "__name__", type(worker_fn).__name__)
