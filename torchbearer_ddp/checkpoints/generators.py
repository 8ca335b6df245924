"""Random number generators: those of the process, and those that data, models and callbacks own.

The objects that a run uses are walked: attributes, lists, tuples, dicts, modules, and what
functions hold (closures, defaults, arguments of partials).
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torchbearer
from torch.utils.data import DataLoader

from torchbearer_ddp import checked
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import trained
from torchbearer_ddp.group.plain_data import type_name

#: How deep to look into loaders, and into what the state and the callbacks hold.
_LOADER_DEPTH = 12
_DEPTH = 6
#: How many items of a list or a dict are looked at, unless there are generators among them.
_WIDTH = 32
GENERATORS = (
    torch.Generator,
    numpy.random.Generator,
    numpy.random.RandomState,
    random.Random,
)
#: What holds no generator of the user's, or leads back to everything.
PASSED_OVER = (
    torch.Tensor,
    numpy.ndarray,
    torch.optim.Optimizer,
    torchbearer.Trial,
    torchbearer.State,
    type,
    types.ModuleType,
    str,
    bytes,
    int,
    float,
    type(None),
)
#: What every module has, apart from the modules in it.
_OF_MODULES = vars(torch.nn.Module()).keys() - {"_modules"}


def collect(state: Any) -> dict[str, Any]:
    """The state of every generator that this rank uses, as plain data."""
    return {**randomness.rng_state(), "loaders": states_of(find(state))[0]}


def restore(state: Any, saved: dict[str, Any]) -> None:
    """Puts back what :func:`collect` gave."""
    with checked.damage("The state of a random generator"):
        randomness.set_rng_state(saved)
        set_states(find(state), saved["loaders"])


def set_states(found: list[tuple[str, Any]], states: dict[str, Any]) -> None:
    """Puts back the states of those generators that have one."""
    for name, each in found:
        if name in states:
            _set(each, states[name])


def problems(state: Any) -> list[str]:
    """The generators whose state cannot be saved, by name."""
    return states_of(find(state))[1]


def states_of(found: list[tuple[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The states of generators by name, and which of them have none that can be saved."""
    states, failed = {}, []
    for name, each in found:
        try:
            states[name] = _get(each)
        except Exception:  # that of random.SystemRandom, or of a class of the user's own
            failed.append(f"{name} is a {type_name(each)}")
    return states, failed


def find(state: Any) -> list[tuple[str, Any]]:
    """Every generator of the loaders, the model, the criterion and the callbacks, with its name."""
    trial, seen = state[torchbearer.SELF].state, set[int]()
    found: list[tuple[str, Any]] = []
    for key in (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA):
        if trial[key] is not None:
            found += _inside(trial[key][0], str(key), seen, _LOADER_DEPTH)
    for name, thing in trained.walk(state):
        # What a loader has made is started over by a resume.
        if not isinstance(thing, DataLoader) and name != f"state[{str(torchbearer.ITERATOR)!r}]":
            found += _inside(thing, name, seen, _DEPTH)
    return found


def inside(*parts: Any) -> list[tuple[str, Any]]:
    """Every generator in these objects, with a name."""
    seen: set[int] = set()
    numbered = enumerate(parts)
    return [each for n, part in numbered for each in _inside(part, str(n), seen, _LOADER_DEPTH)]


def _inside(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or depth == 0 or isinstance(value, PASSED_OVER):
        return
    seen.add(id(value))
    if isinstance(value, GENERATORS):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = 0
        for number, (key, each) in enumerate(list(items)):
            if number >= _WIDTH and not found:
                return
            for one in _inside(each, f"{path}[{key!r}]", seen, depth - 1):
                found += 1
                yield one
    else:
        inner = depth if isinstance(value, torch.nn.Module) else depth - 1  # models are deep
        for name, each in attributes(value):
            here = f"{path}.{name}"
            is_container = isinstance(each, dict | list | tuple)
            yield from _inside(each, here if is_container else f"{here}[0]", seen, inner)


def attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object or a function holds."""
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, DataLoader):
        held.pop("_iterator", None)  # started over by a resume
    if isinstance(value, torch.nn.Module):
        return [(name, each) for name, each in held.items() if name not in _OF_MODULES]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held[name] = getattr(value, name)
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        held |= {name: _content(cell) for name, cell in cells}
        held |= {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
    return list(held.items())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return list(generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        return _plain_numpy(generator.get_state(legacy=False))
    return _plain_numpy(generator.bit_generator.state)


def _set(generator: Any, saved: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(saved)
    elif isinstance(generator, random.Random):
        generator.setstate(randomness.python_state(*saved))
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(saved)
    else:
        generator.bit_generator.state = saved


def _plain_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numpy(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, numpy.ndarray | numpy.generic) else value
