"""The state of the metrics in mid-epoch: sums, counts, predictions so far.

torchbearer's metrics cannot save themselves, but what they gather is plain data in their
attributes. So the tree of metrics is walked, and of each one the attributes that are data are
taken; functions, other metrics and the like are part of how the trial is built, not of its state.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torchbearer.bases import Callback, Metric
from torchbearer.metrics import EpochLambda
from torchbearer.state import StateKey

from torchbearer_ddp.checkpoints import contents
from torchbearer_ddp.group.plain_data import PlainDataWalker
from torchbearer_ddp.metrics.pooling import Ledger

#: Exactly these: a subclass would not come back as what it was.
_DATA = (type(None), bool, int, float, str, bytes, list, tuple, set, deque)
#: These with their subclasses: a dict comes back as the kind that is there.
_DATA_KINDS = (torch.Tensor, numpy.generic, numpy.ndarray, dict)
#: What an EpochLambda gathers: large, and empty again at the next epoch.
_GATHERED = ("_y_true", "_y_pred")


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
            if isinstance(metric, EpochLambda):
                held = {name: value for name, value in held.items() if name not in _GATHERED}
        collected[path] = collect_values(held)
    return collected


def restore(metrics: Metric, saved: dict[str, dict[str, Any]]) -> None:
    """Puts back what :func:`collect` gave into metrics that are built as they were then."""
    for path, metric in _walk(metrics, "", set()):
        held = vars(metric)
        for name, value in saved.get(path, {}).items():
            live = held.get(name)
            if isinstance(live, deque):
                held[name] = deque(value, live.maxlen)
            else:
                held[name] = contents.like(live, value)


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
        with contextlib.suppress(_NotDataError):
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
