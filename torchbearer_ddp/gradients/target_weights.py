"""What cross-entropy divides by: the sum of the weights of the targets that it does not ignore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torchbearer

from torchbearer_ddp.gradients.criterion_parts import parts_of
from torchbearer_ddp.gradients.host_copy import HostCopy

#: torch ignores targets of this value unless told otherwise.
_DEFAULT_IGNORED = -100
#: Fewer targets are counted faster as numbers of Python.
_FEW = 100
_CLASS_LOSSES = tuple(
    getattr(torch.nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")
    if hasattr(torch.nn, name)  # the last one is new
)
_CLASS_FUNCTIONS = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)


def is_class_loss(criterion: Any) -> bool:
    """True for the losses of torch that divide by the weights of the targets."""
    return isinstance(criterion, _CLASS_LOSSES) or any(criterion is f for f in _CLASS_FUNCTIONS)


def ignored_by(criterion: Any) -> int:
    """The target that a loss of classes ignores; a function, or None, means the usual one."""
    found = getattr(criterion, "ignore_index", None)
    return _DEFAULT_IGNORED if found is None else int(found)


def class_targets(state: Any) -> torch.Tensor | None:
    """The targets of the batch, if they are numbers of classes."""
    target = state.get(torchbearer.Y_TRUE)
    if not torch.is_tensor(target) or target.dim() == 0:
        return None
    return None if target.is_floating_point() or target.dtype == torch.bool else target


def not_ignored(target: torch.Tensor, ignored: int) -> float:
    """How many targets on the CPU a loss does not ignore; at every step, so in the fastest way."""
    if target.numel() < _FEW:
        return float(target.numel() - target.flatten().tolist().count(ignored))
    return float(numpy.count_nonzero(target.numpy() != ignored))


@dataclass(frozen=True)
class TargetWeights:
    """The weight of each class in a loss, and the target that it ignores."""

    weight: torch.Tensor | None = None
    ignored: int = _DEFAULT_IGNORED

    @classmethod
    def of(cls, criterion: Any) -> TargetWeights:
        """Those of a criterion, or of the only loss of classes that a function uses."""
        parts = [criterion] if isinstance(criterion, _CLASS_LOSSES) else parts_of(criterion)
        found = [each for each in parts if isinstance(each, _CLASS_LOSSES)]
        return cls(found[0].weight, ignored_by(found[0])) if len(found) == 1 else cls()

    def total(self, target: torch.Tensor) -> float:
        """The sum of the weights of all targets that are not ignored."""
        if target.device.type != "cpu":
            return float(self.sum(target))
        if self.weight is None:
            return not_ignored(target, self.ignored)
        return float(self.weight.detach()[target[target != self.ignored]].sum())

    def sum(self, target: torch.Tensor) -> torch.Tensor:
        """The same on a GPU, as a number there for which the host does not wait."""
        counted = target != self.ignored
        if self.weight is None:
            return counted.sum()
        each = self.weight.detach()[torch.where(counted, target, 0)]
        return torch.where(counted, each, 0).sum()

    def is_like(self, other: TargetWeights) -> bool:
        """True if the weights of targets are the same; a criterion has one tensor of them."""
        return self.weight is other.weight and self.ignored == other.ignored

    def matter_for(self, target: torch.Tensor | None, count: int) -> bool:
        """True if a batch of such targets may count differently from its samples."""
        if target is None:
            return False
        special = self.weight is not None or self.ignored != _DEFAULT_IGNORED
        return special or target.shape != (count,)


#: Adds up the weights of targets.
Total = Callable[[TargetWeights, torch.Tensor], float]


class EarlyTotal:
    """The weights of a batch's targets on a GPU, summed when the step begins and read later.

    To read a number from a GPU is to wait for all that it has been given to do. At the beginning of
    a step that is little; right before backward it is the whole forward pass.
    """

    def __init__(self) -> None:
        #: Those of the last batch on a GPU.
        self._weights: TargetWeights | None = None
        self._begun: tuple[TargetWeights, torch.Tensor, int, HostCopy] | None = None

    def begin(self, state: Any) -> None:
        """Begins to sum what the step will divide by, as far as the step before tells."""
        self._begun = None
        if self._weights is None or state is None:
            return
        target = class_targets(state)
        if target is not None and target.device.type != "cpu" and not target.is_inference():
            copy = HostCopy(self._weights.sum(target))
            copy.begin_receive()
            self._begun = self._weights, target, target._version, copy

    def of(self, weights: TargetWeights, target: torch.Tensor) -> float:
        """The sum of the weights of all targets that are not ignored."""
        if target.device.type == "cpu":
            return weights.total(target)
        self._weights = weights
        if self._begun is not None:
            known, counted, version, copy = self._begun
            if weights.is_like(known) and counted is target and version == target._version:
                return copy.received()
        return weights.total(target)
