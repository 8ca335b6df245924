"""The arithmetic of pooling: sums of all ranks, combined as one process would compute them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy
import torch
from torchbearer.metrics import Var

from torchbearer_ddp.data.sampling import positions

_Rows = TypeVar("_Rows", torch.Tensor, list[Any])
#: The attributes in which metrics sum values and their squares.
_SUMS = ("_sum", "_sum_sq")
#: How many values are kept one by one before they are stacked.
_STACK = 256
#: How many numbers are added one after the other with one call.
_ADDED_AT_ONCE = 2**20


class Ledger:
    """What each batch adds to a :class:`Mean`, :class:`Var` or :class:`Std` on one rank.

    Its attributes are plain data, so a checkpoint in mid-epoch can hold them.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[torch.Tensor]] = {}
        self._counts: list[float] = []
        self._unstacked = 0
        self._every_batch = True

    def take(self, metric: Any) -> None:
        """Records what the metric has summed since :func:`empty` was called on it."""
        if not torch.is_tensor(metric._sum):  # this batch had no input for it
            self._every_batch = False
            return
        for name in _sums_of(metric):
            self._columns.setdefault(name, []).append(getattr(metric, name)[None])
        self._counts.append(float(metric._count))
        self._unstacked += 1
        if self._unstacked == _STACK:  # one large tensor takes less memory than many small ones
            for column in self._columns.values():
                column[-_STACK:] = [torch.cat(column[-_STACK:])]
            self._unstacked = 0

    def entry(self) -> dict[str, Any] | None:
        """The ledger as plain data for other ranks, or None if nothing was added."""
        if not self._counts:
            return None
        columns = {name: torch.cat(column).cpu() for name, column in self._columns.items()}
        return {
            **columns,
            "count": sum(self._counts),
            "one value a batch": self._every_batch and all(each == 1 for each in self._counts),
            "totals": None,
        }


def empty(metric: Any) -> None:
    """Sets a metric's sums to zero."""
    metric.__dict__.update(dict.fromkeys(_sums_of(metric), 0.0), _count=0)


def _sums_of(metric: Any) -> tuple[str, ...]:
    return _SUMS if isinstance(metric, Var) else _SUMS[:1]


def added(entry: dict[str, Any] | None, *, by_step: bool) -> dict[str, Any] | None:
    """An entry whose batches are added up, if the order cannot matter, as it is with accuracy.

    Sums of whole numbers are exact in any order, as long as they are small enough.
    """
    if entry is None or (by_step and entry["one value a batch"]):
        return entry
    columns = {name: entry[name] for name in _SUMS if name in entry}
    if not all(map(_is_whole, columns.values())):
        return entry
    totals = {name: column.double().sum(0) for name, column in columns.items()}
    empty_columns = {name: column[:0] for name, column in columns.items()}
    return {**entry, **empty_columns, "totals": totals}


def needs_batches(entries: Sequence[dict[str, Any] | None], *, by_step: bool) -> bool:
    """True if some ranks have added up their batches, but the order of all batches matters."""
    filled = [entry for entry in entries if entry is not None]
    if not any(entry["totals"] for entry in filled):
        return False
    if not all(entry["totals"] for entry in filled):
        return True
    # By step they are added in double precision.
    dtype = torch.float64 if by_step else filled[0]["_sum"].dtype
    exact_below = 2 / torch.finfo(dtype).eps
    return any(bool((each >= exact_below).any()) for each in _totals(filled).values())


def pool(
    entries: Sequence[dict[str, Any] | None],
    sizes: Sequence[torch.Tensor],
    *,
    by_step: bool,
    of_loss: bool = False,
    summed: bool = False,
) -> dict[str, Any] | None:
    """The attributes that a metric would have if one process had seen the data of all ranks.

    With ``by_step`` the ranks' batches of one step are parts of one batch, which count by their
    ``sizes``. Otherwise each is a batch of one process, and sums are added in the order and
    precision of that process. ``summed`` means that the value of a batch is a sum over its samples.
    Either all entries are :func:`added` or none.
    """
    filled = [(e, s) for e, s in zip(entries, sizes, strict=True) if e is not None]
    if not filled:
        return None
    first = filled[0][0]
    dtypes = {name: first[name].dtype for name in _SUMS if name in first}
    if by_step and _is_per_batch(filled, of_loss):
        values = _step_values(filled, summed=summed)
        powers = {"_sum": values, "_sum_sq": values.square()}
        pooled = {name: _total(powers[name], dtype) for name, dtype in dtypes.items()}
        return {**pooled, "_count": float(len(values))}
    count = sum(float(e["count"]) for e, _ in filled)
    if first["totals"]:
        totals = _totals([e for e, _ in filled])
        return {**{name: totals[name].to(dtype) for name, dtype in dtypes.items()}, "_count": count}
    pooled = {}
    for name, dtype in dtypes.items():
        batches = in_turn([e[name] for e, _ in filled])
        pooled[name] = _total(batches, dtype) if by_step else _added_in_order(batches)
    return {**pooled, "_count": count}


