"""How long a save stops training, against a plain ``torch.save`` of the same model.

    python benchmarks/checkpoint.py [--folder .] [--rounds 9] [--sizes 1 40 160]

Each round saves once in each mode, one after the other, so that all run on the same machine. The
time is that from the end of a step until training goes on. What is written in the background is
waited for between the rounds, outside the measured time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchbearer
from torchbearer.callbacks import on_step_training

from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints.writer import finish_writing

GOALS = {"background": 0.3, "foreground": 1.5}


class Wide(torch.nn.Module):
    """Parameters of a given size in the shapes of an ordinary net, and hardly any computation."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        layer = 2**18  # a megabyte of float32
        count = max(1, round(megabytes))
        self.layers = torch.nn.ParameterList([torch.randn(layer // 512, 512) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layers[0][0, 0]


def seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(megabytes: float, rounds: int, folder: Path) -> dict[str, list[float]]:
    """The seconds of every round, by mode of saving."""
    model = Wide(megabytes)
    options: dict[str, Any] = {"monitor": None, "keep": 1, "every_epochs": None}
    modes = {
        "background": Checkpoint(folder / "background", **options),
        "foreground": Checkpoint(folder / "foreground", background=False, **options),
    }
    times: dict[str, list[float]] = {
        "torch.save": [],
        "torch.save + fsync": [],
        **{mode: [] for mode in modes},
    }

    def trial(name: str) -> torchbearer.Trial:
        @on_step_training
        def save(state: Any) -> None:
            times[name].append(seconds(lambda: modes[name]._save_step(state)))
            finish_writing()
            os.sync()

        made = torchbearer.Trial(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            torch.nn.functional.mse_loss,
            callbacks=[save, modes[name]],
            verbose=0,
        )
        return made.with_train_generator([(torch.zeros(1, 1), torch.zeros(1, 1))])

    trials = [trial(name) for name in modes]
    path = folder / "plain.pt"
    for number in range(1, rounds + 2):
        path.unlink(missing_ok=True)
        times["torch.save"].append(seconds(lambda: torch.save(model.state_dict(), path)))
        os.sync()
        path.unlink()
        times["torch.save + fsync"].append(seconds(lambda: save_durably(model, path)))
        for each in trials:
            each.run(number)
    return {name: values[1:] for name, values in times.items()}  # the first round warms up


def save_durably(model: torch.nn.Module, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="where to write (a temporary folder)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 40, 160], help="in MB")
    options = parser.parse_args()
    print(f"{'MB':>5} {'mode':>20} {'median':>10} {'ratio':>7} {'of fsync':>9}  goal")
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            times = measure(size, options.rounds, Path(folder))
        for name, values in times.items():
            ratio, durable = (
                # Round by round, so that what slows the machine down slows both.
                statistics.median(v / b for v, b in zip(values, times[base], strict=True))
                for base in ("torch.save", "torch.save + fsync")
            )
            goal = GOALS.get(name)
            verdict = "" if goal is None else f"<= {goal}: {'yes' if ratio <= goal else 'NO'}"
            middle = statistics.median(values) * 1000
            print(
                f"{size:5g} {name:>20} {middle:7.1f} ms {ratio:6.2f}x {durable:8.2f}x  {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
