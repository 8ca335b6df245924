"""The state of the metrics in mid-epoch: sums, counts, predictions so far.

torchbearer's metrics cannot save themselves, but what they gather is plain data in their
attributes. So the tree of metrics is walked, and of each one the attributes that are data are
taken; functions, other metrics and the like are part of how the trial is built, not of its state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torchbearer.bases import Callback, Metric
from torchbearer.metrics import EpochLambda
from torchbearer.state import StateKey

from torchbearer_ddp.metrics import pooling

_PLAIN = (type(None), bool, int, float, str)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, deque)}
#: What an EpochLambda gathers: large, and empty again at the next epoch.
_GATHERED = ("_y_true", "_y_pred")


class _NotDataError(Exception):
    pass


def collect(metrics: Metric, *, mid_epoch: bool) -> dict[str, dict[str, Any]]:
    """What every metric holds, by its place in the tree.

    Args:
        metrics: The metric list of the trial.
        mid_epoch: False leaves out what the next epoch begins by dropping.
    """
    collected = {}
    for path, metric in _walk(metrics, "", set()):
        if not (mid_epoch or isinstance(metric, Metric)):
            continue
        held = dict(vars(metric))
        if not mid_epoch and isinstance(metric, EpochLambda):
            held = {name: value for name, value in held.items() if name not in _GATHERED}
        collected[path] = pack_all(held)
    return collected


def restore(metrics: Metric, saved: dict[str, dict[str, Any]], device: Any) -> None:
    """Puts back what :func:`collect` gave.

    Args:
        metrics: The metric list of the trial, built as it was then.
        saved: What :func:`collect` gave.
        device: Where tensors go that were not on the CPU.
    """
    for path, metric in _walk(metrics, "", set()):
        vars(metric).update(unpack_all(saved.get(path, {}), device))


def _walk(metric: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    # A timer is a callback too, and a clock reading of another process means nothing here.
    if id(metric) in seen or isinstance(metric, StateKey | Callback):
        return
    seen.add(id(metric))
    yield path, metric
    for name, value in vars(metric).items():
        for index, part in enumerate(_flat(value)):
            if _holds_state(part):
                yield from _walk(part, f"{path}.{name}[{index}]", seen)


def _holds_state(part: Any) -> bool:
    """True for metrics, and for what the pooling metric list notes of each."""
    return isinstance(part, Metric) or type(part).__module__ == pooling.__name__


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def pack_all(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of those values that are data, in a form that remembers kinds and devices.

    Args:
        values: Values by name.
    """
    packed = {}
    for name, value in values.items():
        try:
            packed[name] = _pack(value)
        except _NotDataError:
            continue
    return packed


def unpack_all(packed: dict[str, Any], device: Any) -> dict[str, Any]:
    """The values that :func:`pack_all` packed.

    Args:
        packed: What it gave.
        device: Where tensors go that were not on the CPU.
    """
    return {name: _unpack(value, device) for name, value in packed.items()}


def _pack(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return ["tensor", value.device.type != "cpu", value.detach().cpu().clone()]
    if type(value) is dict:
        return ["dict", [[_pack(k), _pack(v)] for k, v in value.items()]]
    for name, kind in _KINDS.items():
        if type(value) is kind:
            limit = value.maxlen if kind is deque else None
            return [name, limit, _pack_items(list(value))]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return value.item()
    raise _NotDataError


def _pack_items(items: list[Any]) -> Any:
    first = items[0] if items else None
    if isinstance(first, torch.Tensor) and len({_form(each) for each in items}) == 1:
        # One tensor instead of one for each step of an epoch.
        return ["stacked", first.device.type != "cpu", torch.stack(items).detach().cpu()]
    return [_pack(each) for each in items]


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    return None


def _unpack(packed: Any, device: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    if packed[0] == "tensor":
        _, elsewhere, tensor = packed
        return tensor.to(device) if elsewhere else tensor.clone()
    if packed[0] == "dict":
        return {_unpack(k, device): _unpack(v, device) for k, v in packed[1]}
    name, limit, items = packed
    if items and items[0] == "stacked":
        _, elsewhere, stacked = items
        values = [row.clone() for row in (stacked.to(device) if elsewhere else stacked)]
    else:
        values = [_unpack(each, device) for each in items]
    return deque(values, limit) if name == "deque" else _KINDS[name](values)
