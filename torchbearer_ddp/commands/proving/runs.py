"""Starts the runs of a proof, in processes of their own, and reads what they recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchbearer_ddp.commands import children
from torchbearer_ddp.commands.proving.job import Job
from torchbearer_ddp.commands.proving.proof import CouldNotRun
from torchbearer_ddp.commands.proving.record import read
from torchbearer_ddp.commands.proving.recorder import Recording

_MODULE = "torchbearer_ddp.commands.proving.process"
_PREFIX = "torchbearer_ddp-prove-"
#: How much of a failed run's output is shown.
_LAST_LINES = 30


class Runs:
    """The runs of one proof.

    Args:
        folder: Where the runs leave their files.
        launch: Arguments of ``run_distributed``.
        say: Called with what is run next.
    """

    def __init__(self, folder: Path, launch: dict[str, Any], say: Callable[[str], None]) -> None:
        self._folder, self._launch, self._say = folder, launch, say
        self._count = 0
        self._server = _start("alone", None)
        self._to_server: Any = self._server.stdin
        self._from_server: Any = self._server.stdout
        #: What the library says on the ranks.
        self.lines: list[str] = []

    def close(self) -> None:
        """Ends the process that waits for further runs."""
        with contextlib.suppress(OSError):  # it has ended already
            self._to_server.close()
        children.end(self._server)  # with a run that it has forked, after a signal

    def ranks(self, job: Job) -> list[Recording]:
        """Runs a job on its ranks."""
        self._say(f"running {job.steps} steps on {job.world_size} ranks")
        task, log = self._task(job)
        with log.open("w") as output:
            launcher = _start("ranks", output)
            with children.ended_afterwards(launcher):
                launcher.communicate(json.dumps(task) + "\n")
        mark = "torchbearer_ddp: "
        lines = log.read_text(errors="replace").splitlines()
        self.lines = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        found = read(task["folder"], job.world_size)
        what = f"{job.script} on {job.world_size} ranks"
        return self._checked(what, found, job.world_size, launcher.returncode, log)

    def alone(self, job: Job, what: str) -> Recording:
        """Runs a job in one process."""
        self._say(f"running {what}")
        task, log = self._task(job)
        self._to_server.write(json.dumps(task) + "\n")
        self._to_server.flush()
        answer = self._from_server.readline()
        found = read(task["folder"], 1)
        return self._checked(f"{job.script} in {what}", found, 1, int(answer or 1), log)[0]

    def _task(self, job: Job) -> tuple[dict[str, Any], Path]:
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir()
        log = folder / "output.txt"
        fields = {"job": dataclasses.asdict(job), "folder": str(folder), "log": str(log)}
        return {**fields, "launch": self._launch}, log

    def _checked(
        self, what: str, found: list[Recording], ranks: int, code: int, log: Path
    ) -> list[Recording]:
        """The recordings, if there are steps to compare."""
        if len(found) == ranks and all(each["steps"] for each in found):
            return found
        if not code:
            raise CouldNotRun(
                f"{what} ended without a training step of a Trial with callbacks of this package. "
                "Add *data_parallel() to the callbacks of the Trial."
            )
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        shown = "\n".join(f"  {line}" for line in lines)
        raise CouldNotRun(f"{what} failed before its first step. The end of its output:\n{shown}")


def _start(mode: str, output: Any) -> subprocess.Popen[str]:
    """Starts a process of the proof; its standard output is that of the script, or an answer."""
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, mode, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if output is None else output,
        stderr=None if output is None else subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@contextmanager
def started(launch: dict[str, Any], say: Callable[[str], None]) -> Iterator[Runs]:
    """The runs of a proof, whose files are removed at the end."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        runs = Runs(Path(folder), launch, say)
        try:
            yield runs
        finally:
            runs.close()
