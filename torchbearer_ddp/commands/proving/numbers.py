"""The report of a proof for programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torchbearer_ddp.commands.proving.comparison import LIMIT, Comparison, Difference
from torchbearer_ddp.commands.proving.proof import Proof
from torchbearer_ddp.group.join import versions


def of(proof: Proof) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return {
        "equal": proof.is_equal,
        "job": dataclasses.asdict(proof.job),
        "limit": LIMIT,
        "seconds": round(proof.seconds, 1),
        "versions": versions(),
        "reasons": [dataclasses.asdict(each) for each in proof.reasons],
        "notes": proof.notes,
        "lines": proof.lines,
        **_of_comparison(proof.comparison),
        "explained": proof.explained and _of_comparison(proof.explained),
    }


def _of_comparison(comparison: Comparison) -> dict[str, Any]:
    first = comparison.first
    return {
        "steps": comparison.steps,
        "problems": comparison.problems,
        "first": None if first is None else _of_difference(first),
        "differences": [_of_difference(each) for each in comparison.differences],
    }


def _of_difference(difference: Difference) -> dict[str, Any]:
    fields = {**dataclasses.asdict(difference), "ratio": difference.ratio}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
