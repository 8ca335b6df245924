"""The report of a proof in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchbearer_ddp.commands.proving.comparison import LIMIT, STAGES, Difference
from torchbearer_ddp.commands.proving.proof import Proof
from torchbearer_ddp.commands.proving.reasons import Reason
from torchbearer_ddp.commands.words import table

COMPARED = {
    "start": "model at the start",
    "loss": "loss",
    "gradient": "gradients",
    "parameter": "parameters",
    "metric": "metrics",
}


def verdict(proof: Proof) -> str:
    """The result in one sentence."""
    script, ranks = Path(proof.job.script).name, proof.job.world_size
    steps = f"{proof.comparison.steps} step{'s' * (proof.comparison.steps != 1)}"
    if proof.is_equal:
        return f"{script}: {ranks} ranks are equal to one process over {steps}"
    return f"{script}: {ranks} ranks differ from one process"


def first_differences(proof: Proof) -> Iterator[str]:
    """Where the ranks leave one process."""
    first, tensor = proof.comparison.first, proof.comparison.first_tensor
    if first is not None:
        yield f"first difference: step {first.step}, {described(first)}"
    if tensor is not None and tensor is not first:
        yield f"first tensor: step {tensor.step}, {described(tensor)}"


def described(difference: Difference) -> str:
    """One difference in words."""
    what = {"start": "the parameter", "loss": "the", "metric": "the metric"}
    named = f"{what.get(difference.stage, f'the {difference.stage} of')} {difference.name}"
    return f"{named}, {amount(difference)}"


def amount(difference: Difference) -> str:
    """How large one difference is."""
    return f"{difference.relative:.1e} of its size, {times(difference.ratio)} what rounding does"


def times(ratio: float) -> str:
    """A multiple of rounding."""
    if math.isinf(ratio):
        return "infinitely many times"
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.2g} times"


def lines(proof: Proof) -> Iterator[str]:
    """The whole report."""
    yield verdict(proof)
    yield from (f"  {line}" for line in first_differences(proof))
    yield ""
    yield from table(["step", *columns(proof).values()], rows(proof))
    yield ""
    yield f"  Numbers are multiples of what rounding does; up to {LIMIT:g} is equal, ! is more."
    summary = [(stage, proof.comparison.worst(stage=stage)) for stage in STAGES]
    header = ["", "tensors", "largest difference", "rounding", "multiple", "at step"]
    yield ""
    yield from table(header, [_summary(proof, *each) for each in summary if each[1] is not None])
    if proof.comparison.problems:
        yield from ("", "Not comparable:", *(f"  - {each}" for each in proof.comparison.problems))
    if not proof.is_equal:
        yield ""
        yield "Reasons:" if proof.reasons else NO_REASON
        yield from (f"  - {reason_line(reason)}" for reason in proof.reasons)
        if proof.explained is not None:
            yield f"  {APART_FROM_THAT}"
    if proof.lines and not proof.is_equal:
        yield from ("", "Messages of the ranks:", *(f"  - {line}" for line in proof.lines))
    yield from ("", "Notes:", *(f"  - {note}" for note in notes(proof)))


def reason_line(reason: Reason) -> str:
    """A reason, and whether it is certain."""
    return f"{reason.text}{' (confirmed by a run)' if reason.is_confirmed else ''}"


def notes(proof: Proof) -> list[str]:
    """What else there is to know."""
    return [*proof.notes, _FILES]


APART_FROM_THAT = "Apart from that all differences are rounding."
_FILES = "checkpoints and TensorBoard were off; torch.save wrote to a temporary folder"
NO_REASON = (
    "No reason recognised. Looked at: the model at the start, the data of each step, BatchNorm, "
    "the kind of the loss, random numbers, the optimizers and their settings, and whether the "
    "ranks agree."
)


def columns(proof: Proof) -> dict[str, str]:
    """What there is to compare, and its title."""
    found = {each.stage for each in proof.comparison.differences}
    return {stage: title for stage, title in COMPARED.items() if stage in found}


def rows(proof: Proof) -> Iterator[list[str]]:
    """The largest difference of each step, in multiples of rounding."""
    for step in range(proof.comparison.steps):
        worst = [proof.comparison.worst(step, stage) for stage in columns(proof)]
        yield [str(step), *map(cell, worst)]


def cell(difference: Difference | None) -> str:
    """One multiple of rounding; an exclamation mark before it if that is more than equal."""
    if difference is None:
        return ""
    mark = "" if difference.is_equal else "!"
    return f"{mark}{difference.ratio:.2f}" if difference.ratio < 100 else f"!{difference.ratio:.1e}"


def _summary(proof: Proof, stage: str, worst: Any) -> list[str]:
    names = {each.name for each in proof.comparison.differences if each.stage == stage}
    shown = (f"{worst.relative:.1e}", f"{worst.relative_rounding:.1e}", cell(worst))
    return [COMPARED[stage], str(len(names)), *shown, str(worst.step)]
