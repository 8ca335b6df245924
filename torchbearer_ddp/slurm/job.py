"""A submitted job: its state, the cause of its end, and its output while it runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from torchbearer_ddp import checked
from torchbearer_ddp.errors import WorkerError
from torchbearer_ddp.group.failures import REPORT, worker_error
from torchbearer_ddp.log import logger
from torchbearer_ddp.slurm.submitit_adapter import Job, UncompletedJobError, Watcher

#: States in which Slurm has finished with a job; in all others, also unknown ones, it may continue.
_FINAL = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
_CONTINUES = "With a Checkpoint in the Trial it continues where it stopped."
_REMEDIES = {
    "TIMEOUT": f"Give it more time with timeout_min (--time). {_CONTINUES}",
    "CANCELLED": "A user cancelled it, or it exceeded a limit of the cluster.",
    "OUT_OF_MEMORY": "Give it more memory with mem_gb (--mem-gb), or use smaller batches.",
    "NODE_FAIL": f"A node failed. Submit it again. {_CONTINUES}",
    "PREEMPTED": f"A job of higher priority took its nodes. Submit it again. {_CONTINUES}",
}
#: What a rank writes when it fails.
_REPORT = checked.record(
    {**REPORT, "restart": checked.whole(0), "secondary": checked.boolean, "time": checked.number}
)
_COMMAND_SECONDS = 60
_TICK_SECONDS = 0.2
_TAIL_LINES = 20


def slurm_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm.

    Raises:
        OSError: If there is no such command, or it does not end in time.
    """
    # A requeue ends all processes of the step with SIGTERM, also the scontrol that asked for it and
    # may still wait for the answer. A blocked signal stays blocked in the command.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def look_up(job_id: str) -> dict[str, str] | None:
    """What the controller knows of a job, by Slurm's names; None if it has forgotten the job.

    Not every cluster has an accounting, and it does not count restarts.

    Raises:
        OSError: If the controller cannot be reached.
    """
    answer = slurm_command("scontrol", "--oneliner", "show", "job", job_id)
    if answer.returncode == 0 and answer.stdout.strip():
        return dict(re.findall(r"(\w+)=(\S*)", answer.stdout.splitlines()[0]))
    if "Invalid job id" in answer.stderr:
        return None
    raise OSError(answer.stderr.strip())


def _state_of(job_id: str) -> dict[str, str]:
    """A job's state; from the accounting, if there is one, once the controller has forgotten it."""
    if known := look_up(job_id):
        if "JobState" not in known:
            raise OSError(f"scontrol shows no JobState of job {job_id}")
        return {**known, "State": known["JobState"]}
    options = ("--noheader", "--parsable2", "--allocations", "-o", "State")
    answer = slurm_command("sacct", *options, "-j", job_id)
    states = answer.stdout.split() if answer.returncode == 0 else []
    return {"State": states[0] if states else "FORGOTTEN"}


class SlurmJob(Job):
    """A submitted job: submitit's own, with the cause of the first rank that failed.

    ``results()`` waits for every rank's value, through any number of requeues.
    """

    watcher = Watcher(_state_of, _FINAL)

    def results(self) -> list[Any]:
        """Waits for the job and returns the result of every rank, in the order of ranks.

        Raises:
            WorkerError: If the job failed; the first failing rank's traceback comes first.
        """
        error = self.exception()
        if error is not None:
            raise error
        return list(super().results())

    def exception(self) -> Any:
        """Waits for the job and returns what it failed with, or None."""
        self.wait()
        missing = [task for task in self.tasks() if not self.paths_of(task).result_pickle.exists()]
        if missing and self.watcher.is_done(self.job_id, mode="force"):
            state = self.watcher.get_state(self.job_id, mode="cache")
            if state != "COMPLETED":  # else the file system may only be late, submitit waits for it
                return self._cause() or self._unexplained(state, missing)
        try:
            error = super().exception()
        except UncompletedJobError as incomplete:
            error = incomplete
        return None if error is None else WorkerError(str(error))

    def _cause(self) -> WorkerError | None:
        """The error of the first rank that failed; each writes a report before it ends."""
        reports = []
        for path in self.paths.folder.glob(f"{self.job_id}_*_failure.json"):
            try:
                reports.append(checked.from_json(path.read_bytes(), _REPORT, str(path)))
            except (checked.Unexpected, OSError) as error:  # a full disk, say
                logger.warning(f"a report of job {self.job_id} cannot be read: {error}")
        if not reports:
            return None
        # Of the last restart, and not because of another rank.
        first = min(reports, key=lambda r: (-r["restart"], r["secondary"], r["time"]))
        logs = f"{self.paths_of(first['rank']).stderr} and those beside it"
        return worker_error(first, f"\n\nJob {self.job_id} has ended; its logs are {logs}.")

    def _unexplained(self, state: str, missing: list[int]) -> WorkerError:
        ranks = ", ".join(map(str, missing))
        remedy = _REMEDIES.get(state, "See the output below, and the cluster's own log.")
        path = self.paths_of(missing[0]).stderr
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        tail = "\n".join(lines[-_TAIL_LINES:])
        return WorkerError(
            f"Job {self.job_id} ended as {state}, without a result of rank {ranks}. {remedy} "
            f"The end of {path}:\n{tail or '(nothing)'}",
            rank=missing[0] if len(missing) == 1 else None,
        )

    def follow(self) -> list[Any]:
        """Shows the job's state and rank zero's output until it ends, and returns the results.

        Raises:
            WorkerError: If the job failed.
            SystemExit: After a Ctrl-C, which leaves the job running.
        """
        files, shown = self.paths_of(0), ""
        outputs = [_copies(files.stdout, sys.stdout), _copies(files.stderr, sys.stderr)]
        try:
            while True:
                # The state before the output, so that the last round copies everything.
                done = self.done()
                shown = self._show_state(shown)
                new = [next(output) for output in outputs]
                if any(new) and "running" not in shown:
                    self.get_info(mode="force")
                    shown = self._show_state(shown)
                if done:
                    return self.results()
                time.sleep(_TICK_SECONDS)
        except KeyboardInterrupt:
            logger.warning(
                f"job {self.job_id} continues without this terminal. Watch it with "
                f"'tail -f {files.stdout}', cancel it with 'scancel {self.job_id}'"
            )
            raise SystemExit(130) from None
        finally:
            for output in outputs:
                next(output, None)  # what came since

    def _show_state(self, shown: str) -> str:
        line = _describe(self.get_info(mode="standard"))
        if line and line != shown:
            logger.info("job %s is %s", self.job_id, line)
        return line or shown


def _copies(path: Path, target: TextIO) -> Iterator[bool]:
    """Copies what is new in a file each time; yields whether there was something."""
    while not path.exists():
        yield False
    with path.open("rb") as stream:
        while True:
            new = stream.read()
            target.write(new.decode(errors="replace"))
            target.flush()
            yield bool(new)


def _describe(info: dict[str, str]) -> str:
    """A job's state in words: what, where or why, and how often it was restarted."""
    state, counted = info.get("State", "").lower(), info.get("Restarts", "0")
    restarts = int(counted) if checked.is_number(counted) else 0
    if state == "pending":
        return f"{'requeued, ' * (restarts > 0)}pending ({info.get('Reason', 'None')})"
    if state == "running":
        return f"running on {info.get('NodeList', '?')}" + f", restart {restarts}" * (restarts > 0)
    return state.replace("_", " ")
