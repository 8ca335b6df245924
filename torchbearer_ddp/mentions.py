"""What can be known of a worker before it runs: the names that its code uses."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any


def mentions(worker_fn: Callable[..., Any], name: str) -> bool:
    """Whether a function, or one of the user's own that it uses, has this name in its code.

    Args:
        worker_fn: The user's function.
        name: The name, such as that of a class.
    """
    todo: list[Any] = [worker_fn]
    seen: set[int] = set()
    while todo:
        found = todo.pop()
        if isinstance(found, functools.partial):
            todo += [found.func, *found.args, *found.keywords.values()]
        if id(found) in seen or _is_library(found):
            continue
        seen.add(id(found))
        if isinstance(found, types.MethodType):
            todo.append(found.__func__)
        elif isinstance(found, type):
            todo += [member for member in vars(found).values() if callable(member)]
        elif isinstance(found, types.FunctionType):
            names = _names_in(found.__code__)
            if name in names:
                return True
            cells = [c.cell_contents for c in found.__closure__ or () if c != types.CellType()]
            todo += [found.__globals__[other] for other in names if other in found.__globals__]
            todo += [getattr(found, "__wrapped__", None), *cells]
        elif callable(found):
            todo.append(type(found))
    return False


def _names_in(code: types.CodeType) -> set[str]:
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_library(found: Any) -> bool:
    module = getattr(found, "__module__", None) or ""
    return isinstance(found, types.ModuleType) or module.partition(".")[0] in (
        {"torch", "torchbearer", "torchbearer_ddp", "numpy"} | sys.stdlib_module_names
    )
