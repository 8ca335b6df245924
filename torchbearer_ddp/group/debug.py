"""Where this rank is, if the run is debugged: on SIGUSR1, and when a wait fails.

On SIGUSR1 :mod:`faulthandler` writes the stack of every thread, also while the main thread is
blocked in C. One line with the epoch, the step, the last hook and the last exchange follows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torchbearer

from torchbearer_ddp.log import logger

#: The descriptor: sys.stderr has none in a notebook.
STDERR = 2


@dataclass
class _Progress:
    """What is known of a rank that is debugged."""

    rank: int
    hook: str | None = None
    state: Mapping[Any, Any] | None = None
    exchange: str | None = None
    exchanged_at: float = 0.0


class _Last:
    """The last training step that this process has begun; from the state while it trains."""

    step: int | None = None
    state: Mapping[Any, Any] | None = None


def last_step() -> int | None:
    """The number of the last training step that was begun, over all epochs, from 1."""
    if (state := _Last.state) is None:
        return _Last.step
    steps = max(0, state.get(torchbearer.STEPS) or 0)
    epoch, batch = state.get(torchbearer.EPOCH) or 0, state.get(torchbearer.BATCH) or 0
    return int(epoch * steps + batch + 1)


def end_steps() -> None:
    """Keeps the number of the last step: no further one is begun in this epoch."""
    _Last.step, _Last.state = last_step(), None


#: None in a run that is not debugged.
_progress: _Progress | None = None


@contextlib.contextmanager
def reporting(rank: int) -> Iterator[None]:
    """Lets this process report where it is, for as long as its worker runs."""
    global _progress
    _progress = _Progress(rank)
    in_main_thread = threading.current_thread() is threading.main_thread()
    free = in_main_thread and signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN)
    if free:
        # Python's handler comes first and faulthandler calls it: only Python's writes to the
        # descriptor that wakes the thread in launch/signals.py, which logs the line.
        previous = signal.signal(signal.SIGUSR1, lambda signum, frame: None)
        faulthandler.register(signal.SIGUSR1, STDERR, all_threads=True, chain=True)
    try:
        yield
    finally:
        _progress = None
        if free:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, previous)


def note_hook(hook: str, state: Mapping[Any, Any]) -> None:
    """Notes that a hook is called, if the run is debugged; and that a training step begins."""
    if hook == "on_sample":
        _Last.state = state
    elif hook == "on_end_training":
        end_steps()
    if _progress is not None:
        _progress.hook, _progress.state = hook, state


def note_exchange(activity: str) -> None:
    """Notes that an exchange with other ranks begins."""
    if _progress is not None:
        _progress.exchange, _progress.exchanged_at = activity, time.monotonic()


def report(reason: str) -> None:
    """Logs where this rank is, if the run is debugged."""
    if (known := _progress) is None:
        return
    training, exchange = "no hook was called yet", "no exchange yet"
    if known.state is not None:
        epoch, step = (known.state.get(key) for key in (torchbearer.EPOCH, torchbearer.BATCH))
        training = f"epoch {epoch}, step {step}, last hook {known.hook}"
    if known.exchange is not None:
        seconds = time.monotonic() - known.exchanged_at
        exchange = f"last exchange: {known.exchange}, {seconds:.1f} s ago"
    place = f"rank {known.rank} on {socket.gethostname()}, process {os.getpid()} ({reason})"
    logger.info("%s: %s; %s", place, training, exchange)
