"""A submitted job: its state, the cause of its end, and its output while it runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from submitit.core.utils import UncompletedJobError

from torchbearer_ddp.errors import WorkerError
from torchbearer_ddp.log import logger
from torchbearer_ddp.slurm.submitit_adapter import Job, Watcher

#: States in which Slurm has finished with a job; all others, also unknown ones, may go on.
_FINAL = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "FORGOTTEN",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
_REMEDIES = {
    "TIMEOUT": "Give it more time with timeout_min (--time); a Checkpoint in the Trial lets it go "
    "on where it stopped.",
    "CANCELLED": "Somebody cancelled it, or a limit of the cluster did.",
    "OUT_OF_MEMORY": "Give it more memory with mem_gb (--mem-gb), or smaller batches.",
    "NODE_FAIL": "A node failed: submit it again, a Checkpoint lets it go on where it stopped.",
    "PREEMPTED": "Another job took its place: submit it again, a Checkpoint lets it go on.",
}
_COMMAND_SECONDS = 60
_TICK_SECONDS = 0.2
_TAIL_LINES = 20


def look_up(job_id: str) -> dict[str, str] | None:
    """What the controller knows of a job, by Slurm's names; None if it has forgotten the job.

    The controller is asked rather than the accounting, which not every cluster has, and which says
    nothing about restarts.

    Raises:
        OSError: If the controller cannot be reached.
    """
    answer = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", job_id],
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
    )
    if answer.returncode == 0:
        return dict(re.findall(r"(\w+)=(\S*)", answer.stdout.splitlines()[0]))
    if "Invalid job id" in answer.stderr:
        return None
    raise OSError(answer.stderr.strip())


def _accounted_state(job_id: str) -> str:
    """How a job ended that the controller has forgotten, if there is an accounting to ask."""
    answer = subprocess.run(
        ["sacct", "--noheader", "--parsable2", "--allocations", "-o", "State", "-j", job_id],
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
    )
    words = answer.stdout.split()
    return words[0] if answer.returncode == 0 and words else "FORGOTTEN"


def _state_of(job_id: str) -> dict[str, str]:
    try:
        known = look_up(job_id)
        return (
            {**known, "State": known["JobState"]} if known else {"State": _accounted_state(job_id)}
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


class SlurmJob(Job):
    """A submitted job; submitit's own, which also knows which rank failed first.

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
        """The first failing rank's own account: it writes one before it ends."""
        reports = [json.loads(path.read_text()) for path in self._reports()]
        restarts = max((report["restart"] for report in reports), default=0)
        reports = [report for report in reports if report["restart"] == restarts]
        if not reports:
            return None
        first = min(reports, key=lambda report: (report["secondary"], report["time"]))
        told = first["message"] or f"Rank {first['rank']} on {first['host']} {first['what']}"
        return WorkerError(
            f"{told.rstrip()}\n\nJob {self.job_id} has ended; its logs are "
            f"{self.paths_of(first['rank']).stderr} and those beside it.",
            rank=first["rank"] if first["cause"] is None else first["cause"],
            host=first["host"] if first["cause_host"] is None else first["cause_host"],
            exitcode=first["exitcode"],
        )

    def _reports(self) -> list[Path]:
        return sorted(self.paths.folder.glob(f"{self.job_id}_*_failure.json"))

    def _unexplained(self, state: str, missing: list[int]) -> WorkerError:
        ranks = ", ".join(map(str, missing))
        remedy = _REMEDIES.get(state, "Look at the output below, and at the cluster's own log.")
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
        files = self.paths_of(0)
        outputs = [_Tail(files.stdout, sys.stdout), _Tail(files.stderr, sys.stderr)]
        shown = ""
        try:
            while True:
                # The state before the output, so that the last round copies everything.
                done = self.done()
                shown = self._show_state(shown)
                if sum(output.copy() for output in outputs) and "running" not in shown:
                    self.get_info(mode="force")
                    shown = self._show_state(shown)
                if done:
                    return self.results()
                time.sleep(_TICK_SECONDS)
        except KeyboardInterrupt:
            logger.warning(
                "job %s goes on without this terminal. Watch it with 'tail -f %s', cancel it with "
                "'scancel %s'",
                self.job_id,
                files.stdout,
                self.job_id,
            )
            raise SystemExit(130) from None
        finally:
            for output in outputs:
                output.copy()
                output.close()

    def _show_state(self, shown: str) -> str:
        line = _describe(self.get_info(mode="standard"))
        if line and line != shown:
            logger.info("job %s is %s", self.job_id, line)
        return line or shown


class _Tail:
    """Copies what is appended to a file, from where it stood before."""

    def __init__(self, path: Path, target: Any) -> None:
        self._path = path
        self._target = target
        self._stream: BinaryIO | None = None

    def copy(self) -> bool:
        """Copies what is new; True if there was something."""
        if self._stream is None:
            if not self._path.exists():
                return False
            self._stream = self._path.open("rb")
        new = self._stream.read()
        if new:
            self._target.write(new.decode(errors="replace"))
            self._target.flush()
        return bool(new)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _describe(info: dict[str, str]) -> str:
    """A job's state in words: what, where or why, and how often it was restarted."""
    state, restarts = info.get("State", "").lower(), int(info.get("Restarts", "0"))
    if state == "pending":
        word = "requeued, pending" if restarts else "pending"
        return f"{word} ({info.get('Reason', 'None')})"
    if state == "running":
        again = f", restart {restarts}" if restarts else ""
        return f"running on {info.get('NodeList', '?')}{again}"
    return state.replace("_", " ")
