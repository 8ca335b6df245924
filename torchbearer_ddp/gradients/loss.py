"""The kind of a loss, told by arithmetic: a sum, a mean, or one that couples its samples.

How the gradients of N ranks combine to those of one process depends on what the criterion does with
the samples of a batch. It is evaluated on some samples and on two parts of them of unequal size:

- ``sum``: the whole is the sum of the parts. One process would add the ranks' gradients.
- ``mean``: the whole is the mean of the parts, weighted by their samples.
- ``weighted``: the whole is the mean weighted by what the loss divides by, which for cross-entropy
  with class weights or ignored targets is the sum of the targets' weights.
- ``coupled``: none of these. The loss of a sample depends on the others in its batch.
- ``unknown``: it could not be told.

Everything here is local to a rank: no other rank is asked.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchbearer
from torchbearer import State

from torchbearer_ddp.data import randomness
from torchbearer_ddp.data.batch import batch_size, first_tensor, map_tensors, select
from torchbearer_ddp.gradients.criterion_parts import on_copies
from torchbearer_ddp.gradients.target_weights import (
    TargetWeights,
    Total,
    class_targets,
    ignored_by,
    is_class_loss,
    not_ignored,
)
from torchbearer_ddp.group.trained import LOADER_KEYS

KINDS = ("mean", "sum", "weighted", "coupled", "unknown")

#: The largest relative difference that counts as rounding.
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-5,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}
#: More samples would tell no more: what couples them has an effect of 1/n.
_MOST_SAMPLES, _FEW_SAMPLES = 64, 16
#: What is in the state, but not part of a batch.
_NOT_A_BATCH = (torchbearer.HISTORY, torchbearer.METRICS, *LOADER_KEYS)


@dataclass(frozen=True)
class Verdict:
    """What kind of loss a criterion computes.

    Attributes:
        kind: One of :data:`KINDS`.
        reason: Why it could not be told, as the end of a sentence about the criterion.
        later: True if it is unknown for this batch, but a later batch may tell.
    """

    kind: str
    reason: str = ""
    later: bool = False


class _Undecided(Exception):
    """The criterion cannot be classified on this batch."""

    def __init__(self, reason: str, *, later: bool = False) -> None:
        super().__init__(reason)
        self.verdict = Verdict("unknown", reason, later)


def classify(criterion: Any, state: Any) -> Verdict:
    """The kind of a criterion, from the batch in the state right after the criterion was called.

    The random state, and the buffers and attributes of the criterion, are the same afterwards.
    """
    try:
        count = _count(state)
        if count < 2:
            raise _Undecided("the batch has only one sample", later=True)
        with (
            torch.no_grad(),
            randomness.preserved(),
            warnings.catch_warnings(),
            on_copies(criterion, state),
        ):
            warnings.simplefilter("ignore")
            return _decide(_Evaluator(criterion, state, count), criterion, state, count)
    except _Undecided as undecided:
        return undecided.verdict
    except Exception as error:  # raised here it would leave the other ranks waiting
        return Verdict("unknown", f"it cannot be examined ({type(error).__name__}: {error})")


def is_value_of(criterion: Any, state: Any) -> bool:
    """True if the loss of the step is what the criterion returns, up to rounding."""
    try:
        with (
            torch.no_grad(),
            randomness.preserved(),
            warnings.catch_warnings(),
            on_copies(criterion, state),
        ):
            warnings.simplefilter("ignore")
            count = _count(state)
            _Evaluator(criterion, state, count).check_complete(count)
            return True
    except Exception:  # raised here it would leave the other ranks waiting
        return False


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict from those of all ranks, which saw different batches."""
    known = {each.kind for each in verdicts} - {"unknown"}
    if not known:
        # Where one rank can never tell, waiting for a later batch is of no use.
        return min(verdicts, key=lambda each: each.later)
    if "coupled" in known:
        return Verdict("coupled")
    if known == {"mean", "weighted"}:
        return Verdict("weighted")
    if len(known) > 1:
        return Verdict("unknown", "it is a sum on some ranks and a mean on others")
    return Verdict(known.pop())


