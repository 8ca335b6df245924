"""A small training run with everything that makes a resume hard, and ranks that can be killed.

Dropout, BatchNorm, Adam, two learning rate schedules, augmentation from python's, numpy's and
torch's generators, metrics that gather and metrics that remember.
"""

from __future__ import annotations

import os
import random
import signal
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy
import torch
import torchbearer
from torch.utils.data import DataLoader, Dataset
from torchbearer.callbacks import CosineAnnealingLR, StepLR

from tests import ranks
from torchbearer_ddp import Checkpoint, data_parallel
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import membership, rendezvous
from torchbearer_ddp.group.join import join
from torchbearer_ddp.group.membership import Member

SAMPLES = 24
EPOCHS = 4


class Noisy(Dataset):
    """Samples that are augmented with every generator there is."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * random.random() + 0.1 * float(numpy.random.rand())
        return self.x[index] + noise + 0.1 * torch.rand(6), self.y[index]


def spread(y_pred: torch.Tensor, y_true: torch.Tensor) -> float:
    return float(y_pred.std())


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 2),
    )


def build(
    *callbacks: Any,
    model: Any = None,
    workers: int = 0,
    steps: int | None = None,
    accumulate: int = 1,
) -> torchbearer.Trial:
    torch.set_num_threads(1)
    randomness.seed_all(3)
    if (group := membership.current()) is not None:
        group.rng_diverged = False  # as in a process that has just started
    model = model or network()
    gathering = torchbearer.metrics.EpochLambda("spread", spread, running=False)
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        torch.nn.CrossEntropyLoss(),
        metrics=["acc", "loss", "lr", torchbearer.metrics.to_dict(gathering)],
        callbacks=[
            *data_parallel(accumulate=accumulate),
            StepLR(1, 0.7),
            CosineAnnealingLR(T_max=7),
            *callbacks,
        ],
        verbose=0,
    )
    # Forked workers notice when their rank is killed; the test's fork server would hide it.
    context = "fork" if workers else None
    return trial.with_generators(
        DataLoader(
            Noisy(),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context=context,
        ),
        DataLoader(Noisy(), batch_size=4),
        train_steps=steps,
    )


def outcome(trial: torchbearer.Trial) -> dict[str, Any]:
    """Everything that must be the same after a resume, on this rank."""
    optimizer = trial.state[torchbearer.OPTIMIZER]
    held = optimizer.state_dict()["state"]
    return {
        **{name: t.clone() for name, t in trial.state[torchbearer.MODEL].state_dict().items()},
        **{f"{key}.{i}": value for i, each in held.items() for key, value in each.items()},
        "history": [dict(epoch) for epoch in trial.state[torchbearer.HISTORY]],
        "rates": [group["lr"] for group in optimizer.param_groups],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
    }


def train(folder: Any = None, callbacks: Any = (), epochs: int = EPOCHS, **options: Any) -> Any:
    """Runs to the end and returns the outcome; without a folder, without checkpoints."""
    sizes = {k: options.pop(k) for k in ("workers", "steps", "accumulate") if k in options}
    saving = [] if folder is None else [Checkpoint(folder, **options)]
    trial = build(*saving, *callbacks, **sizes)
    trial.run(epochs)
    return outcome(trial)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


class Killable:
    """Ranks that tell every step they do, and can all be killed at once.

    Args:
        body: Called on each rank with a function that rank zero's progress is told to.
        world_size: The number of ranks.
    """

    def __init__(self, body: Callable[[Callable[[Any], None]], Any], world_size: int) -> None:
        self._store = rendezvous.serve_store("127.0.0.1", 0, 30)
        payload = cloudpickle.dumps(body)
        self._processes = []
        for rank in range(world_size):
            receiver, sender = ranks._context.Pipe(duplex=False)
            member = Member(rank, world_size, rank, world_size, timeout=30, seed=0)
            process = ranks._context.Process(
                target=_killable_main, args=(payload, member, self._store.port, sender)
            )
            process.start()
            sender.close()
            self._processes.append(process)
            if rank == 0:
                self._progress = receiver

    def wait_for(self, steps: int) -> bool:
        """Waits until rank zero has told so many times; False if it ended before."""
        for _ in range(steps):
            if not self._progress.poll(30):
                raise AssertionError("no step within 30 s")
            try:
                told = self._progress.recv()
            except EOFError:
                return False
            if isinstance(told, str):
                raise AssertionError(told)
        return True

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        assert self._processes[0].exitcode == -signal.SIGKILL, "it ended before it was killed"


def _killable_main(payload: bytes, member: Any, port: int, pipe: Any) -> None:
    try:
        randomness.seed_all(join(member, "127.0.0.1", port))
        cloudpickle.loads(payload)(pipe.send if member.rank == 0 else lambda told: None)
    except BaseException:
        if member.rank == 0:
            pipe.send(traceback.format_exc())
        os._exit(1)
