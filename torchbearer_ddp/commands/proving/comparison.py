"""How far N ranks are from one process, measured by what rounding does to one process.

The unit of every difference is the distance between one process and the same process whose
parameters differed by one unit in the last place at the start: what comes of rounding errors by the
same step, in the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchbearer_ddp.commands.proving.sketch import distance, norm

Recording = dict[str, Any]
#: What is compared, in the order in which a step computes it.
STAGES = ("start", "loss", "gradient", "parameter", "metric")
#: A difference of up to so many times what rounding does is rounding.
LIMIT = 16.0


@dataclass(frozen=True)
class Difference:
    """One value, or one tensor, at one step.

    Attributes:
        step: The number of the step, from 0; for a metric the last step of its pass.
        stage: One of :data:`STAGES`.
        name: The name of the tensor or metric.
        size: The length of the tensor in one process.
        found: How far N ranks are from it.
        rounding: How far one process gets from it by rounding.
    """

    step: int
    stage: str
    name: str
    size: float
    found: float
    rounding: float

    @property
    def ratio(self) -> float:
        """The difference in units of what rounding does."""
        if not self.found:
            return 0.0
        return self.found / self.rounding if self.rounding else math.inf

    @property
    def is_equal(self) -> bool:
        """True if it is no more than rounding."""
        return self.ratio <= LIMIT

    @property
    def relative(self) -> float:
        """The difference relative to the size of the tensor."""
        return self.found / self.size if self.size else self.found

    @property
    def relative_rounding(self) -> float:
        """What rounding does, relative to the size of the tensor."""
        return self.rounding / self.size if self.size else self.rounding


@dataclass
class Comparison:
    """All differences of two runs.

    Attributes:
        differences: In the order in which they were computed.
        steps: How many steps both sides took.
        problems: What could not be compared, as sentences.
    """

    differences: list[Difference] = field(default_factory=list)
    steps: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        """The first difference that is more than rounding; of those of one moment the largest."""
        return self._first(STAGES)

    @property
    def first_tensor(self) -> Difference | None:
        """The same of parameters and gradients alone."""
        return self._first(("start", "gradient", "parameter"))

    def _first(self, stages: Sequence[str]) -> Difference | None:
        beyond = [each for each in self.differences if not each.is_equal and each.stage in stages]
        if not beyond:
            return None
        moment = (beyond[0].step, beyond[0].stage)
        return max(
            (each for each in beyond if (each.step, each.stage) == moment),
            key=lambda each: each.ratio,
        )

    @property
    def is_equal(self) -> bool:
        """True if all differences are rounding."""
        return self.first is None and not self.problems

    def worst(self, step: int | None = None, stage: str | None = None) -> Difference | None:
        """The largest difference of a step and stage, in units of rounding."""
        found = [
            each
            for each in self.differences
            if step in (None, each.step) and stage in (None, each.stage)
        ]
        return max(found, key=lambda each: each.ratio, default=None)


def compare(
    ranks: Sequence[Recording], alone: Recording, roundings: Sequence[Recording]
) -> Comparison:
    """Compares N ranks with one process, by what came of it with other roundings."""
    together = _together(ranks)
    comparison = Comparison(steps=min(len(together["steps"]), len(alone["steps"])))
    rounded = [dict(_values(each)) for each in roundings]
    found, expected = dict(_values(together)), dict(_values(alone))
    missing = [key for key in [*found, *expected] if key not in found or key not in expected]
    if missing:
        comparison.problems.append(_missing(missing[0], found))
    scales = _scales(expected)
    for key in sorted(expected, key=lambda key: (key[0], STAGES.index(key[1]))):
        if key not in found:
            continue
        step, stage, _ = key
        # The model at the start does not depend on rounding: nothing has been computed yet.
        measured = [] if stage == "start" else rounded
        apart = [distance(each[key], expected[key]) for each in measured if key in each]
        floor = alone["facts"]["eps"] * max(norm(expected[key]), scales[step, stage])
        comparison.differences.append(
            Difference(
                *key,
                size=norm(expected[key]),
                found=distance(found[key], expected[key]),
                rounding=max([floor, *apart]),
            )
        )
    return comparison


def unreproducible(alone: Recording, repeat: Recording) -> str | None:
    """Where one process differs from itself, as the beginning of a sentence; None if it does not.

    Where two equal runs differ for the first time, errors have not had time to grow: more than the
    square root of the precision is not rounding, which some devices do in another order each time.
    """
    mine, again = dict(_values(alone)), dict(_values(repeat))
    for number in range(min(len(alone["steps"]), len(repeat["steps"]))):
        if any(distance(mine[k], again[k]) for k in mine if k[:2] == (number, "start")):
            return f"the model at step {number}"
        rows = [each["steps"][number]["rows"] for each in (alone, repeat)]
        if not torch.equal(*rows):
            return f"the data of step {number}"
        for stage in STAGES[1:]:
            keys = [key for key in mine if key[:2] == (number, stage) and key in again]
            size = math.hypot(*(norm(mine[key]) for key in keys))
            apart = math.hypot(*(distance(mine[key], again[key]) for key in keys))
            if apart > math.sqrt(alone["facts"]["eps"]) * size:
                return f"the {stage} at step {number}"
            # A loss is one number, which may be nearly the same by chance: its gradients tell.
            if apart and stage != "loss":
                return None
    return None


def _missing(key: tuple[int, str, str], found: dict[Any, Any]) -> str:
    step, stage, name = key
    sides = ("the ranks have", "one process has")
    has, lacks = sides if key in found else sides[::-1]
    return f"at step {step} {has} the {stage} {name}, and {lacks} not"


def _scales(values: dict[Any, torch.Tensor]) -> dict[tuple[int, str], float]:
    """The typical size of a tensor of a step: what a value near zero may be off by rounding."""
    squares: dict[tuple[int, str], list[float]] = {}
    for (step, stage, _), value in values.items():
        squares.setdefault((step, stage), []).append(norm(value) ** 2)
    return {
        key: 0.0 if key[1] != "gradient" else math.sqrt(sum(each) / len(each))
        for key, each in squares.items()
    }


def _values(recording: Recording) -> Iterator[tuple[tuple[int, str, str], torch.Tensor]]:
    """Everything that is compared, by step, stage and name."""
    for number, tensors in enumerate(recording["initial"]):
        suffix = f" of Trial {number}" if number else ""
        first = next((i for i, s in enumerate(recording["steps"]) if s["trial"] == number), 0)
        for name, value in tensors.items():
            yield (first, "start", f"{name}{suffix}"), value
    for number, step in enumerate(recording["steps"]):
        if step["loss"] is not None:
            yield (
                (number, "loss", "loss"),
                torch.tensor([step["loss"]], dtype=torch.float64, device="cpu"),
            )
        for stage, tensors in (("gradient", step["gradients"]), ("parameter", step["parameters"])):
            for name, value in tensors.items():
                yield (number, stage, name), value
    for index, each in enumerate(recording["passes"]):
        for name, value in each["values"].items():
            key = f"{name} ({each['name']} pass {index})"
            yield (
                (each["after"] - 1, "metric", key),
                torch.tensor([value], dtype=torch.float64, device="cpu"),
            )


def _together(ranks: Sequence[Recording]) -> Recording:
    """The recording of rank zero with the losses of all ranks."""
    first = dict(ranks[0])
    count = min(len(each["steps"]) for each in ranks)
    first["steps"] = [
        {**ranks[0]["steps"][number], "loss": _loss([r["steps"][number] for r in ranks])}
        for number in range(count)
    ]
    return first


def _loss(steps: Sequence[Any]) -> float | None:
    """The loss of all ranks, combined as their gradients are."""
    if any(step["loss"] is None for step in steps):
        return None
    if steps[0]["kind"] == "sum":
        return sum(step["loss"] for step in steps)  # type: ignore[no-any-return]
    total = sum(step["weight"] for step in steps) or 1.0
    parts = [step["loss"] * step["weight"] for step in steps if step["weight"]]
    return sum(parts) / total  # type: ignore[no-any-return]
