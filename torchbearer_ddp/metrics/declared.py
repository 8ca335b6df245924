"""Metrics that say how they are pooled: ``pooling = {'hits': 'sum', 'scores': 'gather'}``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from torchbearer_ddp.metrics.leaves import declared

_WAYS = ("sum", "gather")


def gathered_names(metric: Any) -> list[str]:
    """The attributes of a metric that are gathered row by row, or item by item."""
    return [name for name, way in declared(metric).items() if way == "gather"]


def held_values(metric: Any) -> dict[str, Any]:
    """What a metric holds for the other ranks, as plain data.

    Raises:
        ValueError: If its declaration is not valid.
    """
    title = f"The metric {metric.name} ({type(metric).__name__})"
    values = {}
    for name, way in declared(metric).items():
        if way not in _WAYS:
            raise ValueError(
                f"{title} declares pooling={{{name!r}: {way!r}}}: an attribute is pooled by 'sum' "
                "or 'gather'."
            )
        if not hasattr(metric, name):
            raise ValueError(
                f"{title} declares pooling={{{name!r}: {way!r}}}, but has no attribute {name}. "
                "Set it in reset()."
            )
        value = getattr(metric, name)
        kinds = torch.Tensor | list if way == "gather" else torch.Tensor | int | float
        if isinstance(value, numpy.ndarray | numpy.generic):
            value = torch.as_tensor(value)
        if not isinstance(value, kinds):
            wanted = "a tensor or a list" if way == "gather" else "a tensor or a number"
            raise ValueError(
                f"{title} declares pooling={{{name!r}: {way!r}}}, but its attribute {name} is a "
                f"{type(value).__name__}. Keep {wanted} there."
            )
        values[name] = value.cpu() if torch.is_tensor(value) else value
    return values


def total(values: Sequence[Any]) -> Any:
    """The sum of an attribute over the ranks."""
    return functools.reduce(operator.add, [value for value in values if value is not None])
