"""The models that are measured, each with a batch to train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Args:
        title: What the tables call it.
        build: Makes the model.
        batch: Makes inputs and targets.
        criterion: The loss.
        device: Where all of it is.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy
    device: str = "cpu"


def _digits(batch: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 784), torch.randint(0, 10, (batch,))


def _deep() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(784, 256), nn.ReLU()]
    for _ in range(58):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def _wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def _convolutions() -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


class Words(nn.Module):
    """A bag of words: a large table of which a batch uses little."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20_000, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x))


class Transformer(nn.Module):
    """Two layers of attention over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.table(x)).mean(1))


CASES = {
    "mlp": Case(
        "MLP 784-100-10",
        lambda: nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
        _digits,
    ),
    "deep": Case("60-layer MLP, 4.1M", _deep, _digits),
    "wide": Case("wide MLP, 10M", _wide, _digits),
    "conv": Case(
        "conv + BatchNorm",
        _convolutions,
        lambda: (torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))),
    ),
    "words": Case(
        "embedding bag, 1.3M",
        Words,
        lambda: (torch.randint(0, 20_000, (32, 20)), torch.randint(0, 10, (32,))),
    ),
    "transformer": Case(
        "small transformer, 0.4M",
        Transformer,
        lambda: (torch.randint(0, 1000, (16, 32)), torch.randint(0, 10, (16,))),
    ),
}


def mlp_of(parameters: int) -> Case:
    """An MLP with about so many parameters."""
    width = max(8, round((-795 + (795**2 + 4 * parameters) ** 0.5) / 2))
    return Case(
        f"{parameters:,} parameters",
        lambda: nn.Sequential(
            nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        ),
        _digits,
    )  # fmt: skip
