"""What a rank tells the launcher that has started it: short messages on the way to its report.

Only ranks of :mod:`torchbearer_ddp.launch.supervisor` have such a launcher; for all others
:func:`tell` does nothing. It is here because callbacks and checkpoints have things to tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

#: Set for the ranks of a launcher that runs in a notebook.
BARS_VARIABLE = "TORCHBEARER_DDP_NOTEBOOK"
#: The path of the launcher's terminal, for the debugger of a rank.
TERMINAL_VARIABLE = "TORCHBEARER_DDP_TERMINAL"
#: How often the ranks have been started again.
RESTARTS_VARIABLE = "TORCHBEARER_DDP_RESTART_COUNT"
#: Set for ranks that are started again and have a checkpoint to continue from.
RESUME_VARIABLE = "TORCHBEARER_DDP_RESUME"

#: A secret that separately started ranks share.
TOKEN_VARIABLE = "TORCHBEARER_DDP_TOKEN"


class _Link:
    """The connection of this process to its launcher."""

    descriptor: int | None = None
    #: A forked child has the descriptor too, but is not the rank.
    pid = 0
    lock = threading.Lock()


class _Newest:
    """The newest checkpoint of this process."""

    path: str | None = None


def connect(descriptor: int) -> None:
    """From now on this process tells its launcher by this descriptor."""
    _Link.descriptor, _Link.pid = descriptor, os.getpid()


def is_connected() -> bool:
    """True if a launcher listens to this process."""
    return _Link.descriptor is not None and _Link.pid == os.getpid()


def draws_bars() -> bool:
    """True if the launcher draws the progress bars of this process."""
    return is_connected() and BARS_VARIABLE in os.environ


def tell(kind: str, **fields: Any) -> bool:
    """Sends a message; False if there is no launcher."""
    if not is_connected():
        return False
    with contextlib.suppress(OSError):  # it has ended, and so will this process
        _send(json.dumps({"kind": kind, **fields}).encode() + b"\n")
    return True


def ask(kind: str, **fields: Any) -> None:
    """Sends a message and waits until the launcher has acted on it."""
    if tell(kind, **fields):
        with contextlib.suppress(OSError):
            os.read(_Link.descriptor or 0, 1)


def report(head: dict[str, Any], body: bytes) -> None:
    """Sends the last message: the result of this rank."""
    with contextlib.suppress(OSError):
        _send(json.dumps(head).encode() + b"\n" + body)
        os.close(_Link.descriptor or 0)
    _Link.descriptor = None


def _send(data: bytes) -> None:
    left = memoryview(data)
    with _Link.lock:
        while left:
            left = left[os.write(_Link.descriptor or 0, left) :]


def is_restarted() -> bool:
    """True if an earlier attempt of the same launcher has left a checkpoint."""
    return RESUME_VARIABLE in os.environ


def note_saved(path: str) -> None:
    """A checkpoint is complete: a run that continues does so from there."""
    _Newest.path = path
    tell("saved", path=path)


def newest_checkpoint() -> str | None:
    """The newest checkpoint that this process has written."""
    return _Newest.path
