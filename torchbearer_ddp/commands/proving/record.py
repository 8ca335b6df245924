"""Runs the script of a job in this process, which is a rank, and writes down what it computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from torchbearer_ddp.commands.proving.job import Job
from torchbearer_ddp.commands.proving.outputs import kept_apart
from torchbearer_ddp.commands.proving.recorder import Enough, Recorder, Recording
from torchbearer_ddp.data import randomness
from torchbearer_ddp.launch.script import run_script

Run = Callable[[str, bool], None]


def record(job: Job, folder: str, run: Run = run_script) -> None:
    """Runs a job, and writes the file of this rank also if the script fails."""
    recorder = Recorder(job)
    recording = recorder.recording
    randomness.seed_all(job.seed)
    save = torch.save
    try:
        with kept_apart(Path(folder)), recorder.installed():
            run(job.script, job.is_module)
    except Enough:
        pass
    except SystemExit as end:
        if end.code:
            recording["error"] = f"the script ended with exit code {end.code}"
            raise
    except BaseException as error:
        recording["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        save(recording, file_of(folder, recording["rank"]))


def file_of(folder: str, rank: int) -> Path:
    """The file of what a rank computed."""
    return Path(folder) / f"rank-{rank}.pt"


def read(folder: str, ranks: int) -> list[Recording]:
    """What the ranks of a run have written; fewer if some ended without it."""
    files = [file_of(folder, rank) for rank in range(ranks)]
    return [torch.load(file, weights_only=True) for file in files if file.exists()]
