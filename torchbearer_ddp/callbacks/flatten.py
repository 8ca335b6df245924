"""Images in, vectors out."""

from __future__ import annotations

from typing import Any

import torch
import torchbearer

from torchbearer_ddp.callbacks.callback_order import OrderedCallback


class Flatten(OrderedCallback):
    """Flattens each input to (batch, -1), in training, validation and prediction.

    Inputs may be a tensor, or a list, tuple or dict of them; what has no dimension beside the batch
    is left as it is.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import Flatten
        >>> trial = Trial(None, callbacks=[Flatten()])

    State Requirements:
        - :attr:`torchbearer.state.X`: The input to flatten
    """

    def on_sample(self, state: Any) -> None:
        """Right after the batch was loaded: the model comes next."""
        state[torchbearer.X] = _flat(state[torchbearer.X])

    def on_sample_validation(self, state: Any) -> None:
        """The same in evaluation and prediction, which have no hook but this one."""
        state[torchbearer.X] = _flat(state[torchbearer.X])


def _flat(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.flatten(1) if value.dim() > 1 else value
    if isinstance(value, dict):
        return {key: _flat(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        each_flat = [_flat(each) for each in value]
        if hasattr(value, "_fields"):  # a namedtuple takes its items one by one
            return type(value)(*each_flat)
        return type(value)(each_flat)
    return value
