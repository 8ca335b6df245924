"""Flatten the inputs of a model, for example images to vectors."""

from __future__ import annotations

from typing import Any

import torch
import torchbearer

from torchbearer_ddp.callbacks.callback_order import OrderedCallback
from torchbearer_ddp.data.batch import map_tensors


class Flatten(OrderedCallback):
    """Flattens each input to (batch, -1), in training, validation and prediction.

    Inputs may be a tensor, or a list, tuple or dict of tensors. A tensor that has no dimension
    except the batch is not changed.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import Flatten
        >>> trial = Trial(None, callbacks=[Flatten()])

    State Requirements:
        - :attr:`torchbearer.state.X`: The input to flatten
    """

    def on_sample(self, state: Any) -> None:
        """Right after the batch was loaded and before the model is called."""
        state[torchbearer.X] = map_tensors(_flat, state[torchbearer.X])

    def on_sample_validation(self, state: Any) -> None:
        """The same hook of evaluation and prediction."""
        self.on_sample(state)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor
