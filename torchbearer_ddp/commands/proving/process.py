"""The processes of a proof: one that starts the ranks, and one that forks for each single run.

``python -m torchbearer_ddp.commands.proving.process ranks`` reads one line of JSON and ends with
the ranks. ``... alone`` reads a line for each run and answers with its exit code: it has imported
torch already, so that a run costs only what the script takes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torchbearer_ddp.commands.proving.job import Job
from torchbearer_ddp.commands.proving.record import record
from torchbearer_ddp.group import failures
from torchbearer_ddp.launch.child import die_with
from torchbearer_ddp.launch.run import run_distributed


def run_ranks(task: dict[str, Any]) -> None:
    """Runs a job on several ranks of this host."""
    job = _prepare(task)
    run_distributed(record, (job, task["folder"]), seed=job.seed, **task["launch"])


def run_alone(task: dict[str, Any]) -> int:
    """Runs a job in one process, which is forked from this one; returns its exit code."""
    server, child = os.getpid(), os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    die_with(server)
    code = 1
    try:
        _redirect(task["log"])
        job = _prepare(task)
        flags = {k: v for k, v in task["launch"].items() if k != "nproc_per_node"}
        run_distributed(record, (job, task["folder"]), launcher="inline", seed=job.seed, **flags)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    failures.exit_now(code)
    return code


def _prepare(task: dict[str, Any]) -> Job:
    """Makes the command line and the path those of the script."""
    job = Job(**task["job"])
    sys.argv[:] = [job.script, *job.arguments]
    folder = Path.cwd() if job.is_module else Path(job.script).resolve().parent
    sys.path[0] = str(folder)
    return job


def _redirect(log: str) -> None:
    """Sends what the script prints to a file, and gives it nothing to read."""
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT)
    for descriptor, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, descriptor)


def main(mode: str) -> None:
    """Reads what to run from the standard input."""
    if mode == "alone":
        importlib.import_module("torch._dynamo")  # else the first optimizer would, in every run
    for line in sys.stdin:
        task = json.loads(line)
        if mode == "ranks":
            run_ranks(task)
            return
        print(run_alone(task), flush=True)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:  # the command says so
        raise SystemExit(130) from None
