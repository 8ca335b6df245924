"""What is done once: the first ``trial.run`` of one step and the next ones, the end of an epoch."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torchbearer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import steps
from benchmarks.models import CASES, Case
from torchbearer_ddp import barrier, data_parallel, run_distributed
from torchbearer_ddp.group import replicas

#: The epoch whose end is looked at has so many steps.
EPOCH_STEPS = 20


def run(names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of runs of one step each, and of an epoch and the checksums at its end.

    The medians over fresh Trials on two ranks.
    """
    nothing = argparse.Namespace()
    options: dict[str, Any] = {"options": nothing, "nproc_per_node": 2}
    return [run_distributed(_measure, (name, rounds), **options)[0] for name in names]


def sentences(found: list[dict[str, Any]]) -> Iterator[str]:
    """What was found, model by model."""
    for row in found:
        for which, times in row["runs"].items():
            shown = ", ".join(f"{way} {each:.1f} ms" for way, each in times.items())
            yield f"{row['model']}, {which} run of one step: {shown}"
        yield (
            f"{row['model']}, checksums of the replicas: {row['checksums']:.2f} ms, "
            f"{share(row):.1%} of an epoch of {EPOCH_STEPS} steps"
        )


def share(row: dict[str, Any]) -> float:
    """How much of an epoch the checksums of the replicas take."""
    return float(row["checksums"] / row["epoch"])


def _measure(name: str, rounds: int) -> dict[str, Any]:
    return {
        "model": CASES[name].title,
        "runs": _times_of_runs(name, rounds),
        **_end_of_epoch(CASES[name], 4 * rounds),
    }


def _end_of_epoch(case: Case, rounds: int) -> dict[str, float]:
    epoch = steps.in_a_trial("ours, shm", case)
    parameters = list(case.build().named_parameters())
    epochs, checksums = [], []
    for _ in range(rounds):
        barrier("the benchmark")
        epochs.append(1000 * epoch(EPOCH_STEPS))
        barrier("the benchmark")
        started = time.perf_counter()
        replicas.fingerprint(parameters)
        checksums.append(1000 * (time.perf_counter() - started))
    return {"epoch": statistics.median(epochs), "checksums": statistics.median(checksums)}


def _times_of_runs(name: str, rounds: int) -> dict[str, dict[str, float]]:
    case = CASES[name]
    times: dict[str, list[list[float]]] = {"ours": [], "DDP": [], "no exchange": []}
    for number in range(rounds + 1):
        for way, found in times.items():
            barrier("the benchmark")
            mine = _runs(case, way)
            if number:  # the first round also pays for imports
                found.append(mine)
    return {
        which: {way: statistics.median(each[i] for each in found) for way, found in times.items()}
        for i, which in enumerate(("first", "second", "third"))
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
    print("\n".join(sentences(run(["mlp", "deep", "wide", "conv"], 5))))
