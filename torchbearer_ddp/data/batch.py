"""Batches: tensors, or lists, tuples and dicts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchbearer


def batch_size(state: Any) -> int:
    """The number of samples in the current batch: the first dimension of the first input."""
    value = state.get(torchbearer.X)
    while isinstance(value, list | tuple | dict) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return int(value.shape[0]) if torch.is_tensor(value) and value.dim() else 1


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies a function to each tensor in nested lists, tuples and dicts."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        mapped = [map_tensors(function, each) for each in value]
        # A namedtuple takes its items one by one.
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value