def divisor(criterion: Any, state: Any, kind: str, total: Total = TargetWeights.total) -> float:
    """What the loss of this batch divides by: the number of samples, or the targets' weights.

    Targets of a cross-entropy that are ignored are not counted as samples. ``total`` adds them up.
    """
    if kind == "weighted":
        target = class_targets(state)
        if target is not None:
            return total(TargetWeights.of(criterion), target)
    elif kind == "mean" and is_class_loss(criterion):
        target = class_targets(state)
        has_weights = getattr(criterion, "weight", None) is not None
        if target is not None and has_weights and criterion.reduction == "mean":
            return total(TargetWeights.of(criterion), target)  # they were set after the first batch
        if target is not None and target.dim() == 1:
            ignored = ignored_by(criterion)
            if target.device.type == "cpu":
                return not_ignored(target, ignored)
            return total(TargetWeights(None, ignored), target)
    return float(batch_size(state))


def _decide(evaluate: _Evaluator, criterion: Any, state: Any, count: int) -> Verdict:
    weights, target = TargetWeights.of(criterion), class_targets(state)
    dimensions = _dimensions(state, count)
    if target is not None and len(target) not in dimensions:
        target = None
    fitting = {"sum", "mean"} if target is None else {"sum", "mean", "weighted"}
    evaluate.check_repeatable(torch.arange(min(count, _FEW_SAMPLES), device="cpu"))
    for whole, first, second in _cuts(count):
        values = [evaluate(each) for each in (whole, first, second)]
        divisors = {
            "sum": (1.0, 1.0, 1.0),
            "mean": (float(len(whole)), float(len(first)), float(len(second))),
        }
        if target is not None:
            a, b = (weights.total(select(target, i, dimensions)) for i in (first, second))
            divisors["weighted"] = (a + b, a, b)
        fitting &= {
            kind for kind, parts in divisors.items() if _fits(values, parts, evaluate.tolerance)
        }
        if not all(map(_is_finite, values)) and "weighted" not in fitting:
            reason = "its value is not a finite number on this batch or on a part of it"
            raise _Undecided(reason, later=not _is_finite(values[0]))
    if not fitting:
        return Verdict("coupled")
    if "sum" in fitting and len(fitting) > 1:
        raise _Undecided("its value is zero on this batch", later=True)
    if "sum" in fitting:
        evaluate.check_complete(count)
        return Verdict("sum")
    # Without an ignored target in this batch both fit: then what a later batch may hold decides.
    weighted = "mean" not in fitting or (
        "weighted" in fitting and weights.matter_for(target, count)
    )
    return Verdict("weighted" if weighted else "mean")


