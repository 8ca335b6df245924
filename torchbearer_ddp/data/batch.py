"""Batches: tensors, or lists, tuples and dicts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
import torchbearer
from torch.nn.utils.rnn import PackedSequence


def batch_size(state: Any) -> int:
    """The number of samples in the current batch."""
    return rows(state.get(torchbearer.X))


def rows(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor."""
    value = first_tensor(batch)
    return int(value.shape[0]) if value is not None and value.dim() else 1


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in nested lists, tuples and dicts: the first item of each is followed."""
    while not torch.is_tensor(value):  # asked first, since at every step it is the usual case
        if not isinstance(value, list | tuple | dict) or not value:
            return None
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


def select(value: Any, index: torch.Tensor, dimensions: Mapping[int, int]) -> Any:
    """Copies of these samples of a batch, in nested lists, tuples and dicts.

    ``dimensions`` are the first dimensions that belong to a batch, with the rows of each sample.
    Lists with one item per sample (sizes, boxes) are cut too; anything else is returned as it is.
    """
    if isinstance(value, PackedSequence):
        raise ValueError("a PackedSequence cannot be divided into samples")
    if torch.is_tensor(value) and not isinstance(value, torch.nn.Parameter):
        if value.dim() == 0 or len(value) not in dimensions:
            return value
        return value.detach()[_rows(index, dimensions[len(value)]).to(value.device)]
    if isinstance(value, numpy.ndarray) and value.ndim and len(value) in dimensions:
        return value[_rows(index, dimensions[len(value)]).numpy()]
    if isinstance(value, dict):
        return {key: select(each, index, dimensions) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if len(value) in dimensions and not _holds_batches(value, dimensions):
            rows = _rows(index, dimensions[len(value)]).tolist()
            return type(value)([value[row] for row in rows])
        return remade(value, [select(each, index, dimensions) for each in value])
    return value


def _rows(index: torch.Tensor, rows_each: int) -> torch.Tensor:
    """The rows of some samples that have so many rows each."""
    return (index[:, None] * rows_each + torch.arange(rows_each, device="cpu")).flatten()


def _holds_batches(value: Any, dimensions: Mapping[int, int]) -> bool:
    """True if there is a tensor with the first dimension of a batch inside."""
    if torch.is_tensor(value):
        return value.dim() > 0 and len(value) in dimensions
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return any(_holds_batches(each, dimensions) for each in items)
    return False


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies a function to each tensor in nested lists, tuples and dicts."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return remade(value, [map_tensors(function, each) for each in value])
    return value


def remade(value: Any, items: list[Any]) -> Any:
    """A list or tuple of the same type with other items; a namedtuple takes them one by one."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
