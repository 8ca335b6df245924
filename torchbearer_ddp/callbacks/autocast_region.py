"""The part of a step that runs under autocast: from a hook to another one, or to an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class AutocastRegion:
    """Turns autocast on and off.

    Args:
        dtype: The half precision.

    Attributes:
        device: The type of the device.
        in_closure: True while a closure runs: a forward pass then turns autocast on again, because
            a closure may make several passes, each ended by its loss.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._active: torch.autocast | None = None
        self._handles: list[Any] = []
        self._watched: list[int] = []
        self.device = "cpu"
        self.in_closure = False

    def enter(self) -> None:
        """Turns autocast on."""
        if self._active is None:
            self._active = torch.autocast(self.device, self._dtype)
            self._active.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Turns it off, and forgets the half-precision copies of parameters."""
        if self._active is not None:
            active, self._active = self._active, None
            active.__exit__(None, None, None)

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Turns autocast on before each forward pass of these modules inside a closure."""
        found = list(modules)
        watched = list(map(id, found))
        if watched != self._watched:
            self._forget_modules()
            self._watched = watched
            self._handles = [each.register_forward_pre_hook(_Hook(self)) for each in found]

    def close(self) -> None:
        """Turns autocast off, and leaves the modules alone."""
        self.in_closure = False
        self.leave()
        self._forget_modules()

    def _forget_modules(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], []


class _Hook:
    """A hook of a module that does not go with its copies, pickled or not."""

    def __init__(self, region: AutocastRegion) -> None:
        self._region = region

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if self._region.in_closure:
            self._region.enter()

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    """Takes the place of the hook in a copy."""
