"""The objects that a criterion uses, and a way to call it without changing them."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy
import torch

#: How far to follow functions that use other functions, and lists inside of lists.
_DEPTH = 3


def parts_of(criterion: Any) -> list[Any]:
    """The criterion, and the modules and callable objects that it uses, as far as can be seen."""
    found: dict[int, Any] = {}
    _collect(criterion, found, _DEPTH)
    return [each for each in found.values() if not isinstance(each, types.FunctionType)]


def _collect(value: Any, found: dict[int, Any], depth: int) -> None:
    if id(value) in found or depth < 0:
        return
    if isinstance(value, torch.nn.Module):
        found.update((id(module), module) for module in value.modules())
    elif isinstance(value, functools.partial):
        for each in (value.func, *value.args, *value.keywords.values()):
            _collect(each, found, depth)
    elif isinstance(value, types.MethodType):
        _collect_attributes(value.__self__, found, depth)
        _collect(value.__func__, found, depth)
    elif isinstance(value, types.FunctionType):
        if not value.__module__.startswith("torch."):
            found[id(value)] = value
            for each in _used_by(value):
                _collect(each, found, depth - 1)
    elif callable(value):
        _collect_attributes(value, found, depth)


def _collect_attributes(value: Any, found: dict[int, Any], depth: int) -> None:
    if isinstance(value, torch.nn.Module):
        _collect(value, found, depth)
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        found[id(value)] = value
        for each in vars(value).values():
            _collect(each, found, depth - 1)


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function uses: variables of the functions around it, globals, and defaults."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
    for name in function.__code__.co_names:
        yield function.__globals__.get(name)
    yield from function.__defaults__ or ()


@contextlib.contextmanager
def on_copies(criterion: Any, state: Any) -> Iterator[None]:
    """Lets a criterion's objects, and the buffers of modules in the state, be copies of themselves.

    Nothing is written to the originals: autograd may have saved them for backward.
    """
    lists = [(vars(each), list(vars(each))) for each in parts_of(criterion)]
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    lists += [(vars(m), ["_buffers"]) for module in modules for m in module.modules()]
    with contextlib.ExitStack() as stack:
        for attributes, names in lists:
            # A class with a __dict__ of its own kind, such as a scripted module, is left alone.
            if all(name in attributes for name in names):
                stack.callback(_put_back, attributes, dict(attributes))
                attributes.update({name: _copied(attributes[name], _DEPTH) for name in names})
        yield


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)


def _copied(value: Any, depth: int) -> Any:
    """A copy of what a call may change: tensors, generators, and containers of them."""
    if depth == 0 or isinstance(value, torch.nn.Parameter):
        return value
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = _copied(each, depth - 1)
        return copied
    if type(value) is list:
        return [_copied(each, depth - 1) for each in value]
    if isinstance(value, set):
        return copy.copy(value)
    return value
