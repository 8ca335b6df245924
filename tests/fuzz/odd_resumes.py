"""Resumes from checkpoints whose checksums are right, and that hold something odd at one place.

Each place of a file, and of what a rank has for itself, with each odd value, in a folder that also
has an older good file: the run continues from one of the two, or says why it does not.
"""

from __future__ import annotations

import functools
import random
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchbearer.callbacks import EarlyStopping, LambdaLR
from torchbearer.callbacks.torch_scheduler import TorchScheduler

from tests.fuzz.targets import ODD, places, replaced
from tests.programs import assert_same, build, outcome
from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints import file
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import collectives, wire

STEPS = 3
EPOCHS = 2
NEWEST, OLDER = "step-0000009.pt", "step-0000008.pt"
SECTION, RANKS = "torchbearer_ddp", "ranks"
#: What cannot be told from a file of a newer version, or from metrics that the user has renamed;
#: and what only the next batch can tell: whether gathered rows have its shape.
REFUSED = re.compile(
    "has format .*, but this version|metrics are not those of the run that saved"
    "|the metrics failed when they were first used with what it holds of them"
)


def trial(*callbacks: Any) -> Any:
    """One with every kind of state, and schedulers that exist only after the start."""
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
    return build(
        EarlyStopping("running_loss", patience=99, step_on_batch=True),
        TorchScheduler(plateau, monitor="loss"),
        LambdaLR(lambda step: 1 / (1 + step), step_on_batch=True),
        *callbacks,
        steps=STEPS,
    )


@dataclass(frozen=True)
class Case:
    """One odd value; ``rank`` is whose own part it is in, None for what is of all ranks."""

    rank: int | None
    path: tuple[Any, ...]
    value: int

    def put_into(self, payload: Any) -> Any:
        odd = ODD[self.value]
        if self.rank is None:
            return replaced(payload, self.path, odd)
        place = (SECTION, RANKS, self.rank, "packed")
        part = replaced(own_part(payload, self.rank), self.path, odd)
        return replaced(payload, place, wire.encode(part))


def own_part(payload: Any, rank: int) -> Any:
    return wire.decode(payload[SECTION][RANKS][rank]["packed"])


def cases(payload: Any) -> Iterator[Case]:
    """All of them; of the ranks, the last one's own part."""
    last = len(payload[SECTION][RANKS]) - 1
    for rank, found in ((None, payload), (last, own_part(payload, last))):
        for path in places(found):
            for value in range(len(ODD)):
                yield Case(rank, path, value)


def sweep(folder: Path, step: int, count: int) -> Counter[str]:
    """How so many of the cases end, the same ones each time; to be called on every rank.

    Raises:
        AssertionError: If one ends in another way than it may.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial(Checkpoint(folder / "run", every_steps=1, keep=None)).run(1)
        good = folder / "run" / f"step-{step:07d}.pt"
        payload = file.read(good)
        if collectives.is_rank_zero():
            (folder / "odd").mkdir()
            shutil.copy(good, folder / "odd" / OLDER)
        collectives.barrier()
        expected = resumed(folder / "odd")
        every = list(cases(payload))
        chosen = random.Random(step).sample(every, min(count, len(every)))
        found: Counter[str] = Counter()
        for case in chosen:
            try:
                found[ending(case, payload, folder / "odd", expected)] += 1
            except BaseException as error:
                error.args = (f"{case}: {error!r}",)
                raise
    return found


def ending(case: Case, payload: Any, folder: Path, expected: Any) -> str:
    """Which file a run has continued from, and whether it ended as if nothing were odd."""
    if collectives.is_rank_zero():
        file.write(folder / NEWEST, case.put_into(payload), Label(9, 0, 9))
    collectives.barrier()
    ended = said = None
    try:
        ended = resumed(folder)
    except CheckpointError as error:
        said = str(error)
    if said is not None:
        assert NEWEST in said
        assert "\n" not in said
        assert REFUSED.search(said), said
        return "refused"
    used = (folder / "latest").readlink().name
    assert used in (OLDER, NEWEST)
    if used == OLDER:
        assert_same(ended, expected)
        return "older"
    try:
        assert_same(ended, expected)
    except (AssertionError, RuntimeError):  # another number of the right kind, or several
        return "newest, with another value"
    return "newest"


def resumed(folder: Path) -> Any:
    made = trial(Checkpoint(folder, every_epochs=None, monitor=None))
    made.run(EPOCHS)
    return outcome(made)
