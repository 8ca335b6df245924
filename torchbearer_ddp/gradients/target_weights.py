"""What cross-entropy divides by: the sum of the weights of the targets that it does not ignore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torchbearer

from torchbearer_ddp.gradients.criterion_parts import parts_of

#: torch ignores targets of this value unless told otherwise.
_DEFAULT_IGNORED = -100
#: Fewer targets are counted faster as numbers of Python.
_FEW = 100
#: The losses that divide by the weights of the targets.
CLASS_LOSSES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)


def class_targets(state: Any) -> torch.Tensor | None:
    """The targets of the batch, if they are numbers of classes."""
    target = state.get(torchbearer.Y_TRUE)
    if not torch.is_tensor(target) or target.dim() == 0:
        return None
    return None if target.is_floating_point() or target.dtype == torch.bool else target


def not_ignored(target: torch.Tensor, ignored: int) -> float:
    """How many targets a loss does not ignore; at every step, so in the fastest way."""
    if target.device.type != "cpu":
        return float((target != ignored).sum())
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
        parts = [criterion] if isinstance(criterion, CLASS_LOSSES) else parts_of(criterion)
        found = [each for each in parts if isinstance(each, CLASS_LOSSES)]
        return cls(found[0].weight, found[0].ignore_index) if len(found) == 1 else cls()

    def total(self, target: torch.Tensor) -> float:
        """The sum of the weights of all targets that are not ignored."""
        if self.weight is None:
            return not_ignored(target, self.ignored)
        return float(self.weight.detach()[target[target != self.ignored]].sum())

    def matter_for(self, target: torch.Tensor | None, count: int) -> bool:
        """True if a batch of such targets may count differently from its samples."""
        if target is None:
            return False
        special = self.weight is not None or self.ignored != _DEFAULT_IGNORED
        return special or target.shape != (count,)
