"""Work that one rank does for itself, in which nothing is exchanged with the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class _Blocks:
    """How many blocks of local work are open; autograd calls hooks in threads of its own."""

    open = 0


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Marks what happens in the block as this rank's own, for example a step of an optimizer."""
    _Blocks.open += 1
    try:
        yield
    finally:
        _Blocks.open -= 1


def inside() -> bool:
    """True in a block of :func:`local`, in every thread."""
    return _Blocks.open > 0
