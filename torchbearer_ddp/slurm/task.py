"""What each task of a submitted job runs: it joins the others, and can be started again.

On the signal before the time limit, or before a preemption, the ranks agree on a step, save and
leave; the first to leave puts the job back into the queue. A restarted job runs the same task
again, and its Checkpoint goes on from the newest whole file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import submitit

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import failures, stop_request
from torchbearer_ddp.log import logger
from torchbearer_ddp.slurm import job
from torchbearer_ddp.slurm.submitit_adapter import paths_of_this_task, preemption_signal

_REQUEUE_SECONDS = 60


class SlurmTask:
    """One rank of a submitted job.

    Args:
        run: Runs this process as the rank that its environment says it is.
        max_requeues: How often the job may start again.
    """

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
        signal.signal(signum, signal.SIG_IGN)  # the result is to be kept now
        return result

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """The same task once more: what it needs to continue is in its Checkpoint's folder.

        submitit asks for this if the signal arrives before this task handles it.
        """
        return submitit.helpers.DelayedSubmission(self)

    #: submitit looks for the first name and calls the second.
    __submitit_checkpoint__ = checkpoint


def _receive_in_thread(signum: signal.Signals) -> None:
    """Receives the signal in a thread of its own, so that no process started from now on gets it.

    Slurm sends it to every process of the step, also to loader workers, and it ends those that do
    not know it. They inherit the main thread's mask; Python still runs the handler in that thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        threading.Event().wait()

    threading.Thread(target=wait, daemon=True, name=signum.name).start()


def _follows_from_signal(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt | SystemExit) or bool(
        getattr(error, "secondary", False)
    )


class _Attempt:
    """One start of the job, seen from one rank: how it begins and how it may end."""

    def __init__(self, environment: Mapping[str, str], max_requeues: int) -> None:
        self._job = environment["SLURM_JOB_ID"]
        self._nodes = environment.get("SLURM_JOB_NODELIST", "?")
        self._world_size = environment.get("SLURM_NTASKS", "?")
        self._rank = int(environment.get("SLURM_PROCID", "0"))
        self._restart = int(environment.get("SLURM_RESTART_COUNT", "0"))
        self._max_requeues = max_requeues
        self._paths = paths_of_this_task()

    def begin(self) -> None:
        """Forgets what an earlier start has left, and checks that this one is still allowed."""
        self._paths.result_pickle.unlink(missing_ok=True)
        self._report_path().unlink(missing_ok=True)
        if self._restart > self._max_requeues:
            raise LaunchError(
                f"Job {self._job} was restarted {self._restart} times but max_requeues is "
                f"{self._max_requeues}. Submit it again to go on, or allow more."
            )
        if self._rank == 0:
            again = f", restart {self._restart} of at most {self._max_requeues}"
            ranks = f"{self._world_size} rank{'s' * (self._world_size != '1')}"
            logger.info(
                "job %s runs %s on %s%s", self._job, ranks, self._nodes, again * (self._restart > 0)
            )

    def stop(self) -> NoReturn:
        """Ends this rank after a signal; the first one sees to it that the job starts again."""
        signum = stop_request.received() or 0
        name = signal.Signals(signum).name
        try:
            if self._is_first_to_stop():
                if not self._wanted_again(signum):
                    logger.warning("%s, all ranks stop; job %s is not requeued", name, self._job)
                    failures.exit_now(128 + signum)
                self._requeue(name)
        except (LaunchError, OSError, subprocess.SubprocessError) as error:
            self.fail(error)
        # Not a failure: a bad exit of one task would end the one that requeues too early.
        failures.exit_now(0)

    def _is_first_to_stop(self) -> bool:
        paths = self._paths
        try:
            (paths.folder / f"{paths.job_id}_{self._restart}_stopped").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _wanted_again(self, signum: int) -> bool:
        """A SIGTERM also comes with a cancellation; Slurm says which it is."""
        if signum == preemption_signal():
            return True
        try:
            known = job.look_up(self._job) or {}
        except (OSError, subprocess.SubprocessError):
            known = {}
        preempted = known.get("PreemptTime", "None") not in ("None", "N/A", "Unknown")
        return preempted and known.get("JobState") == "RUNNING"

    def _requeue(self, name: str) -> None:
        if self._restart >= self._max_requeues:
            raise LaunchError(
                f"Job {self._job} got {name} but was restarted {self._restart} times already and "
                f"max_requeues is {self._max_requeues}. Submit it again to go on where it "
                "stopped, or allow more."
            )
        answer = subprocess.run(
            ["scontrol", "requeue", self._job],
            capture_output=True,
            text=True,
            timeout=_REQUEUE_SECONDS,
        )
        if answer.returncode != 0:
            raise LaunchError(
                f"Job {self._job} got {name} but Slurm did not requeue it "
                f"({answer.stderr.strip()}). Submit it again to go on where it stopped."
            )
        logger.info(
            "%s, all ranks stop; job %s is requeued (%s of at most %s)",
            name,
            self._job,
            self._restart + 1,
            self._max_requeues,
        )
        if not stop_request.current().resumable:
            logger.warning(
                "no Checkpoint was in use, so job %s starts again from the beginning. Add "
                "torchbearer_ddp.Checkpoint to the Trial's callbacks",
                self._job,
            )

    def fail(self, error: BaseException) -> NoReturn:
        """Leaves an account of the failure for whoever waits for the job, and ends this rank."""
        report = failures.report_of(error)
        report.update(rank=self._rank, restart=self._restart, time=time.time())
        path = self._report_path()
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(report))
        temporary.replace(path)
        logger.error(failures.explain(error, self._rank))
        # The interpreter's own end could wait for ever for ranks that are gone.
        failures.exit_now(report["exitcode"])

    def _report_path(self) -> Any:
        paths = self._paths
        return paths.folder / f"{paths.job_id}_{paths.task_id}_failure.json"
