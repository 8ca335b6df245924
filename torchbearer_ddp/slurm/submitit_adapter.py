"""The one place that uses private parts of submitit, all of them listed in :data:`PRIVATE_PARTS`.

submitit 1.5 has no public way to submit one task without leaving files behind when sbatch rejects
it, to name another start command, or to watch a job through requeues. A test compares the list with
the installed version.
"""

from __future__ import annotations

import shlex
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission as DelayedSubmission
from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths
from submitit.core.utils import UncompletedJobError as UncompletedJobError
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher

from torchbearer_ddp.errors import LaunchError

#: The private names that this file uses, by the class that has them.
PRIVATE_PARTS: dict[type, tuple[str, ...]] = {
    SlurmExecutor: (
        "_convert_parameters", "_equivalence_dict", "_make_submission_command",
        "_make_submission_file_text", "_submit_command", "_submitit_command_str",
        "_valid_parameters",
    ),
    SlurmInfoWatcher: (
        "_finished", "_info_dict", "_last_status_check", "_num_calls", "_registered",
    ),
    submitit.SlurmJob: ("_tasks",),
    JobEnvironment: ("_usr_sig",),
}  # fmt: skip


def preemption_signal() -> signal.Signals:
    """The signal that Slurm sends before it takes the nodes away."""
    return signal.Signals(JobEnvironment._usr_sig())


def paths_of_this_task() -> JobPaths:
    """The files of the task that this process is."""
    return JobEnvironment().paths


def known_parameters() -> set[str]:
    """The parameters that submitit's executor takes; sbatch knows more."""
    return set(SlurmExecutor._valid_parameters())


class Executor(SlurmExecutor):
    """Submits one task, which starts with ``start_file``; a failure leaves no files behind."""

    def __init__(
        self, folder: Path, start_file: Path, job_class: type[Any], max_requeues: int
    ) -> None:
        super().__init__(folder, max_num_timeout=max_requeues)
        self.job_class, self._start_file = job_class, start_file

    def translate(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The parameters by sbatch's names instead of submitit's."""
        shared = self._equivalence_dict() or {}
        common = self._convert_parameters({k: v for k, v in parameters.items() if k in shared})
        return {**{k: v for k, v in parameters.items() if k not in shared}, **common}

    @property
    def _submitit_command_str(self) -> str:
        start, folder = shlex.quote(str(self._start_file)), shlex.quote(str(self.folder))
        return f"{self.python} -u {start} {folder}"

    def script(self) -> str:
        """The script that sbatch is given."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def submit_task(self, task: Callable[[], Any]) -> Any:
        """Submits the task and returns the job.

        Raises:
            LaunchError: If sbatch rejects it.
        """
        delayed = DelayedSubmission(task)
        # Used by submitit's own signal handler only, until the task has installed its own.
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
                f"sbatch rejected the job: {reason}. See the partitions and limits with sinfo; "
                "--dry-run shows what would be sent."
            ) from error
        finally:
            for path in (pickled, self._script_path):
                if not path.is_symlink():
                    path.unlink(missing_ok=True)
        return job

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        self._script_path = submission_file_path
        return list(super()._make_submission_command(submission_file_path))


class Watcher(SlurmInfoWatcher):
    """Looks up the jobs that are being waited for, at growing intervals.

    Args:
        look_up: Returns what is known of a job, with its ``State``; OSError if Slurm is busy.
        final: The states in which a job has ended.
    """

    def __init__(self, look_up: Callable[[str], dict[str, str]], final: set[str]) -> None:
        super().__init__(delay_s=5)
        self._look_up, self._final = look_up, final

    def update(self) -> None:
        """Looks up every job that has not ended."""
        self._num_calls += 1
        self._last_status_check = time.time()
        for job_id in self._registered - self._finished:
            try:
                self._info_dict[job_id] = self._look_up(job_id)
            except OSError:
                continue  # the controller restarts or is busy; the job is not affected
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """True once the job has ended."""
        return self.get_state(job_id, mode=mode) in self._final


class Job(submitit.SlurmJob[Any]):
    """submitit's job, with the files of each of its tasks."""

    def tasks(self) -> list[int]:
        """The numbers of the job's tasks."""
        return list(self._tasks)

    def paths_of(self, task: int) -> JobPaths:
        """The files of one task."""
        return type(self.paths)(self.paths.folder, job_id=self.job_id, task_id=task)
