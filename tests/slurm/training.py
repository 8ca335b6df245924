"""Workers for the cluster's tests: a short training whose every bit counts, and simpler ones."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torchbearer
from torchbearer.callbacks import Callback

from torchbearer_ddp import Checkpoint, data_parallel
from torchbearer_ddp.group import collectives, stop_request

_PATIENCE = 120.0


def restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


class Hold(Callback):
    """Waits at certain steps until a signal comes, or the end; at each place once.

    Args:
        places: The steps to wait after, each counted from a start of the job.
        marks: The folder in which each rank says that it has come to a place.
    """

    def __init__(self, places: list[int], marks: Path) -> None:
        super().__init__()
        named = [(s, marks / f"holds-{n}-{collectives.rank()}") for n, s in enumerate(places)]
        self._left = [(step, mark) for step, mark in named if not mark.exists()]
        self._steps = 0

    def on_step_training(self, state: Any) -> None:
        self._steps += 1
        if self._left and self._steps == self._left[0][0]:
            self._left[0][1].touch()
            deadline = time.monotonic() + _PATIENCE
            while not stop_request.requested() and time.monotonic() < deadline:
                time.sleep(0.02)


def train(
    folder: str, places: list[int] | None = None, every_steps: int | None = None
) -> dict[str, Any]:
    """Three epochs of five steps, with dropout, momentum and shuffling, so that nothing is free.

    Args:
        folder: The folder of the checkpoints.
        places: Where to hold, see :class:`Hold`.
        every_steps: See :class:`Checkpoint`.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.randn(60, 8, generator=generator), torch.randint(3, (60,), generator=generator)
    )
    callbacks = [*data_parallel(), Checkpoint(folder, every_steps=every_steps)]
    if places is not None:
        callbacks.append(Hold(places, Path(folder).parent))
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        torch.nn.CrossEntropyLoss(),
        metrics=["loss"],
        callbacks=callbacks,
        verbose=0,
    )
    trial.with_train_generator(torch.utils.data.DataLoader(data, batch_size=3, shuffle=True))
    history = trial.run(3)
    return {
        "parameters": torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(),
        "epochs": len(history),
        "rank": collectives.rank(),
        "host": socket.gethostname(),
        "restarts": restarts(),
    }


def wait_for_signal(marks: str) -> int:
    """Waits on the first start without asking for signals, and tells on the next."""
    if restarts() == 0:
        (Path(marks) / f"holds-0-{collectives.rank()}").touch()
        time.sleep(_PATIENCE)
    return restarts()


def tell(*names: str) -> list[str | None]:
    """Variables of the environment that this rank sees."""
    return [os.environ.get(name) for name in names]


def rank_and_size() -> tuple[int, int]:
    return collectives.rank(), collectives.world_size()
