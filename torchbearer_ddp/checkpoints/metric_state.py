"""The state of the metrics in mid-epoch: sums, counts, predictions so far.

torchbearer's metrics cannot save themselves, but what they gather is plain data in their
attributes. So the tree of metrics is walked, and of each one the attributes that are data are
taken; functions, other metrics and the like are part of how the trial is built, not of its state.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torchbearer.bases import Callback, Metric
from torchbearer.metrics import EpochLambda, Mean, RunningMean, Var
from torchbearer.state import StateKey

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import kinds
from torchbearer_ddp.errors import CheckpointError, DistributedError
from torchbearer_ddp.group.plain_data import PlainDataWalker
from torchbearer_ddp.metrics.combine import GATHERED
from torchbearer_ddp.metrics.pooled_list import PooledMetricList
from torchbearer_ddp.metrics.pooling import Ledger

#: Exactly these: a subclass would not come back as what it was.
_DATA = (type(None), bool, int, float, str, bytes, list, tuple, set, deque)
#: These with their subclasses: a dict comes back as the kind that is there.
_DATA_KINDS = (torch.Tensor, numpy.generic, numpy.ndarray, dict)
_SUMS = ("_sum", "_sum_sq", "_count")
#: What torchbearer's metrics are made with.
_SETTINGS = ("name", "_kwargs", "_batch_size", "_step_size", "_unbiased")
#: What means nothing in another process.
_IDS = ("_seen",)
_TENSOR = checked.kind(torch.Tensor, "a tensor")
_COUNTS = checked.items(checked.whole(0))
#: What a metric of one of these classes would only fail on in a later batch.
_HELD: tuple[tuple[type, checked.Form], ...] = (
    (
        Ledger,
        checked.record(
            {},
            _columns=checked.table(checked.items(_TENSOR)),
            _counts=checked.items(checked.number),
            _unstacked=checked.whole(0),
            _every_batch=checked.boolean,
        ),
    ),
    (
        PooledMetricList,
        checked.record(
            {},
            _sizes=_COUNTS,
            _weights=checked.items(checked.number),
            _lengths=checked.items(checked.table(_COUNTS)),
        ),
    ),
    (RunningMean, checked.record({}, _cache=checked.items(_TENSOR))),
    (EpochLambda, checked.record({}, **dict.fromkeys(GATHERED, checked.optional(_TENSOR)))),
)


class _NotDataError(Exception):
    pass


def collect(metrics: Metric, *, mid_epoch: bool) -> dict[str, dict[str, Any]]:
    """What every metric holds, by its place in the tree; at the end of an epoch what it keeps."""
    collected = {}
    for path, metric in _walk(metrics, "", set()):
        held = dict(vars(metric))
        if not mid_epoch:
            if isinstance(metric, Ledger):
                continue
            if isinstance(metric, EpochLambda):  # large, and empty again at the next epoch
                held = {name: value for name, value in held.items() if name not in GATHERED}
        collected[path] = collect_values(held)
    return collected


def restore(metrics: Metric, saved: dict[str, dict[str, Any]]) -> None:
    """Puts back what :func:`collect` gave into metrics that are built as they were then."""
    check(metrics, saved)
    for path, metric in _walk(metrics, "", set()):
        for name, value in _state(metric, saved.get(path, {})).items():
            vars(metric)[name] = kinds.like(vars(metric).get(name), value)


def watch(metrics: Metric, path: str) -> None:
    """Names the file if the metrics fail at their next batch, or at the end of their epoch.

    Whether rows and sums go with a batch can only be seen when there is one, and in classes of the
    user's own.
    """
    for name in ("process", "process_final"):
        vars(metrics)[name] = partial(_first_call, metrics, name, path)


def _first_call(metrics: Metric, name: str, path: str, *args: Any) -> Any:
    del vars(metrics)[name]
    try:
        return getattr(metrics, name)(*args)
    except (DistributedError, OSError):
        raise
    except Exception as error:  # of any kind, as the metrics are
        raise CheckpointError(
            f"{path}: the metrics failed when they were first used with what it holds of them "
            f"({checked.first_line(error)}). If the error is not their own, remove the file, to "
            "continue from an older one."
        ) from error


def changes(metrics: Metric, saved: dict[str, dict[str, Any]]) -> list[str]:
    """The names of the metrics that are not where they were when this was saved."""
    here = _named({path: vars(metric) for path, metric in _walk(metrics, "", set())})
    return sorted({name for _, name in here ^ _named(saved)})


def _named(held: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """The places that have a name; anything may be there in a damaged file."""
    names = {path: values.get("name") for path, values in held.items()}
    return {(path, name) for path, name in names.items() if isinstance(name, str)}


def check_names(metrics: Metric, saved: dict[str, dict[str, Any]]) -> None:
    """Refuses metrics without names, which cannot be told from others.

    Raises:
        Unexpected: If there are some.
    """
    checked.record({"": checked.anything})(saved, "what was saved of the metrics")
    for path, metric in _walk(metrics, "", set()):
        if path in saved and isinstance(getattr(metric, "name", None), str):
            checked.record({"name": checked.text()})(saved[path], f"the metric {metric.name!r}")


def check(metrics: Metric, saved: dict[str, dict[str, Any]]) -> None:
    """Refuses a value of another kind than a metric has here.

    Raises:
        Unexpected: If there is one.
    """
    held = {id(metric): saved.get(path, {}) for path, metric in _walk(metrics, "", set())}
    for path, metric in _walk(metrics, "", set()):
        for name, value in _state(metric, saved.get(path, {})).items():
            where = f"{name!r} of the metric {type(metric).__name__}"
            kinds.check(vars(metric).get(name), value, where, owner=metric)
        for name in [each for each in _SUMS if path in saved and each in vars(metric)]:
            value, kind = saved[path].get(name), type(metric).__name__
            if value is None:
                raise checked.Unexpected(f"{name!r} of the metric {kind} is missing")
            if name != "_count" and saved[path].get("_count"):
                _TENSOR(value, f"{name!r} of the metric {kind}")
            if isinstance(metric, Mean | Var) and not metric._kwargs:  # over all dimensions
                kinds.one_number(value, f"{name!r} of the metric {kind}")
        for owner, form in _HELD:
            if isinstance(metric, owner):
                form(saved.get(path, {}), f"the metric {type(metric).__name__}")
        with checked.damage(f"what was saved of the metric {type(metric).__name__}"):
            _check_batches(metric, saved.get(path, {}), len(saved[""].get("_sizes", ())))
            if isinstance(metric, PooledMetricList) and saved.get(path):
                _check_rows(metric, saved[path]["_lengths"], held)


def _check_batches(metric: Any, held: dict[str, Any], batches: int) -> None:
    """Refuses values of batches that do not fit together, or are of more batches than there were.

    What torch raises is the error.
    """
    if isinstance(metric, RunningMean) and held.get("_cache"):
        is_one = torch.stack(list(held["_cache"]))[0].numel() == 1
        form = checked.number if is_one else checked.items(checked.anything)
        form(held.get("_result"), "its last value")
    if isinstance(metric, EpochLambda):
        gathered = [held[name] is None for name in GATHERED if name in held]
        if any(gathered) and not all(gathered):
            raise ValueError("it has targets or predictions, and not both")
    if isinstance(metric, Ledger):
        found = [len(torch.cat(list(column))) for column in held.get("_columns", {}).values()]
        if any(rows != len(held.get("_counts", ())) or rows > batches for rows in found):
            raise ValueError(f"it has the values of {found[0]} batches, not of {batches}")
    if isinstance(metric, PooledMetricList) and held:
        checked.items(checked.anything, batches)(held["_weights"], "the list of its weights")
        checked.items(checked.anything, len(metric._lengths))(held["_lengths"], "its lengths")
        if any(len(each) > batches for table in held["_lengths"] for each in table.values()):
            raise ValueError(f"it has lengths of more than {batches} batches")


def _check_rows(
    metrics: PooledMetricList, recorded: list[dict[str, list[int]]], held: dict[int, dict[str, Any]]
) -> None:
    """Refuses other numbers of gathered rows than were counted after the last batch."""
    for (leaf, _), lengths in zip(metrics.with_rows(), recorded, strict=True):
        found = held[id(leaf.metric)]
        for name in [each for each in lengths if lengths[each] and each in found]:
            rows = 0 if found[name] is None else len(found[name])
            checked.one_of(lengths[name][-1])(rows, f"the number of rows in its {name!r}")


def _state(metric: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """What was saved of a metric, but for settings of torchbearer's, and the ids of objects."""
    is_host = type(metric).__module__.startswith("torchbearer.")
    left_out = _SETTINGS * is_host + _IDS * isinstance(metric, PooledMetricList)
    return {name: value for name, value in saved.items() if name not in left_out}


def _walk(metric: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    # A timer is a callback too, and a clock reading of another process means nothing here.
    if id(metric) in seen or isinstance(metric, StateKey | Callback):
        return
    seen.add(id(metric))
    yield path, metric
    for name, value in vars(metric).items():
        for index, part in enumerate(_flat(value)):
            # A ledger is what the pooling metric list keeps of a metric.
            if isinstance(part, Metric | Ledger):
                yield from _walk(part, f"{path}.{name}[{index}]", seen)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def collect_values(values: dict[str, Any]) -> dict[str, Any]:
    """Those values that are data."""
    collector, found = _Collector(), {}
    for name, value in values.items():
        with contextlib.suppress(_NotDataError, RecursionError):
            found[name] = collector.walk(value, name)
    return found


class _Collector(PlainDataWalker):
    def walk(self, value: Any, where: str) -> Any:
        if type(value) not in _DATA and not isinstance(value, _DATA_KINDS):
            raise _NotDataError
        return super().walk(list(value) if isinstance(value, deque) else value, where)

    def array(self, array: Any, where: str) -> Any:
        if array.dtype.kind not in "biufc":
            raise _NotDataError
        return array
