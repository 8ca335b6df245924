"""Ranks of one host: every model in every way, in a plain loop and inside a Trial."""

from __future__ import annotations

from typing import Any

from benchmarks import measure, models, steps
from torchbearer_ddp import run_distributed

TRANSPORTS = ["gloo", "shm"]
#: Parameters over all ranks, beyond which every way's own copies do not fit an ordinary machine.
MOST_PARAMETERS = 200_000_000


def run(names: list[str], worlds: list[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures the named models with each number of ranks, on CPUs."""
    tables = []
    for world in worlds:
        for place in ("loop", "Trial"):
            cases = [models.CASES[name] for name in names]
            found = run_distributed(
                in_all_ways,
                (cases, steps.ways(TRANSPORTS, []), place, rounds, seconds),
                nproc_per_node=world,
                launcher="spawn",
            )[0]
            tables += [{"ranks": world, "in a": place, **each} for each in found]
    return tables


def in_all_ways(
    cases: list[models.Case], ways: list[str], place: str, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Measures models on this rank, in a plain loop or in a Trial."""
    prepare = steps.in_a_loop if place == "loop" else steps.in_a_trial
    found = []
    for case in cases:
        results = measure.interleaved(case, ways, prepare, rounds=rounds, seconds=seconds)
        found.append({"model": case.title, "results": results, "ratios": measure.ratios(results)})
    return found


def scaling(
    sizes: list[int], worlds: list[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Step time against the number of parameters and of ranks."""
    tables = []
    for world in worlds:
        fit = [size for size in sizes if size * world <= MOST_PARAMETERS]
        found = run_distributed(
            _measure_sizes, (fit, rounds, seconds), nproc_per_node=world, launcher="spawn"
        )[0]
        tables += [{"ranks": world, **each} for each in found]
    return tables


def _measure_sizes(sizes: list[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    found = []
    for size in sizes:
        ways = [steps.LOCAL, *steps.DDP, "ours, auto"]
        results = measure.interleaved(
            models.mlp_of(size), ways, steps.in_a_loop, rounds=rounds, seconds=seconds
        )
        found.append({"parameters": size, "results": results, "ratios": measure.ratios(results)})
    return found
