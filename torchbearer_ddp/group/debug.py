"""Where this rank is: one line when asked with SIGUSR1, and when a wait fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torchbearer


class _Place:
    """What is known of where this rank is."""

    #: The rank, while it is debugged.
    rank: int | None = None
    hook: str | None = None
    state: Mapping[Any, Any] | None = None
    exchange: str | None = None
    exchanged_at = 0.0


_place = _Place()


@contextlib.contextmanager
def reporting(rank: int) -> Iterator[None]:
    """Lets this process tell where it is, for as long as its worker runs.

    The lines for SIGUSR1 come from the thread in :mod:`torchbearer_ddp.signals`, because Python's
    own handlers would wait for a main thread that is blocked.

    Args:
        rank: The rank of this process.
    """
    global _place
    _place = _Place()
    _place.rank = rank
    previous = None
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
        previous = signal.signal(signal.SIGUSR1, lambda signum, frame: None)
    try:
        yield
    finally:
        _place = _Place()
        if previous is not None:
            signal.signal(signal.SIGUSR1, previous)


def note_hook(hook: str, state: Mapping[Any, Any]) -> None:
    """Notes that the callbacks are called; free where nobody debugs, as this is in every step.

    Args:
        hook: The name of the hook.
        state: The state it is called with.
    """
    if _place.rank is not None:
        _place.hook, _place.state = hook, state


def note_exchange(activity: str) -> None:
    """Notes that an exchange with other ranks begins.

    Args:
        activity: What is exchanged, in words.
    """
    if _place.rank is not None:
        _place.exchange, _place.exchanged_at = activity, time.monotonic()


def report(reason: str) -> None:
    """Prints the line, if this rank is debugged.

    Args:
        reason: Why it is printed, in a word or two.
    """
    if _place.rank is None:
        return
    who = f"rank {_place.rank} on {socket.gethostname()}, process {os.getpid()} ({reason})"
    line = f"torchbearer_ddp: {who}: {_training(_place)}; {_exchange(_place)}\n"
    with contextlib.suppress(OSError):
        # One write: the lines of several ranks, which share the terminal, must not mix.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())


def _training(place: _Place) -> str:
    if place.state is None:
        return "no hook was called yet"
    epoch, step = (place.state.get(key) for key in (torchbearer.EPOCH, torchbearer.BATCH))
    return f"epoch {epoch}, step {step}, last hook {place.hook}"


def _exchange(place: _Place) -> str:
    if place.exchange is None:
        return "nothing was exchanged yet"
    return f"last exchange: {place.exchange}, {time.monotonic() - place.exchanged_at:.1f} s ago"
