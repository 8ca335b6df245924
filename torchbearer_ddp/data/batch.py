"""The size of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torchbearer


def batch_size(state: Any) -> int:
    """The number of samples in the current batch: the first dimension of the first input."""
    value = state.get(torchbearer.X)
    while isinstance(value, list | tuple | dict) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return int(value.shape[0]) if torch.is_tensor(value) and value.dim() else 1
