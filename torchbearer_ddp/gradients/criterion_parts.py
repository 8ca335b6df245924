"""The objects that a criterion uses, and a way to call it without changing them."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch

#: How far to follow functions that use other functions, and lists inside of lists.
_DEPTH = 3
#: Whose objects are not looked into: writers and loaders, which other threads may use.
_LIBRARIES = ("numpy", "tensorboardX", "torch", "torchbearer", "torchbearer_ddp", "torchvision")


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

    Nothing is written to the originals: autograd may have saved them for backward. What its
    functions count in variables and in objects around them is as before, too.
    """
    found: dict[int, Any] = {}
    _collect(criterion, found, _DEPTH)
    functions = [each for each in found.values() if isinstance(each, types.FunctionType)]
    for value in (each for function in functions for each in _used_by(function)):
        if _is_of_the_user(value):
            found.setdefault(id(value), value)
    lists = [(vars(each), list(vars(each))) for each in found.values()]
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    lists += [(vars(m), ["_buffers"]) for module in modules for m in module.modules()]
    with contextlib.ExitStack() as stack:
        for attributes, names in lists:
            # A class with a __dict__ of its own kind, such as a scripted module, is left alone.
            if all(name in attributes for name in names):
                stack.callback(_put_back, attributes, dict(attributes))
                attributes.update({name: _copied(attributes[name], _DEPTH) for name in names})
        for function in functions:
            _copy_variables(function, stack)
        yield


def _is_of_the_user(value: Any) -> bool:
    """True for an object such as a meter: not one of torch or Python, with threads of its own."""
    if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return True
    package = type(value).__module__.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in _LIBRARIES


def _copy_variables(function: types.FunctionType, stack: contextlib.ExitStack) -> None:
    """Lets the variables that a function may assign or change be copies, until the stack ends."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            before = cell.cell_contents
            stack.callback(setattr, cell, "cell_contents", before)
            cell.cell_contents = _copied(before, _DEPTH)
    names = function.__code__.co_names
    values = function.__globals__
    known = {name: values[name] for name in names if name in values}
    stack.callback(_put_back_some, values, names, known)
    values.update({name: _copied(value, _DEPTH) for name, value in known.items()})


def _put_back_some(values: dict[str, Any], names: Iterable[str], before: dict[str, Any]) -> None:
    for name in names:
        if name not in before:
            values.pop(name, None)
    values.update(before)


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
