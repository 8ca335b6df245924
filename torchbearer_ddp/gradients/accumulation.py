"""One step on the gradients of several batches.

torchbearer clears the gradients before each batch and steps after it. So between two batches the
gradients are taken away, and the optimizer, which skips a parameter without a gradient, does
nothing; after the next backward they are added. They are not put back before it, for backward to
add to: a closure may clear gradients at any moment until then, or make none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torchbearer

from torchbearer_ddp.gradients.hooks import is_old, is_zero, versions
from torchbearer_ddp.gradients.weights import Average, counts_nothing
from torchbearer_ddp.group import trained

#: Gradients that were taken from their parameters.
Held = list[tuple[torch.nn.Parameter, torch.Tensor]]


class Accumulation:
    """Holds gradients until so many batches are done, then lets their average pass.

    Attributes:
        batches: Their number.
    """

    def __init__(self, batches: int) -> None:
        if batches < 1:
            raise ValueError(f"accumulate is {batches}: give the number of batches, at least 1.")
        self.batches = batches
        #: The epoch and the batch that were added last.
        self._last: tuple[int, int] | None = None
        #: What a step has left in parameters that nothing is held of, with its version.
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        #: Parameters whose gradients lie in buckets of torch's DDP.
        self._in_buckets: frozenset[int] = frozenset()
        self._begin()

    def clear(self) -> None:
        """Drops what is held: a run starts with nothing of the run before."""
        self._last = None
        self._left.clear()
        self._begin()

    def _begin(self) -> None:
        self._held: Held = []
        self._batches_done = 0
        #: What the losses so far divide by together.
        self._total = 0.0
        #: The gradients so far are a sum, each times its weight, divided by this.
        self._unit = 0.0
        #: The sum of the gradients that torch's DDP has averaged, and of how many batches.
        self._of_torch: Held = []
        self._batches_of_torch = 0

    @property
    def is_used(self) -> bool:
        """True if a step takes several batches."""
        return self.batches > 1

    @property
    def holds_gradients(self) -> bool:
        """True between a batch whose gradients were taken away and the step on them."""
        return self._batches_done > 0

    def check(self, state: Any) -> None:
        """Refuses what cannot be added up over several batches."""
        if self.batches == 1:
            return
        optimizer = state[torchbearer.OPTIMIZER]
        if closure_decides(optimizer):
            raise ValueError(
                "accumulate does not work with LBFGS, which calls its closure several times for "
                "each batch. Use a larger batch instead."
            )
        if not optimizer.param_groups:
            raise ValueError(
                "accumulate adds up what the optimizer of the Trial trains, but the Trial has "
                "none. Give the Trial its optimizer, or use a larger batch instead."
            )
        model = {id(parameter) for parameter in state[torchbearer.MODEL].parameters()}
        for name, other in trained.optimizers(state).items():
            if other is not optimizer and model & set(map(id, trained.parameters_of(other))):
                raise ValueError(
                    f"accumulate adds up what the optimizer of the Trial trains, but {name} trains "
                    "parameters of the model too, at every batch. Use a larger batch instead."
                )
        wrapped = trained.averaged_by_torch(state)
        self._in_buckets = frozenset(id(p) for each in wrapped for p in each.parameters())

    def goes_on(self, state: Any) -> bool:
        """True if the gradients of this batch wait for those of the next one."""
        batch: int = state[torchbearer.BATCH] + 1
        return batch % self.batches != 0 and bool(batch != state[torchbearer.STEPS])

    def ends_window(self, state: Any) -> bool:
        """True if the gradients of earlier batches come back in the step of this one."""
        return self.is_used and not self.goes_on(state)

    def begin_step(self, state: Any) -> None:
        """Notes the gradients that are no batch's of the coming window."""
        if self.is_used:
            self._left = versions([] if self.holds_gradients else _parameters(state))

    def has_new_gradient(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """True if a batch has made a gradient: what the last step has left, or zeroed, is none."""
        return not all(is_old(parameter, self._left) for parameter in parameters)

    def drop_old(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Where a batch is skipped, what the last step has left is no part of the window."""
        for parameter in parameters if self.is_used else ():
            if parameter.grad is not None and not is_zero(parameter.grad):
                parameter.grad = None

    def hold(self, state: Any, average: Average, weight: float) -> float | None:
        """Takes this batch's gradients away, or makes their average ready.

        Args:
            state: The state of the run.
            average: How the batches count.
            weight: What this batch's loss divides by.

        Returns:
            None if the gradients wait; else what all of the batches' losses divide by together.
        """
        if self.batches == 1:
            return weight
        batch = state[torchbearer.EPOCH], state[torchbearer.BATCH]
        if batch == self._last:
            raise ValueError(
                "accumulate adds up one backward pass of each batch, but this closure makes "
                "several. Use a larger batch instead of accumulate."
            )
        self._last = batch
        self._add_those_of_torch(state)
        if counts_nothing(average, weight):
            for parameter, gradient in _gradients(state):  # one process has zeros too
                parameter.grad = torch.zeros_like(gradient)
            weight, self._unit = 0.0, self._unit or 1.0
        gradients = _gradients(state)
        unit = weight or self._unit
        if self._is_larger(average, weight):
            for parameter, gradient in _each(gradients, torch._foreach_mul, weight / self._unit):
                parameter.grad = gradient
            unit = self._unit
        for parameter, held in self._in_units_of(unit, average):
            parameter.grad = held if parameter.grad is None else _sum(held, parameter.grad)
        self._held, self._unit = [], unit
        self._batches_done += 1
        self._total += weight
        gradients = _gradients(state)
        if self.goes_on(state):
            self._held = gradients
            for parameter, _ in gradients:
                parameter.grad = None
            return None
        gradients = _each(gradients, torch._foreach_div, self._divisor(average))
        batches = 1.0 if average is Average.SUM else self._batches_of_torch
        for parameter, gradient in (
            *gradients,
            *_each(self._of_torch, torch._foreach_div, batches),
        ):
            parameter.grad = gradient
        total = self._total
        self._begin()
        return total

    def _divisor(self, average: Average) -> float:
        """What turns the sum of the batches' gradients into what they become together."""
        if average is Average.WEIGHTED:
            return self._total / self._unit or 1.0
        return float(self._batches_done) if average is Average.EQUAL else 1.0

    def _add_those_of_torch(self, state: Any) -> None:
        """Adds those that torch has averaged, over ranks whose batches we do not know: all alike.

        They are copied: the next backward writes into the same memory.
        """
        found = [(p, gradient) for p, gradient in _gradients(state) if id(p) in self._in_buckets]
        self._batches_of_torch += bool(found)
        known = dict(self._of_torch)
        for parameter, gradient in found:
            held = known.get(parameter)
            known[parameter] = gradient.clone() if held is None else held + gradient
            parameter.grad = None
        self._of_torch = [*known.items()]

    def _is_larger(self, average: Average, weight: float) -> bool:
        """True if held gradients in units of this weight could leave the range of fp16."""
        return average is Average.WEIGHTED and bool(self._held) and 0 < weight < self._unit

    def _in_units_of(self, weight: float, average: Average) -> Held:
        """The held gradients, scaled so that those of a batch of this weight can be added."""
        if average is not Average.WEIGHTED or not weight:
            return self._held
        return _each(self._held, torch._foreach_mul, self._unit / weight)


def _each(held: Held, operation: Callable[..., Any], number: float) -> Held:
    """An operation with a number on all gradients: on a GPU one kernel for many of them."""
    if number == 1.0 or not held:
        return held
    parameters, gradients = zip(*held, strict=True)
    return list(zip(parameters, operation(gradients, number), strict=True))


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum, also of a sparse gradient and one that is not: torch adds them in one order only."""
    return other + one if one.is_sparse else one + other


def _gradients(state: Any) -> Held:
    return [(p, p.grad) for p in _parameters(state) if p.grad is not None]


def _parameters(state: Any) -> list[torch.nn.Parameter]:
    groups = state[torchbearer.OPTIMIZER].param_groups
    return [parameter for group in groups for parameter in group["params"]]


def closure_decides(optimizer: Any) -> bool:
    """LBFGS uses the loss to decide how often to call the closure."""
    return isinstance(optimizer, torch.optim.LBFGS)
