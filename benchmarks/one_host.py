"""Ranks of one host: every model in every way, in a plain loop and inside a Trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, models, steps
from torchbearer_ddp import run_distributed, world_size

TRANSPORTS = ["gloo", "shm"]
#: The ways that matter most.
SHM = "ours, shm"
FEW = [steps.LOCAL, *steps.DDP, SHM]
#: By the number of ranks the threads of each. (24 and more on two cores take minutes for a model.)
THREADS = {2: [1, 2, 3, 4], 3: [1, 2, 3, 4], 8: [1, 2]}
#: What all of those take for each parameter: it, its gradient and, mostly, a bucket.
_BYTES = 4 * (2 + 3 + 2 + 3 + 3)


def run(
    names: list[str],
    worlds: list[int],
    rounds: int,
    seconds: float,
    others: tuple[int, ...] = (),
) -> list[dict[str, Any]]:
    """Measures the named models with each number of ranks, on CPUs.

    With the other numbers of ranks only the fewest ways are measured, in a Trial.
    """
    cases = [models.CASES[name] for name in names]
    everything = steps.ways(TRANSPORTS, [])
    wanted = [(world, place, everything) for world in worlds for place in ("loop", "Trial")]
    wanted += [(world, "Trial", FEW) for world in others]
    tables = []
    for world, place, ways in wanted:
        found = run_distributed(
            in_all_ways,
            (cases, ways, place, rounds, seconds),
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
        fit = [size for size in sizes if size * world * _BYTES < 0.7 * _available_bytes()]
        found = run_distributed(
            _measure_sizes, (fit, rounds, seconds), nproc_per_node=world, launcher="spawn"
        )[0]
        tables += [{"ranks": world, **each} for each in found]
    return tables


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(each for each in lines if each.startswith("MemAvailable")).split()[1])


def threads(
    names: list[str], threads: dict[int, list[int]], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Measures the named models with numbers of threads, given by the number of ranks."""
    tables = []
    for world, counts in threads.items():
        tables += run_distributed(
            _measure_threads,
            (names, counts, rounds, seconds),
            nproc_per_node=world,
            launcher="spawn",
        )[0]
    return tables


def _measure_threads(
    names: list[str], threads: list[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    found = []
    for count in threads:
        torch.set_num_threads(count)
        for each in in_all_ways([models.CASES[n] for n in names], FEW, "loop", rounds, seconds):
            found.append({"ranks": world_size(), "threads": count, **each})
    return found


def _measure_sizes(sizes: list[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    found = []
    for size in sizes:
        ways = [steps.LOCAL, *steps.DDP, "ours, auto"]
        results = measure.interleaved(
            models.mlp_of(size), ways, steps.in_a_loop, rounds=rounds, seconds=seconds
        )
        found.append({"parameters": size, "results": results, "ratios": measure.ratios(results)})
    return found
