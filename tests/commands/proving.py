"""Proofs on ranks that are there already: what the command does, without its processes."""

from __future__ import annotations

import runpy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torchbearer

from tests.ranks import RankPool
from torchbearer_ddp.commands.proving.job import Job
from torchbearer_ddp.commands.proving.proof import CouldNotRun
from torchbearer_ddp.commands.proving.record import read, record
from torchbearer_ddp.launch import rank


class PoolRunner:
    """Runs the jobs of proofs on pools of ranks, by the number of ranks.

    Args:
        folder: Where scripts and recordings are.
        pools: The ranks.
    """

    def __init__(self, folder: Path, pools: dict[int, RankPool]) -> None:
        self._folder, self._pools = folder, pools
        self.lines: list[str] = []

    def script(self, text: str) -> str:
        """The path of a script."""
        path = Path(tempfile.mkdtemp(dir=self._folder)) / "script.py"
        path.write_text(text)
        return str(path)

    def ranks(self, job: Job) -> list[Any]:
        """Runs a job on its ranks."""
        return self._run(job, job.world_size)

    def alone(self, job: Job, what: str) -> Any:
        """Runs a job in one process."""
        return self._run(job, 1)[0]

    def _run(self, job: Job, ranks: int) -> list[Any]:
        folder, error = tempfile.mkdtemp(dir=self._folder), ""
        try:
            self._pools[ranks].run(_record, (job, folder), timeout=90)
        except AssertionError as failed:
            error = str(failed)
        found = read(folder, ranks)
        if len(found) < ranks or not all(each["steps"] for each in found):
            raise CouldNotRun(error)
        return found


def _record(job: Job, folder: str) -> None:
    torch.set_num_threads(1)
    keys = torchbearer.state.__keys__
    known = len(keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank.script_is_a_rank("a test")
        try:
            record(job, folder, lambda path, _: runpy.run_path(path, run_name="__main__"))
        finally:
            rank._Script.started_by = None
            del keys[known:]  # else a second script's keys get other names
