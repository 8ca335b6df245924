"""Ranks on GPUs, through NCCL: models in every way, in a plain loop and inside a Trial.

Only these models are large enough to be worth a GPU; smaller ones measure the time of a launch.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks import one_host, steps
from benchmarks.models import CASES, Case, mlp_of
from torchbearer_ddp import device, run_distributed


def large() -> list[Case]:
    """The models of a whole run."""
    return [CASES["conv"], CASES["transformer"], CASES["wide"], mlp_of(50_000_000)]


def run(
    cases: list[Case], rounds: int, seconds: float, ranks: int = 2, kind: str = "cuda"
) -> list[dict[str, Any]]:
    """Measures models with a rank on each of so many GPUs; on ``cpu`` it shows that it runs."""
    ways = steps.ways(["nccl" if kind == "cuda" else "gloo"], ["bf16"])
    tables = []
    for place in ("loop", "Trial"):
        found = run_distributed(
            _on_own_device,
            (cases, ways, place, rounds, seconds),
            options=argparse.Namespace(),  # not the flags of a test runner
            nproc_per_node=ranks,
            launcher="spawn",
            device=kind,
        )[0]
        tables += [{"ranks": ranks, "in a": place, **each} for each in found]
    return tables


def _on_own_device(cases: list[Case], *rest: Any) -> list[dict[str, Any]]:
    placed = [dataclasses.replace(case, device=str(device())) for case in cases]
    return one_host.in_all_ways(placed, *rest)
