"""One training of fifty steps, an evaluation and a prediction, for one process or for N ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

from torchbearer_ddp.callbacks.parallel import data_parallel
from torchbearer_ddp.group import collectives

STEPS = 50
GLOBAL_BATCH = 16


def train_and_predict(optimizer_name: str, transport: str = "auto") -> dict[str, Any]:
    """Trains on the device of this rank; what is returned is on the CPU."""
    torch.manual_seed(0)
    data = torch.randn(STEPS * GLOBAL_BATCH, 10), torch.randint(0, 4, (STEPS * GLOBAL_BATCH,))
    evaluated = TensorDataset(torch.randn(103, 10), torch.randint(0, 4, (103,)))
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[optimizer_name](model.parameters())
    trial = Trial(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=data_parallel(transport=transport),
        verbose=0,
    )
    batch = GLOBAL_BATCH // collectives.world_size()
    trial.with_generators(
        DataLoader(TensorDataset(*data), batch),
        DataLoader(evaluated, 8),
        DataLoader(evaluated, 8),
    )
    history = trial.to(collectives.device()).run(1)
    return {
        "parameters": [p.detach().cpu().clone() for p in model.parameters()],
        "history": history,
        "evaluated": trial.evaluate(verbose=0),
        "predicted": trial.predict(verbose=0).cpu(),
    }


def assert_equal(results: Sequence[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Every rank has the parameters, metrics and predictions of one process."""
    for result in results:
        for mine, one in zip(result["parameters"], alone["parameters"], strict=True):
            assert (mine - one).abs().max() <= 1e-6
        for name in ("acc", "loss", "val_acc", "val_loss"):
            assert result["history"][0][name] == pytest.approx(alone["history"][0][name], abs=1e-6)
        for name, value in alone["evaluated"].items():
            assert result["evaluated"][name] == pytest.approx(value, abs=2e-6), name
        assert torch.allclose(result["predicted"], alone["predicted"], atol=1e-5)
        assert result["predicted"].shape == (103, 4)
