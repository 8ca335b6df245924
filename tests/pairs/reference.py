"""What the ranks must come to: the arithmetic of all of them in one process, with torch alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.pairs.cases import Case

RATE = 0.05
DECAY = 0.01
GROWTH_INTERVAL = 3
HALVES: dict[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Model(nn.Module):
    """A layer for each situation, so that any two can meet."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.rank = 0
        #: Makes the next backward fail in its middle.
        self.fails: Exception | None = None
        self.first = nn.Linear(5, 6)
        layers = [name for name in ("frozen", "thawed", "gradient") if case.has(name)]
        self.added = nn.ModuleDict({name: nn.Linear(6, 6) for name in layers})
        self.extra = nn.Linear(6, 6) if case.has("unused") else None
        self.table = nn.Embedding(11, 6, sparse=True) if case.has("sparse") else None
        self.conv = nn.Conv2d(2, 2, 3, padding=1) if case.has("converted") else None
        self.out = nn.Linear(6, 3)
        self.to(getattr(torch, case.dtype))
        small = torch.bfloat16 if case.has("lbfgs") else torch.float16  # of which it makes NaNs
        self.half_layer = nn.Linear(6, 6).to(small) if case.has("half") else None
        if case.has("frozen"):
            self.added["frozen"].requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        rank = self.rank if rank is None else rank
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        for layer in self.added.values():
            hidden = hidden + layer(hidden)
        if self.fails is not None:
            hidden.register_hook(self._fail)
        if self.table is not None:
            hidden = hidden + self.table((x[:, 0] * 7).long().abs() % 11)
        if self.conv is not None:
            hidden = hidden + self.conv(hidden.reshape(-1, 2, 1, 3)).reshape(-1, 6)
        if self.half_layer is not None:
            small = self.half_layer(hidden.to(self.half_layer.weight.dtype))
            hidden = hidden + small.to(hidden.dtype)
        if self.extra is not None and rank == 1:
            hidden = hidden + self.extra(hidden)
        return self.out(hidden)

    def _fail(self, gradient: torch.Tensor) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error

    def set_trainable(self, flags: dict[str, bool]) -> None:
        for name, flag in flags.items():
            self.added[name].requires_grad_(flag)

    def convert(self, conversion: str) -> None:
        """Moves the parameters to other memory, and back or not."""
        if conversion == "half":
            dtype = self.first.weight.dtype
            self.half()
            self.to(dtype)
        elif conversion == "double":
            self.double()
        elif conversion == "channels_last":
            self.to(memory_format=torch.channels_last)
        else:
            self.share_memory()


def data(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's samples in the order of its batches."""
    seed = random.Random(f"{case.seed} {rank}").randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    count = sum(case.sizes[rank])
    x = torch.randn(count, 5, generator=generator) * (1 + 0.3 * rank)
    return x, torch.randn(count, 3, generator=generator)


def make_optimizer(case: Case, model: Model) -> torch.optim.Optimizer:
    if case.has("lbfgs"):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    decay = 0.0 if case.has("sparse") else DECAY * case.scale
    return torch.optim.SGD(
        model.parameters(), lr=RATE / case.scale, momentum=case.momentum, weight_decay=decay
    )


def loss(case: Case, y_pred: torch.Tensor, y_true: torch.Tensor) -> torch.Tensor:
    """A mean over the samples."""
    return case.scale * nn.functional.mse_loss(y_pred, y_true.to(y_pred.dtype))


def train(
    case: Case, runs: Iterable[list[tuple[int, int]]]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The parameters after these batches, each an epoch and a number, of each call of ``run``.

    The second is the loss scale after each step, if the loss is scaled.
    """
    model = Model(case)
    optimizer = make_optimizer(case, model)
    samples = [data(case, rank) for rank in range(case.world_size)]
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=case.loss_scale,
        growth_interval=GROWTH_INTERVAL,
        enabled=case.mixed == "fp16",
    )
    scales = []
    converted = not case.has("converted")
    for batches in runs:
        window: list[tuple[int, int]] = []  # what a run that ends early leaves is dropped
        for epoch, batch in batches:
            if epoch and not converted:
                model.convert(case.conversion)
                converted = True
            window.append((epoch, batch))
            if case.is_last_of_window(batch):
                _step(case, model, optimizer, scaler, samples, window)
                window = []
                scales += [scaler.get_scale()] if scaler.is_enabled() else []
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, scales


def _step(
    case: Case,
    model: Model,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    samples: list[tuple[torch.Tensor, torch.Tensor]],
    window: list[tuple[int, int]],
) -> None:
    """One step on the mean over all samples of all ranks and batches."""
    counts = [case.sizes[rank][batch] for _, batch in window for rank in range(case.world_size)]

    def closure() -> float:
        value = 0.0
        hosts: dict[Any, dict[nn.Parameter, torch.Tensor]] = {}
        for epoch, batch in window:
            model.set_trainable(case.trainable(epoch, batch))
            for rank, (x, y) in enumerate(samples):
                start = sum(case.sizes[rank][:batch])
                size = case.sizes[rank][batch]
                weight = 1 / len(counts) if case.weighted is False else size / sum(counts)
                mine = slice(start, start + size)
                # Each gradient for itself, without its weight: half precision rounds it.
                optimizer.zero_grad()
                with torch.autocast("cpu", HALVES.get(case.mixed), enabled=bool(case.mixed)):
                    part = loss(case, model(x[mine], rank), y[mine])
                scaler.scale(part).backward()
                _add(hosts.setdefault(case.hosts[rank], {}), model, weight)
                value += weight * float(part.detach())
        for parameter in model.parameters():
            parts = [each[parameter] for each in hosts.values() if parameter in each]
            parameter.grad = _sum(case, parts) if parts else None
        return value

    if case.has("lbfgs"):
        optimizer.step(closure)
        return
    closure()
    scaler.step(optimizer)
    scaler.update()


def _add(total: dict[nn.Parameter, torch.Tensor], model: Model, weight: float) -> None:
    """Adds the gradients of a rank to those of its host."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            part = parameter.grad * weight
            total[parameter] = total[parameter] + part if parameter in total else part


def _sum(case: Case, parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum over hosts; each part travels in half precision, and of more than two the sum too."""
    half = HALVES.get(case.compress) if len(set(case.hosts)) > 1 else None
    if half is None or parts[0].is_sparse or parts[0].dtype != torch.float32:
        return functools.reduce(torch.add, parts)
    rounded = [part.to(half).float() for part in parts]
    total = functools.reduce(torch.add, rounded)
    return total.to(half).float() if len(set(case.hosts)) > 2 else total
