"""What is done once per run: a first ``trial.run`` of one step and the next ones, beside DDP."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torchbearer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import CASES, Case
from torchbearer_ddp import barrier, data_parallel, run_distributed


def run(names: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds of the first and of later runs of one step each, medians over fresh Trials."""
    nothing = argparse.Namespace()
    options: dict[str, Any] = {"options": nothing, "nproc_per_node": 2}
    return {
        CASES[name].title: run_distributed(_measure, (name, rounds), **options)[0] for name in names
    }


def _measure(name: str, rounds: int) -> dict[str, dict[str, float]]:
    case = CASES[name]
    times: dict[str, list[list[float]]] = {"ours": [], "DDP": [], "no exchange": []}
    for number in range(rounds + 1):
        for way, found in times.items():
            barrier("the benchmark")
            mine = _runs(case, way)
            if number:  # the first round also pays for imports
                found.append(mine)
    return {
        way: {
            "first": statistics.median(each[0] for each in found),
            "second": statistics.median(each[1] for each in found),
            "third": statistics.median(each[2] for each in found),
        }
        for way, found in times.items()
    }


def _runs(case: Case, way: str) -> list[float]:
    """Milliseconds of three runs of one step in a fresh Trial, its construction in the first."""
    torch.manual_seed(0)
    model = case.build()
    x, y = case.batch()
    started = time.perf_counter()
    if way == "DDP":
        model = DistributedDataParallel(model)
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 1e-3),
        case.criterion,
        callbacks=data_parallel() if way == "ours" else [],
        verbose=0,
    )

    def load(state: Any) -> None:
        state[torchbearer.X], state[torchbearer.Y_TRUE] = x, y

    trial.with_loader(load).for_train_steps(1)
    found = []
    for epochs in range(1, 4):
        trial.run(epochs)
        found.append(1000 * (time.perf_counter() - started))
        barrier("the next run")
        started = time.perf_counter()
    return found


if __name__ == "__main__":
    for title, ways in run(["mlp", "deep", "wide"], 5).items():
        for way, found in ways.items():
            print(f"{title:22} {way:12}", {k: round(v, 1) for k, v in found.items()})
