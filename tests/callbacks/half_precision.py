"""A training in mixed precision, with our callbacks on several ranks and written by hand in one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchbearer import Trial
from torchbearer.callbacks import GradientClipping, GradientNormClipping

from torchbearer_ddp import MixedPrecision, SyncGradients, SyncMetrics, SyncModel
from torchbearer_ddp.callbacks.mixed_precision import DTYPES
from torchbearer_ddp.group import collectives

Batch = tuple[torch.Tensor, torch.Tensor]
#: Targets so large that the scaled gradients overflow in half precision; the loss does not.
HUGE = 1e4


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        dtype: The half precision.
        init_scale: The first loss scale of fp16.
        growth_interval: See torch's ``GradScaler``.
        clip: A value, or with ``norm`` a norm, to clip gradients at.
        norm: True to clip by the norm.
        accumulate: How many batches a step takes.
        sizes: The samples of each batch by rank; by default four in each.
        overflow: The steps at which the last rank's batch overflows.
        adam: True for Adam instead of SGD with momentum.
        factor: Of a parameter that autocast does not round: the size of its gradient.
        compress: The dtype in which gradients travel.
        options: Of SyncGradients.
    """

    dtype: str = "fp16"
    init_scale: float = 2.0**16
    growth_interval: int = 3
    clip: float | None = None
    norm: bool = False
    accumulate: int = 1
    sizes: Sequence[Sequence[int]] | None = None
    overflow: Sequence[int] = ()
    adam: bool = False
    factor: float = 0.0
    compress: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def callback(self) -> MixedPrecision:
        return MixedPrecision(
            self.dtype, init_scale=self.init_scale, growth_interval=self.growth_interval
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(model.parameters(), 0.01)
        groups = [
            {"params": [p], "lr": 0.1 / self.factor**2}
            if name.endswith("shift")
            else {"params": [p]}
            for name, p in model.named_parameters()
        ]
        return torch.optim.SGD(groups, 0.1, momentum=0.5)


STEPS = 7
UNEVEN = ((4, 1, 3, 4, 2, 4, 3), (2, 4, 4, 3, 4, 1, 2), (4, 4, 1, 2, 3, 4, 1))
#: Scales that are too large at first, so that the first steps are skipped.
CALIBRATING = 2.0**22
CASES = {
    "bf16": Case("bf16"),
    "fp16": Case(),
    "adam": Case(adam=True, init_scale=CALIBRATING),
    "calibrating": Case(init_scale=CALIBRATING),
    "uneven": Case(sizes=UNEVEN, init_scale=CALIBRATING),
    "uneven bf16": Case("bf16", sizes=UNEVEN),
    "clipped": Case(clip=0.05, init_scale=CALIBRATING),
    "clipped by norm": Case(clip=0.1, norm=True, init_scale=CALIBRATING),
    "accumulate": Case(accumulate=3, init_scale=CALIBRATING),
    "accumulate, uneven": Case(accumulate=2, sizes=UNEVEN, init_scale=CALIBRATING),
    "accumulate, clipped": Case("bf16", accumulate=2, clip=0.05),
    "accumulate, clipped by norm": Case(accumulate=2, clip=0.05, norm=True),
    "an infinity on one rank": Case(overflow=(2, 4)),
    "accumulate, an infinity on one rank": Case(accumulate=2, overflow=(2,)),
}


class Shift(nn.Module):
    """Adds a parameter that stays in single precision, also under autocast."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() + self.factor * self.shift


def network(device: Any = "cpu", factor: float = 0.0) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers, *([Shift(factor)] if factor else [])).to(device)


def batches(case: Case, rank: int, world_size: int) -> list[Batch]:
    """The batches of a rank, on the CPU: the same numbers on every device."""
    generator = torch.Generator().manual_seed(11 + rank)
    found = []
    for step, size in enumerate(case.sizes[rank] if case.sizes else [4] * STEPS):
        x, y = (torch.randn(size, width, generator=generator) for width in (6, 2))
        found.append((x, y * HUGE if step in case.overflow and rank == world_size - 1 else y))
    return found


@dataclass
class Outcome:
    """What a training comes to."""

    parameters: list[torch.Tensor]
    scale: float
    skipped: int
    losses: list[float]


def train(case: Case, epochs: int = 1, device: Any = "cpu", *more: Any) -> Outcome:
    """Trains on this rank with our callbacks; the one that clips comes first in the list."""
    model = network(device, case.factor)
    clipping = GradientNormClipping if case.norm else GradientClipping
    # A list: torchbearer's own filter would be exhausted after the first step.
    own = list(model.parameters())
    clip = [] if case.clip is None else [clipping(case.clip, params=own)]
    precision = case.callback()
    gradients = SyncGradients(accumulate=case.accumulate, compress=case.compress, **case.options)
    trial = Trial(
        model,
        case.optimizer(model),
        nn.functional.mse_loss,
        ["loss"],
        [*clip, precision, SyncModel(), gradients, SyncMetrics(), *more],
        verbose=0,
    )
    trial.with_train_generator(batches(case, collectives.rank(), collectives.world_size()))
    history = trial.to(device).run(epochs)
    return Outcome(
        [parameter.detach().cpu() for parameter in model.parameters()],
        precision.loss_scale,
        sum(epoch.get("skipped_steps", 0) for epoch in history),
        [epoch["loss"] for epoch in history],
    )


def by_hand(case: Case, world_size: int, epochs: int = 1, device: Any = "cpu") -> Outcome:
    """The same in one process, with torch's autocast and GradScaler alone.

    The gradient of each rank's batch is computed for itself, as rounding in half precision depends
    on it; their mean, weighted by samples, is what the step uses. Each rank's part of the mean is
    rounded as it travels.
    """
    model = network(device, case.factor)
    optimizer = case.optimizer(model)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(
        kind,
        init_scale=case.init_scale,
        growth_interval=case.growth_interval,
        enabled=case.dtype == "fp16",
    )
    data = [batches(case, rank, world_size) for rank in range(world_size)]
    skipped, losses = 0, []
    for _ in range(epochs):
        held = _Mean(case.compress)
        epoch_losses = []
        for step in range(STEPS):
            shown = _Mean()
            for x, y in (each[step] for each in data):
                optimizer.zero_grad()
                with torch.autocast(kind, DTYPES[case.dtype]):
                    loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
                scaler.scale(loss).backward()
                held.add([p.grad for p in model.parameters()], len(x))
                shown.add([loss.detach()], len(x))
            epoch_losses.append(float(shown.value()[0]))
            if (step + 1) % case.accumulate and step + 1 < STEPS:
                continue
            for parameter, gradient in zip(model.parameters(), held.value(), strict=True):
                parameter.grad = gradient
            held = _Mean(case.compress)
            before = scaler.get_scale()
            scaler.unscale_(optimizer)
            if case.clip is not None:
                _clip(case, model)
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
        losses.append(sum(epoch_losses) / len(epoch_losses))
    parameters = [parameter.detach().cpu() for parameter in model.parameters()]
    return Outcome(parameters, scaler.get_scale(), skipped, losses)


def _clip(case: Case, model: nn.Module) -> None:
    assert case.clip is not None
    clip: Callable[..., Any] = nn.utils.clip_grad_norm_ if case.norm else nn.utils.clip_grad_value_
    clip(model.parameters(), case.clip)


class _Mean:
    """A mean weighted by samples, in the way that ranks form it: each part times its weight.

    Args:
        wire: The dtype in which parts travel to be added.
    """

    def __init__(self, wire: str | None = None) -> None:
        self._wire = wire
        self._parts: list[tuple[list[torch.Tensor], int]] = []

    def add(self, values: Sequence[Any], samples: int) -> None:
        self._parts.append(([value.clone() for value in values], samples))

    def value(self) -> list[torch.Tensor]:
        total = sum(samples for _, samples in self._parts)
        columns = zip(*(values for values, _ in self._parts), strict=True)
        if self._wire is None:
            weights = [samples for _, samples in self._parts]
            return [_sum(column, weights) / total for column in columns]
        weights = [samples / total for _, samples in self._parts]
        half = DTYPES[self._wire]
        sums = [_sum(column, weights, half) for column in columns]
        # Two ranks send each other all that they have; more send their sums too.
        return sums if len(weights) == 2 else [each.to(half).float() for each in sums]


def _sum(
    values: Sequence[torch.Tensor], weights: Sequence[float], half: torch.dtype | None = None
) -> torch.Tensor:
    parts = [value * weight for value, weight in zip(values, weights, strict=True)]
    rounded = parts if half is None else [part.to(half).float() for part in parts]
    return functools.reduce(torch.add, rounded)


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    assert (found.scale, found.skipped) == (expected.scale, expected.skipped)
    for ours, hand in zip(found.losses, expected.losses, strict=True):
        assert abs(ours - hand) <= tolerance * abs(hand)
    for ours, hand in zip(found.parameters, expected.parameters, strict=True):
        assert torch.allclose(ours, hand, rtol=tolerance, atol=tolerance / 10)
