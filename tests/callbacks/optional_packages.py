"""Small stand-ins for packages that torchbearer uses if they are installed.

torchbearer calls each of them in one place; what it hands over, and on which rank, is what the
tests are about. The stand-in of torchvision has the arguments of today's versions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def make_grid(
    tensor: torch.Tensor,
    nrow: int = 8,
    padding: int = 2,
    normalize: bool = False,
    value_range: tuple[int, int] | None = None,
    scale_each: bool = False,
    pad_value: float = 0.0,
) -> torch.Tensor:
    """Images side by side, ``nrow`` in a row; the last row is filled up."""
    if value_range is not None:
        tensor = tensor.clamp(*value_range)
    missing = -len(tensor) % nrow
    blank = torch.full((missing, *tensor.shape[1:]), pad_value)
    rows = torch.cat([tensor, blank]).split(nrow)
    return torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)


class PlotLosses:
    """Keeps what is to be plotted."""

    made: list[PlotLosses] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.updates: list[dict[str, Any]] = []
        self.drawn = 0
        PlotLosses.made.append(self)

    def update(self, metrics: dict[str, Any]) -> None:
        self.updates.append(dict(metrics))

    def draw(self) -> None:
        self.drawn += 1


class ConfusionMatrix:
    """Counts how often each class was taken for each other."""

    def __init__(self, actual: Any, predicted: Any) -> None:
        self.table: dict[str, int] = {}
        for pair in zip(actual.tolist(), predicted.tolist(), strict=True):
            self.table[str(pair)] = self.table.get(str(pair), 0) + 1

    def save_stat(self, name: str) -> None:
        Path(f"{name}.pycm").write_text(str(sorted(self.table.items())))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The packages can be imported inside the block."""
    modules = {
        name: ModuleType(name)
        for name in ("torchvision", "torchvision.utils", "livelossplot", "pycm")
    }
    modules["torchvision"].utils = modules["torchvision.utils"]  # type: ignore[attr-defined]
    modules["torchvision.utils"].make_grid = make_grid  # type: ignore[attr-defined]
    modules["livelossplot"].PlotLosses = PlotLosses  # type: ignore[attr-defined]
    modules["pycm"].ConfusionMatrix = ConfusionMatrix  # type: ignore[attr-defined]
    PlotLosses.made.clear()
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
