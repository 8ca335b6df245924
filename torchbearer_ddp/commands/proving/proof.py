"""The proof: the runs, their comparison, the reasons of a difference, and what is to be said."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchbearer_ddp.commands.proving.comparison import Comparison, compare, unreproducible
from torchbearer_ddp.commands.proving.job import BATCH_NORM, LOSS, RANDOM, Job
from torchbearer_ddp.commands.proving.reasons import Evidence, Reason, find_reasons
from torchbearer_ddp.commands.words import listing
from torchbearer_ddp.errors import DistributedError

Recording = dict[str, Any]
#: What one process can take over from the ranks.
_IMITATED = {BATCH_NORM: "the BatchNorm", RANDOM: "the random numbers", LOSS: "the losses"}


class CouldNotRun(DistributedError):
    """A run of the script has failed before it could be compared."""


class Runner(Protocol):
    """What can run a job.

    Attributes:
        lines: What this package said on the ranks.
    """

    lines: list[str]

    def ranks(self, job: Job) -> list[Recording]:
        """Runs a job on its ranks."""

    def alone(self, job: Job, what: str) -> Recording:
        """Runs a job in one process."""


@dataclass
class Proof:
    """What came of it.

    Attributes:
        job: What was run.
        comparison: How far the ranks are from one process.
        reasons: Why they differ, if they do.
        notes: What else there is to know, as sentences.
        lines: What this package said on the ranks.
        explained: How far the ranks are from one process that imitates them in what the reasons
            say, if it is equal to them then.
        seconds: How long it took.
    """

    job: Job
    comparison: Comparison
    reasons: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    explained: Comparison | None = None
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        """True if all differences are rounding."""
        return self.comparison.is_equal


def prove(runner: Runner, job: Job, roundings: int) -> Proof:
    """Runs the script on both sides and compares them."""
    began = time.monotonic()
    ranks = runner.ranks(job)
    alone = runner.alone(job, "one process with the batches of all ranks")
    repeat = runner.alone(job, "the same once more")
    rounded = _rounded(runner, job, roundings)
    changing = unreproducible(alone, repeat)
    if changing is not None:
        rounded = []  # what they show is not rounding
    comparison = compare(ranks, alone, rounded)
    if changing is not None:
        comparison.problems.append(f"{changing} is another one each time one process runs")
    if comparison.is_equal and (errors := _errors(ranks, alone)):
        (where, error), *_ = errors
        raise CouldNotRun(f"{job.script} failed {where}, which were equal: {error}")
    proof = Proof(job, comparison, notes=_notes(job, ranks, alone), lines=runner.lines)
    if not proof.is_equal:

        def imitate(kinds: tuple[str, ...]) -> Comparison:
            every = tuple(dict.fromkeys([*job.imitates, *kinds]))
            changed = dataclasses.replace(job, imitates=every)
            what = f"one process with {listing([_IMITATED[kind] for kind in kinds])} of the ranks"
            try:
                imitating = runner.alone(changed, what)
                found = compare(ranks, imitating, _rounded(runner, changed, roundings))
            except CouldNotRun as error:  # the script was not made for that
                return Comparison(problems=[str(error)])
            if found.is_equal:
                proof.explained = found
            return found

        evidence = Evidence(ranks, alone, changing, comparison)
        proof.reasons = find_reasons(evidence, imitate)
    proof.seconds = time.monotonic() - began
    return proof


def _rounded(runner: Runner, job: Job, roundings: int) -> list[Recording]:
    """One process from parameters that differ by rounding, so many times."""
    return [
        runner.alone(
            dataclasses.replace(job, rounding=number),
            f"one process from parameters changed by rounding ({number} of {roundings})",
        )
        for number in range(1, roundings + 1)
    ]


def _errors(ranks: Sequence[Recording], alone: Recording) -> list[tuple[str, str]]:
    """Where the script has failed after some steps, and with what."""
    found = []
    for where, recordings in (("on the ranks", ranks), ("in one process", [alone])):
        failed = [each for each in recordings if "error" in each]
        if failed:
            steps = len(failed[0]["steps"])
            found.append((f"{where} after {steps} steps", str(failed[0]["error"])))
    return found


def _notes(job: Job, ranks: Sequence[Recording], alone: Recording) -> list[str]:
    """What the reader should know, whatever the result is."""
    notes = [f"the script failed {where}: {error}" for where, error in _errors(ranks, alone)]
    taken = min(len(each["steps"]) for each in (*ranks, alone))
    if taken < job.steps and not notes:
        notes.append(f"the script took {taken} steps, fewer than the {job.steps} asked for")
    facts = alone["facts"]
    if RANDOM in job.imitates and facts["draws_in_step"]:
        notes.append(
            "random layers ran with numbers that belong to the sample (--sample-streams); in "
            "training each rank draws its own"
        )
    if facts["half_precision"]:
        notes.append(
            "MixedPrecision computed in single precision here: half precision rounds each rank's "
            "part of a batch by itself, which is more than what is looked for"
        )
    if facts["data_set_draws"]:
        notes.append(
            "the data set draws random numbers: here they belong to the sample; in training each "
            "rank draws its own"
        )
    return notes