def _cuts(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Samples and two parts of them: twice, because one cut may fit a kind by chance."""
    few = torch.arange(min(count, _FEW_SAMPLES), device="cpu")
    chosen = few % 3 == 1
    yield few, few[chosen], few[~chosen]
    many = torch.arange(min(count, _MOST_SAMPLES), device="cpu")
    third = max(1, len(many) // 3)
    yield many, many[:third], many[third:]


def _fits(values: Sequence[float], divisors: Sequence[float], tolerance: float) -> bool:
    """True if the values, multiplied by what they were divided by, add up."""
    # A part of which every target is ignored is 0 / 0.
    whole, first, second = (v * d if d else 0.0 for v, d in zip(values, divisors, strict=True))
    scale = max(abs(whole), abs(first), abs(second))
    return abs(whole - first - second) <= tolerance * scale  # False if one is not a number


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


class _Evaluator:
    """Calls a criterion on some of the samples of a batch, as torchbearer would."""

    def __init__(self, criterion: Any, state: Any, count: int) -> None:
        self._criterion = criterion
        self._state = state
        self._count = count
        self._dimensions = _dimensions(state, count)
        self._of_state = True
        # Where the criterion allows it, double precision leaves no doubt about rounding.
        self._dtype: torch.dtype | None = torch.float64
        self.tolerance = 0.0

    def __call__(self, index: torch.Tensor) -> float:
        try:
            value = self._call(index)
        except Exception as error:
            raise _Undecided(
                f"it raised {type(error).__name__} on {len(index)} of {self._count} samples: "
                f"{error}"
            ) from error
        if not torch.is_tensor(value):
            value = torch.as_tensor(value)
        if value.numel() != 1:
            raise _Undecided(f"it returns a tensor of shape {tuple(value.shape)}, not one value")
        self._widen_tolerance(value)
        return float(value)

    def check_repeatable(self, index: torch.Tensor) -> None:
        """Raises if the criterion draws random numbers, or returns another value each time."""
        for self._dtype in (torch.float64, torch.float32, None):
            # Its own weights, or a model that it calls, may not allow another precision.
            with contextlib.suppress(Exception):
                self._call(index)
                break
        before = randomness.rng_state()
        values = [self(index), self(index)]
        if not randomness.equal_states(before, randomness.rng_state()):
            raise _Undecided("it draws random numbers")
        if all(map(_is_finite, values)) and not _fits(
            [values[0], values[1], 0.0], (1.0, 1.0, 1.0), self.tolerance
        ):
            raise _Undecided("it returns another value each time it is called")

    def check_complete(self, count: int) -> None:
        """Raises if something was added to the step's loss, which a sum would add N times."""
        loss = self._state.get(torchbearer.LOSS)
        if not torch.is_tensor(loss) or loss.numel() != 1:
            return
        self._dtype = None
        value = self(torch.arange(count, device="cpu"))
        self._widen_tolerance(loss)
        if not _fits([float(loss), value, 0.0], (1.0, 1.0, 1.0), self.tolerance):
            raise _Undecided(
                f"the loss of the step ({float(loss):g}) is not the sum that it returns "
                f"({value:g}): a callback or a closure has changed it"
            )

    def _widen_tolerance(self, value: torch.Tensor) -> None:
        prediction = first_tensor(self._state.get(torchbearer.Y_PRED))
        dtypes = [value.dtype]
        if self._dtype is None and prediction is not None:
            dtypes.append(prediction.dtype)
        found = (_TOLERANCE.get(each, _TOLERANCE[torch.float32]) for each in dtypes)
        self.tolerance = max(self.tolerance, *found)

    def _call(self, index: torch.Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            for device in {"cpu", torch.device(self._state.get(torchbearer.DEVICE, "cpu")).type}:
                if self._dtype is not None:
                    stack.enter_context(torch.autocast(device, enabled=False))
            if self._of_state:
                try:
                    return self._criterion(self._part_of_state(index))
                except TypeError:
                    # torchbearer then calls it with the predictions and targets.
                    self._of_state = False
            keys = (torchbearer.Y_PRED, torchbearer.Y_TRUE)
            values = [self._part(self._state[key], index) for key in keys]
            return self._criterion(*_arguments(values))

    def _part_of_state(self, index: torch.Tensor) -> State:
        part = State()
        for key, value in self._state.items():
            is_batch = key not in _NOT_A_BATCH
            dict.__setitem__(part, key, self._part(value, index) if is_batch else value)
        return part

    def _part(self, value: Any, index: torch.Tensor) -> Any:
        return map_tensors(self._converted, select(value, index, self._dimensions))

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        if self._dtype is None or is_parameter or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype)


def _arguments(values: Iterable[Any]) -> list[Any]:
    """The arguments of a criterion: lists and tuples are passed item by item."""
    return [
        argument
        for value in values
        for argument in (value if isinstance(value, list | tuple) else [value])
    ]


def _count(state: Any) -> int:
    """The number of samples that can be told apart in the predictions."""
    rows, samples = _rows(state), batch_size(state)
    return samples if rows is None or rows % samples == 0 else rows


def _rows(state: Any) -> int | None:
    """The first dimension of the predictions, unless they are a list with an item per sample."""
    predictions = state.get(torchbearer.Y_PRED)
    first = first_tensor(predictions)
    if first is None or not first.dim():
        return None
    rows, samples = len(first), batch_size(state)
    is_list = isinstance(predictions, list | tuple) and len(predictions) == samples
    return None if is_list and rows != samples else rows


def _dimensions(state: Any, count: int) -> dict[int, int]:
    """First dimensions that are those of a batch, with the number of rows of each sample."""
    rows = _rows(state)
    # Sequences are often flattened: each sample has as many rows as it has tokens.
    return {count: 1} if not rows or rows % count else {rows: rows // count, count: 1}
