"""One walk over plain data: None, booleans, numbers, strings, bytes, tensors, arrays, containers.

Messages between ranks, snapshots for checkpoints and the state of metrics are all made by it.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torchbearer.state import StateKey

_SCALARS = (type(None), bool, int, float, str, bytes)
#: How deep containers may lie in each other, so that what one walk took apart another can rebuild.
DEEPEST = 100


class PlainDataWalker:
    """Rebuilds a value part by part; a subclass overrides what becomes of each kind of part.

    Numpy scalars, state keys and subclasses of int, float, str and bytes become plain ones;
    subclasses of list, tuple, set and dict become plain containers.
    """

    _depth = 0

    def walk(self, value: Any, where: str) -> Any:
        """Rebuilds a value; ``where`` is its place, as messages name it.

        Raises:
            RecursionError: If it holds itself, or containers deeper than :data:`DEEPEST`.
        """
        if type(value) in _SCALARS:
            return self.scalar(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, where)
        if isinstance(value, numpy.ndarray) and value.ndim:
            return self.array(value, where)
        if isinstance(value, dict | list | tuple | set):
            self._depth += 1
            try:
                return self._container(value, where)
            finally:
                self._depth -= 1
        plain = _plain_scalar(value)
        return self.scalar(plain) if type(plain) in _SCALARS else self.other(value, where)

    def _container(self, value: Any, where: str) -> Any:
        if self._depth > DEEPEST:
            raise RecursionError(f"more than {DEEPEST} lists or dicts in each other")
        if isinstance(value, dict):
            pairs = value.items()
            keys = [self.walk(key, f"a key of {where}") for key, _ in pairs]
            values = [self.walk(each, f"{where}[{key!r}]") for key, each in pairs]
            return self.mapping(keys, values)
        kind = next(each for each in (list, tuple, set) if isinstance(value, each))
        items = sorted(value, key=repr) if kind is set else value
        walked = [self.walk(each, f"{where}[{i}]") for i, each in enumerate(items)]
        return self.sequence(kind, walked)

    def scalar(self, value: Any) -> Any:
        """Rebuilds None, a boolean, a number, a string or bytes."""
        return value

    def tensor(self, tensor: torch.Tensor, where: str) -> Any:
        """Rebuilds a tensor."""
        return tensor

    def array(self, array: numpy.ndarray[Any, Any], where: str) -> Any:
        """Rebuilds an array of numpy, as a tensor unless a subclass says otherwise."""
        try:
            native = array.astype(array.dtype.newbyteorder("="))  # a copy, in usual strides
            return self.tensor(torch.from_numpy(native), where)
        except TypeError:  # of strings, objects, dates
            return self.other(array, where)

    def sequence(self, kind: type, items: list[Any]) -> Any:
        """Rebuilds a list, tuple or set from its rebuilt items."""
        return kind(items)

    def mapping(self, keys: list[Any], values: list[Any]) -> Any:
        """Rebuilds a dict from its rebuilt keys and values."""
        return dict(zip(keys, values, strict=True))

    def other(self, value: Any, where: str) -> Any:
        """Handles what is not plain data."""
        raise NotImplementedError


def type_name(value: Any) -> str:
    """The full name of a value's type, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, StateKey):
        return str(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return value.item()
    kinds: tuple[Any, ...] = (int, float, str, bytes)
    for kind in kinds:  # subclasses, such as an IntEnum
        if isinstance(value, kind):
            return kind(value)
    return value
