"""What every peer trains: digits, model, optimizer and epochs; nothing but torch is imported."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

FOLDER = Path(os.environ["PEERS_FOLDER"])
DIGITS = Path(os.environ["PEERS_DIGITS"])
EPOCHS = int(os.environ["PEERS_EPOCHS"])
WORLD = int(os.environ["PEERS_WORLD"])
#: On each process.
BATCH = 32
HELD_OUT_BATCH = 250


def data() -> tuple[TensorDataset, TensorDataset]:
    """The digits to train on, and those held out."""
    x, y, held_out_x, held_out_y = torch.load(DIGITS, weights_only=True)
    return TensorDataset(x, y), TensorDataset(held_out_x, held_out_y)


def build() -> nn.Module:
    """The model, the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Steps:
    """Notes the time of a process's first step, and counts its steps."""

    def __init__(self) -> None:
        self.first = 0.0
        self.count = 0

    def __call__(self) -> None:
        """Notes that a step has been taken."""
        if not self.count:
            self.first = time.time()
        self.count += 1

    def report(self, rank: int, world: int, accuracy: float) -> None:
        """Leaves what the benchmark reads."""
        found = {"world": world, "first": self.first, "steps": self.count, "accuracy": accuracy}
        (FOLDER / f"rank-{rank}.json").write_text(json.dumps(found))
