"""The memory of a rank in each way: every way in processes of its own, and nothing is timed."""

from __future__ import annotations

import os
import statistics
import threading
from typing import Any

from benchmarks import meter, models, one_host, steps
from torchbearer_ddp import barrier, run_distributed
from torchbearer_ddp.group import collectives

STEPS = 10
_SAMPLE_SECONDS = 0.002


def run(cases: list[models.Case], worlds: list[int]) -> list[dict[str, Any]]:
    """Megabytes of a rank at the highest, in each way, and ours over DDP's thriftiest setting."""
    tables = []
    for world in worlds:
        for case in cases:
            found = {
                way: run_distributed(
                    _megabytes, (way, case), nproc_per_node=world, launcher="spawn"
                )[0]
                for way in one_host.FEW
            }
            least = min(found[way] for way in steps.DDP)
            ratio = found[one_host.SHM] / least
            tables.append(
                {"model": case.title, "ranks": world, "megabytes": found, "ours / DDP": ratio}
            )
    return tables


def _megabytes(way: str, case: models.Case) -> float:
    """The mean over the ranks of the most that each had."""
    take = steps.in_a_loop(way, case)
    take(2)
    barrier("the first steps")
    over = threading.Event()
    peak = 0

    def look() -> None:
        nonlocal peak
        while not over.wait(_SAMPLE_SECONDS):
            peak = max(peak, meter.own_bytes(os.getpid()))

    looking = threading.Thread(target=look)
    looking.start()
    take(STEPS)
    over.set()
    looking.join()
    peak = max(peak, meter.own_bytes(os.getpid()))
    return statistics.mean(collectives.all_gather(peak, "the memory")) / 1e6
