"""One step on the gradients of several batches.

torchbearer clears the gradients before each batch and steps after it. So between two batches the
gradients are taken away, and the optimizer, which skips a parameter without a gradient, does
nothing; right before the next backward they are put back, and backward adds to them.
"""

from __future__ import annotations

from typing import Any

import torch
import torchbearer


class Accumulation:
    """Holds gradients until so many batches are done, then lets their average pass."""

    def __init__(self, batches: int) -> None:
        if batches < 1:
            raise ValueError(f"accumulate is {batches}: give the number of batches, at least 1.")
        self._batches = batches
        self._done = 0
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    @property
    def holds_gradients(self) -> bool:
        """True between a batch whose gradients were taken away and the step on them."""
        return self._done > 0

    def goes_on(self, state: Any) -> bool:
        """True if the gradients of this batch wait for those of the next one."""
        batch: int = state[torchbearer.BATCH] + 1
        return batch % self._batches != 0 and bool(batch != state[torchbearer.STEPS])

    def restore(self) -> None:
        """Puts the gradients back, right before backward adds to them."""
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []

    def hold(self, state: Any) -> bool:
        """Takes this batch's gradients away and returns True, or makes their average ready."""
        if self._batches == 1:
            return False
        for parameter, gradient in self._held:  # a closure that does not call on_criterion
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        groups = state[torchbearer.OPTIMIZER].param_groups
        trained = [(p, p.grad) for g in groups for p in g["params"] if p.grad is not None]
        self._done += 1
        waits = self.goes_on(state)
        self._held = trained if waits else []
        for parameter, gradient in trained:
            parameter.grad = None if waits else gradient / self._done
        if not waits:
            self._done = 0
        return waits
