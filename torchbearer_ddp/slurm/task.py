"""What each task of a submitted job runs: one rank, in a job that can be started again.

On the signal before the time limit, or before a preemption, the ranks agree on a step, save and
end; the first to end requeues the job. A restarted job runs the same task again, and its Checkpoint
continues from the newest complete file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DistributedError, LaunchError
from torchbearer_ddp.group import failures, stop_request
from torchbearer_ddp.log import logger
from torchbearer_ddp.slurm.job import look_up, slurm_command
from torchbearer_ddp.slurm.submitit_adapter import (
    DelayedSubmission,
    paths_of_this_task,
    preemption_signal,
)


class SlurmTask:
    """One rank of a submitted job; ``run`` reads from the environment which one."""

    def __init__(self, run: Callable[[], Any], max_requeues: int) -> None:
        self._run = run
        self._path, self._argv = list(sys.path), list(sys.argv)
        self._max_requeues = max_requeues

    def __call__(self) -> Any:
        """Runs this rank; called by submitit in each task of the step."""
        attempt = _Attempt(os.environ, self._max_requeues)
        signum = preemption_signal()
        try:
            # submitit's handler would save and requeue at once, in mid-step, on rank zero alone.
            signal.signal(signum, stop_request.handle)
            _receive_in_thread(signum)
            attempt.begin()
            sys.path[:] = [*self._path, *(entry for entry in sys.path if entry not in self._path)]
            sys.argv[:] = self._argv
            result = self._run()
        except BaseException as error:
            if stop_request.received() and _follows_from_signal(error):
                attempt.stop()
            attempt.fail(error)
        if stop_request.received():
            attempt.stop()
        signal.signal(signum, signal.SIG_IGN)  # submitit writes the result now
        return result

    def checkpoint(self) -> DelayedSubmission:
        """The same task again, for submitit's own handler, until this task has set its own."""
        return DelayedSubmission(self)


def _receive_in_thread(signum: signal.Signals) -> None:
    """Receives the signal in a thread of its own, so that processes started from now on do not.

    Slurm sends it to every process of the step, and it would end loader workers, which have no
    handler. They inherit the main thread's mask; Python still runs our handler in the main thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        threading.Event().wait()

    threading.Thread(target=wait, daemon=True, name=signum.name).start()


def _follows_from_signal(error: BaseException) -> bool:
    lost_another = isinstance(error, DistributedError) and error.secondary
    return lost_another or isinstance(error, KeyboardInterrupt | SystemExit)


class _Attempt:
    """One start of the job, as one of its ranks sees it."""

    def __init__(self, environment: Mapping[str, str], max_requeues: int) -> None:
        self._job = environment["SLURM_JOB_ID"]
        self._nodes = environment.get("SLURM_JOB_NODELIST", "?")
        self._world_size = environment.get("SLURM_NTASKS", "?")
        with checked.as_error(LaunchError, after=". Slurm sets it: leave it as it is."):
            self._rank = checked.variable(environment, "SLURM_PROCID", 0, 0)
            self._restart = checked.variable(environment, "SLURM_RESTART_COUNT", 0, 0)
        self._max_requeues = max_requeues
        self._paths = paths_of_this_task()
        task = f"{self._paths.job_id}_{self._paths.task_id}"
        self._report_path = self._paths.folder / f"{task}_failure.json"

    def begin(self) -> None:
        """Removes what an earlier start has left, and checks that this one is still allowed."""
        self._paths.result_pickle.unlink(missing_ok=True)
        self._report_path.unlink(missing_ok=True)
        if self._restart > self._max_requeues:
            raise LaunchError(
                f"Job {self._job} was restarted {self._restart} times but max_requeues is "
                f"{self._max_requeues}. Submit it again to continue, or allow more."
            )
        if self._rank == 0:
            again = f", restart {self._restart} of at most {self._max_requeues}"
            ranks = f"{self._world_size} rank{'s' * (self._world_size != '1')} on {self._nodes}"
            logger.info("job %s runs %s%s", self._job, ranks, again * (self._restart > 0))

    def stop(self) -> NoReturn:
        """Ends this rank after a signal; the first rank to end requeues the job."""
        signum = stop_request.received() or 0
        name = signal.Signals(signum).name
        try:
            if self._is_first_to_stop():
                if not self._is_requeue_wanted(signum):
                    logger.warning("%s, all ranks stop; job %s is not requeued", name, self._job)
                    failures.exit_now(128 + signum)
                self._requeue_job(name)
        except (LaunchError, OSError) as error:
            self.fail(error)
        # Not as a failure: Slurm would then kill the rank that requeues.
        failures.exit_now(0)

    def _is_first_to_stop(self) -> bool:
        paths = self._paths
        try:
            (paths.folder / f"{paths.job_id}_{self._restart}_stopped").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _is_requeue_wanted(self, signum: int) -> bool:
        """False after scancel, which sends SIGTERM as a preemption may; Slurm knows which."""
        if signum == preemption_signal():
            return True
        try:
            known = look_up(self._job) or {}
        except OSError:
            return False
        preempted = known.get("PreemptTime", "None") not in ("None", "N/A", "Unknown")
        return preempted and known.get("JobState") == "RUNNING"

    def _requeue_job(self, name: str) -> None:
        if self._restart >= self._max_requeues:
            raise LaunchError(
                f"Job {self._job} got {name} but was restarted {self._restart} times already and "
                f"max_requeues is {self._max_requeues}. Submit it again to continue where it "
                "stopped, or allow more."
            )
        answer = slurm_command("scontrol", "requeue", self._job)
        if answer.returncode != 0:
            raise LaunchError(
                f"Job {self._job} got {name} but Slurm did not requeue it "
                f"({answer.stderr.strip()}). Submit it again to continue where it stopped."
            )
        logger.info(
            f"{name}, all ranks stop; job {self._job} is requeued ({self._restart + 1} of at most "
            f"{self._max_requeues})"
        )
        if not stop_request.current().resumable:
            logger.warning(
                f"no Checkpoint was in use when {name} came. Without one, job {self._job} starts "
                "from the beginning: add torchbearer_ddp.Checkpoint to the Trial's callbacks"
            )

    def fail(self, error: BaseException) -> NoReturn:
        """Writes a report of the failure for the process that waits for the job, and ends."""
        report = failures.report_of(error, self._rank)
        report.update(restart=self._restart, time=time.time())
        logger.error(failures.explain(report))
        with contextlib.suppress(OSError):  # a full disk may be the very failure
            temporary = self._report_path.with_suffix(".part")
            temporary.write_text(json.dumps(report))
            temporary.replace(self._report_path)
        # Python's own exit could wait forever for ranks that are gone.
        failures.exit_now(report["exitcode"])
