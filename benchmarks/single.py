"""What ``data_parallel()`` costs in a single process, against the plain Trial."""

from __future__ import annotations

from typing import Any

import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import measure, models, steps
from benchmarks.models import Case
from torchbearer_ddp import data_parallel

PLAIN, OURS = "plain Trial", "with data_parallel()"


def run(rounds: int, seconds: float) -> dict[str, Any]:
    """Measures both, interleaved."""
    case = models.CASES["mlp"]
    results = measure.interleaved(case, [PLAIN, OURS], _trial, rounds=rounds, seconds=seconds)
    plain, ours = (each["milliseconds"] for each in results)
    return {"model": case.title, "results": results, "ratio": ours / plain}


def _trial(way: str, case: Case) -> steps.Steps:
    torch.manual_seed(0)
    model = case.build()
    clock = steps.Clock()
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 1e-3),
        case.criterion,
        ["acc", "loss"],
        [clock, *(data_parallel() if way == OURS else [])],
        verbose=0,
    )
    trial.with_train_generator(DataLoader(TensorDataset(*case.batch()), batch_size=32))

    def run(count: int) -> float:
        trial.for_train_steps(count + steps.Clock.WARM_UP)
        trial.state[torchbearer.HISTORY].clear()
        trial.run(1)
        return clock.seconds

    return run
