"""A Trial whose callbacks learn when run, evaluate or predict begins, and when it is left.

torchbearer calls ``on_end`` only where nothing failed. What must be undone in every case, like a
hook that is registered for the whole process, cannot wait for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torchbearer
from torchbearer import Trial

_METHODS = ("run", "evaluate", "predict")


def install(trial: Trial) -> None:
    """Makes a Trial call ``enter()`` and ``leave()`` of its callback list, which must have them."""
    if not isinstance(trial, _Scoped):
        kind: Any = type(trial)
        trial.__class__ = _scoped(kind)


class _Scoped:
    """Marks a class that was made here."""

    _depth = 0


@functools.cache
def _scoped(kind: Any) -> Any:
    methods = {name: _method(name, getattr(kind, name)) for name in _METHODS}
    details = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__reduce__": _reduce}
    return type(kind.__name__, (_Scoped, kind), {**methods, **details})


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks = self.state[torchbearer.CALLBACK_LIST]
        if not self._depth:  # a callback may evaluate within a run
            callbacks.enter(self, name)
        self._depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            self._depth -= 1
            # After an exception torchbearer leaves its progress bar in the list.
            self.state[torchbearer.CALLBACK_LIST] = callbacks
            if not self._depth:
                callbacks.leave()

    return wrapper


def _reduce(self: Any) -> tuple[Any, ...]:
    """Pickles as the user's own class: it becomes one of these again where it is loaded."""
    return _new, (type(self).__mro__[2],), vars(self)


def _new(kind: Any) -> Any:
    trial = kind.__new__(kind)
    install(trial)
    return trial
