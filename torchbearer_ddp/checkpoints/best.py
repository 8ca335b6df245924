"""The best epoch so far, by one metric or several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torchbearer_ddp.checkpoints.folder import best_name
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group.plain_data import type_name

_HIGHER_IS_BETTER = ("acc", "auc")
_DEFAULT = "val_loss"


class Best:
    """Remembers the best value of each monitored metric.

    Args:
        monitor: The metric, or metrics; None for none.
        mode: ``min``, ``max`` or ``auto``, or a dict of these by metric.
    """

    def __init__(
        self, monitor: str | Sequence[str] | None, mode: str | Mapping[str, str] = "auto"
    ) -> None:
        monitors = [monitor] if isinstance(monitor, str) else list(monitor or [])
        files: dict[str, str] = {}
        for name in monitors:
            if files.setdefault(best_name(name), name) != name:
                raise ValueError(
                    f"The monitors {files[best_name(name)]!r} and {name!r} would share the file "
                    f"{best_name(name)}: monitor one of them."
                )
        self._highest = {name: _is_higher_better(name, mode) for name in monitors}
        self._missed: set[str] = set()
        self.values: dict[str, float] = {}

    def update(self, metrics: Mapping[str, Any]) -> list[str]:
        """The monitors for which these metrics of an epoch are the best so far."""
        better = []
        for name, highest in self._highest.items():
            if name not in metrics:
                self._warn_once(name, metrics)
                continue
            value = _number(name, metrics[name])
            old = self.values.get(name)
            if math.isnan(value):
                continue
            if old is None or (value > old if highest else value < old):
                self.values[name] = value
                better.append(name)
        return better

    def _warn_once(self, name: str, metrics: Mapping[str, Any]) -> None:
        # The user did not ask for the default: without validation there is nothing to monitor.
        expected = name != _DEFAULT or any(key.startswith("val_") for key in metrics)
        if expected and name not in self._missed:
            self._missed.add(name)
            warnings.warn(
                f"Checkpoint(monitor={name!r}): there is no such metric, so no best epoch is kept "
                f"by it. There are: {', '.join(sorted(metrics)) or 'none'}.",
                stacklevel=2,
            )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"Checkpoint(monitor={name!r}): its value is not one number but a {type_name(value)}"
            f"{_shape(value)}. Monitor a metric with one number, or monitor=None."
        ) from error


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return "" if shape is None else f" of shape {tuple(shape)}"


def _is_higher_better(name: str, mode: str | Mapping[str, str]) -> bool:
    chosen = mode if isinstance(mode, str) else mode.get(name, "auto")
    if chosen not in ("auto", "min", "max"):
        raise ValueError(f"mode is {chosen!r} for {name!r}: it can be 'auto', 'min' or 'max'.")
    if chosen == "auto":
        return any(part in name for part in _HIGHER_IS_BETTER)
    return chosen == "max"
