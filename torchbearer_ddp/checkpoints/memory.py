"""What a data set remembers of the items that were read from it.

A counter, a list that grows, a tensor that is written to: where such a thing has changed, later
items may depend on earlier ones, and a resume must read these again. A data set is looked at from
outside and not in full, so a change in a large array of numpy's or outside of Python is not seen.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torchbearer

from torchbearer_ddp.checkpoints import generators, loader_state

_DEPTH = 8
#: How many items of a list or a dict, and how many things in all, are looked at.
_WIDTH = 32
_MOST = 4096
#: Longer texts and larger arrays are known by their length.
_LARGEST = 1024
_PLAIN = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OBJECT = "object"
_NONE = repr(None)


def of_data(state: Any) -> dict[str, str]:
    """What the training data of a run remembers, and does not save itself."""
    loader, _ = state[torchbearer.SELF].state[torchbearer.TRAIN_DATA] or (None, None)
    dataset = getattr(loader, "dataset", None)
    if loader_state.find(state) is not None and loader_state.saves_itself(dataset):
        dataset = None
    return of_parts(dataset, getattr(loader, "collate_fn", None))


def of_parts(*parts: Any) -> dict[str, str]:
    """What a data set and a collate function remember, by the path to it."""
    seen: set[int] = set()
    inside = (_inside(part, f".{n}", seen, _DEPTH) for n, part in enumerate(parts))
    return dict(itertools.islice(itertools.chain.from_iterable(inside), _MOST))


def has_changed(then: dict[str, str], now: dict[str, str]) -> bool:
    """True if something is remembered now that was not then.

    An object that was not there, or None, is a file that was opened when it was first needed.
    """
    changed = [path for path in then.keys() | now.keys() if then.get(path) != now.get(path)]
    opened = {p for p in changed if then.get(p, _NONE) == _NONE and now.get(p) == _OBJECT}
    return not all(path in opened or _parents(path) & opened for path in changed)


def _parents(path: str) -> set[str]:
    return {path[:end] for end in range(1, len(path)) if path[end] in ".["}


def _inside(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, _PLAIN):
        is_long = isinstance(value, str | bytes) and len(value) > _LARGEST
        yield path, str(len(value)) if is_long else repr(value)  # type: ignore[arg-type]
        return
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, f"version {value._version} of {tuple(value.shape)}"
    elif isinstance(value, numpy.ndarray):
        yield path, f"{value.shape} {value.tobytes() if value.size <= _LARGEST else ''!r}"
    elif isinstance(value, _CONTAINERS):
        yield path, f"{len(value)} items"
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for number, (key, each) in zip(range(_WIDTH), items, strict=False):
            name = repr(key) if isinstance(key, _PLAIN) else str(number)
            yield from _inside(each, f"{path}[{name}]", seen, depth - 1)
    elif not isinstance(value, (*generators.GENERATORS, *generators.PASSED_OVER)):
        yield path, _OBJECT
        for name, each in generators.attributes(value):
            yield from _inside(each, f"{path}.{name}", seen, depth - 1)
