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

import cloudpickle
import submitit
import torch
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import JobPaths

from torchbearer_ddp import signals, slurm_job, worker
from torchbearer_ddp.arguments import Plan, make_plan
from torchbearer_ddp.errors import LaunchError

_REQUEUE_SECONDS = 60


class SlurmTask:
    """One rank of a submitted job.

    Args:
        worker_fn: The user's function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        settings: Launch settings, such as the timeout or the seed.
        max_requeues: How often the job may start again.
    """

    def __init__(
        self,
        worker_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Mapping[str, Any],
        max_requeues: int,
    ) -> None:
        # Pickled apart: it may need modules that are only found once the path is set.
        self._payload = cloudpickle.dumps((worker_fn, args, kwargs))
        self._path, self._argv = list(sys.path), list(sys.argv)
        self._settings = dict(settings)
        self._max_requeues = max_requeues

    def __call__(self) -> Any:
        """Runs this rank; called by submitit in each task of the step."""
        attempt = _Attempt(os.environ, self._max_requeues)
        try:
            # submitit's handler would save and requeue at once, in mid-step, on rank zero alone.
            signal.signal(_signal(), signals.handle)
            _take(_signal())
            attempt.begin()
            sys.path[:] = [*self._path, *(entry for entry in sys.path if entry not in self._path)]
            sys.argv[:] = self._argv
            plan = self._plan()
            if plan.first_rank == 0:
                _say(attempt.describe(plan.world_size))
            task = cloudpickle.loads(self._payload)
            worker.share_names(task[0])
            result = worker.run_rank(plan, 0, *task)
        except BaseException as error:
            if signals.received() and _follows_from_signal(error):
                attempt.stop()
            attempt.fail(error)
        if signals.received():
            attempt.stop()
        signal.signal(_signal(), signal.SIG_IGN)  # the result is to be kept now
        return result

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """The same task once more: what it needs to go on is in its Checkpoint's folder.

        submitit asks for this if the signal arrives before this task handles it.
        """
        return submitit.helpers.DelayedSubmission(self)

    #: submitit looks for the first name and calls the second.
    __submitit_checkpoint__ = checkpoint

    def _plan(self) -> Plan:
        settings = {**self._settings, "launcher": "srun"}
        return make_plan(settings, os.environ, torch.cuda.device_count())


def _signal() -> signal.Signals:
    """The signal that Slurm sends before it takes the nodes away."""
    return signal.Signals(JobEnvironment._usr_sig())


def _take(signum: signal.Signals) -> None:
    """Takes the signal in a thread of its own, so that no process started from now on gets it.

    Slurm sends it to every process of the step, also to loader workers, and it ends those that do
    not know it. They inherit the main thread's mask; Python still runs the handler in that thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        threading.Event().wait()

    threading.Thread(target=wait, daemon=True, name=signum.name).start()


def _say(line: str) -> None:
    print(f"torchbearer_ddp: {line}", file=sys.stderr, flush=True)


def _follows_from_signal(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt | SystemExit) or bool(
        getattr(error, "secondary", False)
    )


class _Attempt:
    """One start of the job, seen from one rank: how it begins and how it may end."""

    def __init__(self, environment: Mapping[str, str], max_requeues: int) -> None:
        self._job = environment["SLURM_JOB_ID"]
        self._nodes = environment.get("SLURM_JOB_NODELIST", "?")
        self._rank = int(environment.get("SLURM_PROCID", "0"))
        self._restart = int(environment.get("SLURM_RESTART_COUNT", "0"))
        self._max_requeues = max_requeues
        self._paths: JobPaths = JobEnvironment().paths

    def describe(self, world_size: int) -> str:
        plural = "" if world_size == 1 else "s"
        line = f"job {self._job} runs {world_size} rank{plural} on {self._nodes}"
        if self._restart:
            line += f", restart {self._restart} of at most {self._max_requeues}"
        return line

    def begin(self) -> None:
        """Forgets what an earlier start has left, and checks that this one is still allowed."""
        self._paths.result_pickle.unlink(missing_ok=True)
        self._report_path().unlink(missing_ok=True)
        if self._restart > self._max_requeues:
            raise LaunchError(
                f"Job {self._job} was restarted {self._restart} times but max_requeues is "
                f"{self._max_requeues}. Submit it again to go on, or allow more."
            )

    def stop(self) -> NoReturn:
        """Ends this rank after a signal; the first one sees to it that the job starts again."""
        signum = signals.received() or 0
        name = signal.Signals(signum).name
        try:
            if self._is_first_to_stop():
                if not self._wanted_again(signum):
                    _say(f"{name}, all ranks stop; job {self._job} is not requeued")
                    worker.exit_now(128 + signum)
                self._requeue(name)
        except (LaunchError, OSError, subprocess.SubprocessError) as error:
            self.fail(error)
        # Not a failure: a bad exit of one task would end the one that requeues too early.
        worker.exit_now(0)

    def _is_first_to_stop(self) -> bool:
        paths = self._paths
        try:
            (paths.folder / f"{paths.job_id}_{self._restart}_stopped").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _wanted_again(self, signum: int) -> bool:
        """A SIGTERM also comes with a cancellation; Slurm says which it is."""
        if signum == _signal():
            return True
        try:
            known = slurm_job.ask(self._job) or {}
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
        _say(
            f"{name}, all ranks stop; job {self._job} is requeued "
            f"({self._restart + 1} of at most {self._max_requeues})"
        )

    def fail(self, error: BaseException) -> NoReturn:
        """Leaves an account of the failure for whoever waits for the job, and ends this rank."""
        report = worker.report_of(error)
        report.update(rank=self._rank, restart=self._restart, time=time.time())
        path = self._report_path()
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(report))
        temporary.replace(path)
        _say(worker.explain(error, self._rank))
        # The interpreter's own end could wait for ever for ranks that are gone.
        worker.exit_now(report["exitcode"])

    def _report_path(self) -> Any:
        paths = self._paths
        return paths.folder / f"{paths.job_id}_{paths.task_id}_failure.json"
