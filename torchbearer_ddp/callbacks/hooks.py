"""The hooks of a torchbearer callback, for classes that pass every one of them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchbearer.callbacks import Callback

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def define_hooks(kind: type, call: Callable[[Any, str, Any], None]) -> None:
    """Gives a class every hook of a callback; each calls ``call(self, hook's name, state)``."""
    for name in HOOKS:

        def hook(self: Any, state: Any, name: str = name) -> None:
            call(self, name, state)

        hook.__name__, hook.__doc__ = name, f"Calls ``{name}`` of the callback or callbacks inside."
        setattr(kind, name, hook)


class StandIn(Callback):  # type: ignore[misc]
    """Is called in place of a callback, which keeps its place in the list and its saved state."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.callback = callback

    def call(self, hook: str, state: Any) -> None:
        """Calls a hook of the callback."""
        getattr(self.callback, hook)(state)


define_hooks(StandIn, lambda self, hook, state: self.call(hook, state))
