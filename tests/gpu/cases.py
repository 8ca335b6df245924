"""Trainings on batches of two ranks, which one process gets joined: they must end alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchbearer import Trial

from torchbearer_ddp import SyncGradients, SyncMetrics, SyncModel
from torchbearer_ddp.group import collectives

RANKS, STEPS = 2, 6
EVEN = ((4,) * STEPS,) * RANKS
UNEVEN = ((4, 1, 3, 4, 2, 4), (2, 4, 4, 3, 4, 1))
Batch = tuple[torch.Tensor, torch.Tensor]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def convolutions() -> nn.Module:
    """In the layout that convolutions on GPUs are fastest in."""
    layers = nn.Sequential(
        nn.Unflatten(1, (3, 8, 8)),
        *(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)),
    )
    return layers.to(memory_format=torch.channels_last)


class Branches(nn.Module):
    """Uses one of two layers, and never the third: by the sign of the batch's first number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.unused = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + (self.other(x) if x[0, 0] > 0 else 0.0)


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 5, sparse=True)
        self.out = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x.abs() * 5).long() % 20).mean(1))


def frozen() -> nn.Module:
    model = dense()
    model[0].requires_grad_(False)
    return model


def doubles() -> nn.Module:
    """Two dtypes, so two kinds of buckets."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).double()).float()

    return Mixed()


class Optimizers:
    """Optimizers by name, some of which only GPUs have in full."""

    momentum = staticmethod(lambda p: torch.optim.SGD(p, 0.05, momentum=0.5))
    fused = staticmethod(lambda p: torch.optim.Adam(p, 0.01, fused=True))
    plain = staticmethod(lambda p: torch.optim.SGD(p, 0.05))


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        build: Makes the model.
        sizes: The samples of each batch by rank.
        options: Of SyncGradients.
        optimizer: Makes the optimizer.
        inputs: The width of the input.
        tolerance: The largest relative difference from one process.
    """

    build: Callable[[], nn.Module] = dense
    sizes: Sequence[Sequence[int]] = EVEN
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = Optimizers.momentum
    inputs: int = 6
    tolerance: float = 1e-5


SMALL_BUCKETS = {"bucket_mb": 1e-4}
CASES = {
    "plain": Case(),
    "several buckets": Case(options=SMALL_BUCKETS),
    "uneven batches": Case(sizes=UNEVEN, options=SMALL_BUCKETS),
    "equal weights": Case(options={"weighted": False}),
    "accumulate": Case(options={"accumulate": 2}),
    "accumulate, uneven": Case(sizes=UNEVEN, options={"accumulate": 3}),
    "compressed": Case(options={"compress": "bf16"}, tolerance=0.02),
    "a fused optimizer": Case(optimizer=Optimizers.fused, options=SMALL_BUCKETS),
    "channels last": Case(convolutions, inputs=192, options=SMALL_BUCKETS, tolerance=1e-4),
    "channels last, a fused optimizer": Case(
        convolutions, inputs=192, optimizer=Optimizers.fused, tolerance=2e-4
    ),
    "unused parameters": Case(Branches, options=SMALL_BUCKETS),
    "sparse gradients": Case(Words, optimizer=Optimizers.plain),
    "frozen parameters": Case(frozen),
    "two dtypes": Case(doubles, options=SMALL_BUCKETS),
}


def batches(case: Case, rank: int) -> list[Batch]:
    """The batches of a rank, on the CPU: the same numbers on every device."""
    generator = torch.Generator().manual_seed(7 + rank)
    found = []
    for step, size in enumerate(case.sizes[rank]):
        x, y = (torch.randn(size, width, generator=generator) for width in (case.inputs, 2))
        x[0, 0] = 1.0 if step % 2 else -1.0  # which branch: the same on all ranks and joined
        found.append((x, y))
    return found


def joined(case: Case) -> list[Batch]:
    """The batches of one process: at each step those of all ranks together."""
    steps = zip(*(batches(case, rank) for rank in range(RANKS)), strict=True)
    return [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in steps]


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().to(collectives.device())


def fit(case: Case, model: nn.Module, epochs: int = 2) -> dict[str, Any]:
    """Trains a model; returns what must be equal, on the CPU."""
    is_one = collectives.world_size() == 1
    options = {"accumulate": case.options.get("accumulate", 1)} if is_one else case.options
    trial = Trial(
        model,
        case.optimizer(model.parameters()),
        nn.functional.mse_loss,
        ["loss"],
        [SyncModel(), SyncGradients(**options), SyncMetrics()],
        verbose=0,
    )
    data = joined(case) if is_one else batches(case, collectives.rank())
    history = trial.to(collectives.device()).with_train_generator(data).run(epochs)
    return {
        "parameters": {n: p.detach().cpu() for n, p in model.named_parameters()},
        "buffers": {n: b.detach().cpu() for n, b in model.named_buffers()},
        "losses": [epoch["loss"] for epoch in history],
        "device": str(next(model.parameters()).device),
    }


def train(name: str) -> dict[str, Any]:
    """Trains a case on this rank, or joined on one process."""
    return fit(CASES[name], build(CASES[name]))


def assert_alike(
    ranks: Sequence[dict[str, Any]], one: dict[str, Any], tolerance: float = 1e-5
) -> None:
    """Every rank has the same bits, and what one process has up to rounding."""
    for found in ranks:
        for name, expected in one["parameters"].items():
            assert torch.equal(found["parameters"][name], ranks[0]["parameters"][name]), name
            close = {"rtol": tolerance, "atol": tolerance / 5}
            assert torch.allclose(found["parameters"][name], expected, **close), name
        for mine, expected in zip(found["losses"], one["losses"], strict=True):
            assert abs(mine - expected) <= max(tolerance, 1e-5) * abs(expected)