def in_turn(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all ranks: the first of each, the second of each, and so on."""
    padded = torch.nn.utils.rnn.pad_sequence(list(columns))
    lengths = torch.tensor([len(column) for column in columns], device="cpu")
    return padded[torch.arange(len(padded), device="cpu")[:, None] < lengths]


def to_runs(values: torch.Tensor) -> list[torch.Tensor]:
    """Values and how often each is repeated: the batches of a pass are nearly all of one size."""
    return list(torch.unique_consecutive(values, return_counts=True))


def from_runs(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What :func:`to_runs` was given."""
    values, counts = runs
    return values.repeat_interleave(counts)


def _added_in_order(values: torch.Tensor) -> torch.Tensor:
    """The sum over the rows, one after the other, in the precision of the values."""
    if values.dtype not in (torch.float32, torch.float64):
        return functools.reduce(torch.add, values.unbind())
    total = values[:1].numpy()
    for part in torch.split(values[1:], max(1, _ADDED_AT_ONCE // max(1, values[0].numel()))):
        # accumulate is defined to go row by row; sum is not.
        total = numpy.add.accumulate(numpy.concatenate([total, part.numpy()]))[-1:]
    return torch.from_numpy(total.copy())[0]


def _is_whole(values: torch.Tensor) -> bool:
    """True for numbers like 0, 1, 2, without minus zero, whose sign a sum may lose."""
    if not values.is_floating_point():
        return False
    return not bool((values.signbit() | (values != values.floor()) | values.isinf()).any())


def _totals(entries: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The sums of all ranks' entries, each of which is :func:`added`."""
    names = entries[0]["totals"]
    return {name: torch.stack([each["totals"][name] for each in entries]).sum(0) for name in names}


def _total(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.double().sum(0).to(dtype)


def _is_per_batch(filled: list[tuple[dict[str, Any], torch.Tensor]], of_loss: bool) -> bool:
    """True if a metric has one input value per batch, and not one per sample."""
    single = all(e["one value a batch"] for e, _ in filled)
    return single and (of_loss or any(bool((size > 1).any()) for _, size in filled))


def _step_values(
    filled: list[tuple[dict[str, Any], torch.Tensor]], *, summed: bool
) -> torch.Tensor:
    """The value of each step's whole batch, from its parts."""
    steps = max(len(entry["_sum"]) for entry, _ in filled)
    shape = filled[0][0]["_sum"].shape[1:]
    total = torch.zeros(steps, *shape, dtype=torch.float64, device="cpu")
    weight = torch.zeros(steps, *(1 for _ in shape), dtype=torch.float64, device="cpu")
    for entry, sizes in filled:
        # A metric that was added in mid-pass has not seen the first batches.
        part = sizes[len(sizes) - len(entry["_sum"]) :]
        part = torch.ones_like(part) if summed else part
        part = part.double().view(-1, *(1 for _ in shape))
        # A part that does not count may have no value: a loss whose targets are all ignored is NaN.
        total[: len(part)] += torch.where(part > 0, entry["_sum"] * part, 0.0)
        weight[: len(part)] += part
    return total if summed else total / weight


def in_order(parts: Sequence[torch.Tensor | None], block: int) -> torch.Tensor | None:
    """The rows of all ranks (None for a rank without any) in their order before sharding."""
    places = [
        positions(0 if part is None else len(part), rank, len(parts), block)
        for rank, part in enumerate(parts)
    ]
    return joined(parts, places)


def joined(parts: Sequence[_Rows | None], places: Sequence[torch.Tensor]) -> _Rows | None:
    """The rows (or items of lists) of all ranks, sorted by their places."""
    present = [part for part in parts if part is not None and len(part)]
    if not present:
        return next((part for part in parts if part is not None), None)
    order = torch.argsort(torch.cat(list(places)), stable=True)
    if isinstance(present[0], list):
        everything = [item for part in present for item in part]
        return [everything[index] for index in order.tolist()]
    return torch.cat(present)[order]


def places_of_batches(
    counts: Sequence[Sequence[int]], sizes: Sequence[torch.Tensor], *, dealt: bool
) -> list[torch.Tensor]:
    """Where the rows of each rank's batches are in the order of one process.

    ``counts`` are the rows of each batch. The ranks' batches of a step follow each other, or if
    samples were ``dealt`` one by one, the samples of the ranks alternate.
    """
    widest = max((count for rank in counts for count in rank), default=0) + 1
    places = []
    for rank, (mine, samples) in enumerate(zip(counts, sizes, strict=True)):
        rows = torch.tensor(mine, dtype=torch.int64, device="cpu")
        per_sample = rows // samples[len(samples) - len(rows) :].clamp(min=1).long()
        batch = torch.repeat_interleave(torch.arange(len(rows), device="cpu"), rows)
        row = torch.arange(len(batch), device="cpu") - (rows.cumsum(0) - rows)[batch]
        sample = row // per_sample.clamp(min=1)[batch] if dealt else torch.zeros_like(row)
        places.append(((batch * widest + sample) * len(counts) + rank) * widest + row)
    return places


def average(values: Sequence[Any]) -> Any:
    """The average of the ranks' values: numbers, tensors, and lists or dicts of them.

    A rank without a value has None.
    """
    found = [value for value in values if value is not None]
    if not found:
        return None
    first = found[0]
    if isinstance(first, dict):
        return {key: average([value.get(key) for value in found]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(average(each) for each in zip(*found, strict=False))
    if torch.is_tensor(first):
        return torch.stack([value.double() for value in found]).mean(0).to(first.dtype)
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(found) / len(found)
    return first
