"""Runs the programs of this folder: as they are, moved by two lines, killed, and resumed.

A program is a plain script of one process, which leaves what it has come to in ``outcome``. It is
run by its text, so that what differs between two runs is in sight.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import runpy
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchbearer
from torchbearer.callbacks import Callback

from tests.ranks import RankPool
from torchbearer_ddp import Checkpoint

FOLDER = Path(__file__).parent / "programs"
PROGRAMS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))
IMPORT = "from torchbearer_ddp import data_parallel\n"
#: Where a program keeps its files, and what a killed one needs to know.
_FOLDER, _CHECKPOINTS, _KILL = "PROJECT_FOLDER", "PROJECT_CHECKPOINTS", "PROJECT_KILL_BEFORE"
_TRIAL = "from torchbearer import Trial\n"


# The text of a program.


def plain(name: str) -> str:
    """The program as it was written for one process."""
    return (FOLDER / f"{name}.py").read_text()


def moved(name: str, arguments: str = "global_batch=True", more: str = "") -> str:
    """The program with the import and the callbacks, which are all that a user adds.

    Args:
        name: The program.
        arguments: What ``data_parallel`` is given.
        more: Further items of the list of callbacks, for a run that is killed.
    """
    lines = plain(name).splitlines(keepends=True)
    lines.insert(lines.index(_TRIAL) + 1, IMPORT)
    addition = f"*data_parallel({arguments}),{more}\n"
    for number, line in enumerate(lines):
        indent = re.match(" *", line)[0]  # type: ignore[index]
        if line.strip() == "callbacks=[":
            lines.insert(number + 1, f"{indent}    {addition}")
            break
        if line.strip() == "verbose=0,":  # the last argument of a Trial without callbacks
            lines.insert(number, f"{indent}callbacks=[{addition.rstrip().removesuffix(',')}],\n")
            break
    return "".join(lines)


def saved(name: str, arguments: str) -> str:
    """The moved program with a checkpoint, and an end that comes when the test says so."""
    text = moved(name, arguments, more=" *interruptions(),")
    return text.replace(IMPORT, f"{IMPORT}from tests.projects.moving import interruptions\n")


# What a rank does.


@dataclass
class Run:
    """What came of one program on one rank."""

    outcome: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What was trained."""
        return dict(_flat("trained", self.outcome["trained"]))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each epoch, without those that are only a preview of the pass."""
        return [
            {k: v for k, v in epoch.items() if not k.startswith("running_") and "steps" not in k}
            for epoch in self.outcome["metrics"]
        ]


def execute(text: str, folder: str, variables: dict[str, str] | None = None) -> Run:
    """Runs a program in this process, as if it were the first that runs in it."""
    torch.set_num_threads(1)
    path = Path(folder) / f"program-{os.getpid()}.py"
    path.write_text(text)
    keys = torchbearer.state.__keys__
    known = len(keys)
    Kill.steps = 0
    interruptions.calls = 0  # type: ignore[attr-defined]
    variables = {_FOLDER: folder, **(variables or {})}
    with _said() as lines, mock.patch.dict(os.environ, variables), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outcome = runpy.run_path(str(path), run_name="__main__")["outcome"]
        finally:
            del keys[known:]  # else a second program's keys get other names
            path.unlink()
    return Run(copy.deepcopy(outcome), lines)


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """The lines that the library shows on this rank."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("torchbearer_ddp"), Keep()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Kill(Callback):
    """Ends the process for good before a given step, counted over all Trials of the program."""

    steps = 0

    def on_sample(self, state: Any) -> None:
        if str(Kill.steps) == os.environ.get(_KILL):
            os.kill(os.getpid(), signal.SIGKILL)
        Kill.steps += 1


def interruptions() -> list[Any]:
    """A checkpoint after every second step, in a folder for each Trial of the program."""
    interruptions.calls += 1  # type: ignore[attr-defined]
    folder = Path(os.environ[_CHECKPOINTS]) / f"trial-{interruptions.calls}"  # type: ignore[attr-defined]
    return [Checkpoint(folder, every_steps=2, background=False, monitor=None), Kill()]


# One process whose arithmetic is known to be that of several ranks.


def with_criterion_of(ranks: int, text: str, folder: str) -> Run:
    """Runs a program with the average of the losses that so many ranks would have."""
    trial = torchbearer.Trial

    def build(model: Any, optimizer: Any, criterion: Any, *args: Any, **kwargs: Any) -> Any:
        def of_all(state: Any) -> Any:
            parts = [_part(state, rank, ranks) for rank in range(ranks)]
            return sum(_loss(criterion, part) for part in parts) / ranks

        return trial(model, optimizer, of_all, *args, **kwargs)

    with mock.patch.object(torchbearer, "Trial", build):
        return execute(text, folder)


def _part(state: Any, rank: int, ranks: int) -> Any:
    """The samples that one rank has of a batch: it takes turns with the others."""
    part = copy.copy(state)
    for key in (torchbearer.X, torchbearer.Y_TRUE, torchbearer.Y_PRED):
        value = state[key]
        cut = [each[rank::ranks] for each in (value if _is_list(value) else [value])]
        part[key] = cut if _is_list(value) else cut[0]
    return part


def _loss(criterion: Any, state: Any) -> Any:
    try:
        return criterion(state)
    except TypeError:
        found = state[torchbearer.Y_PRED]
        return criterion(*(found if _is_list(found) else [found]), state[torchbearer.Y_TRUE])


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def with_splits(splits: list[Any], text: str, folder: str) -> Run:
    """Runs a program whose random splits are these."""
    coming = iter(splits)

    def split(data: Any, lengths: Any) -> Any:
        return [torch.utils.data.Subset(data, indices) for indices in next(coming)]

    with mock.patch.object(torch.utils.data, "random_split", split):
        return execute(text, folder)


# Comparisons.


def _flat(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if torch.is_tensor(value):
        yield name, value
    else:
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)


def difference(found: Run, expected: Run) -> float:
    """The largest difference of a parameter, relative to the largest value of its tensor."""
    assert found.tensors.keys() == expected.tensors.keys()
    return max(
        float((found.tensors[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
        for name, value in expected.tensors.items()
    )


def same_bits(found: Run, expected: Run) -> bool:
    """True if every parameter and every metric of every epoch is the same number."""
    return found.metrics == expected.metrics and all(
        torch.equal(found.tensors[name], value) for name, value in expected.tensors.items()
    )


Runner = Callable[..., list[Run]]


@contextlib.contextmanager
def runner(world_size: int) -> Iterator[Runner]:
    """Ranks that run one program after another."""
    with RankPool(world_size) as pool:

        def run(body: Callable[..., Run], *args: Any) -> list[Run]:
            return pool.run(body, args, timeout=90)

        yield run
