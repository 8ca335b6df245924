"""Signals that ask a rank to stop: a flag that training reads at each step, then the end.

A signal may come in the middle of a step, on one rank only. Where training looks at
the stop request each step, the handler therefore only sets a flag; the ranks agree on a step to
stop at and save. Where nobody looks, the signal interrupts at once, as in any Python program. A
second signal ends the process, once its exit handlers are through: a checkpoint may be on its way
to the disk. A third one, or ``grace`` seconds after the first, the process ends for good.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from torchbearer_ddp.group import debug, stop_request

#: Interrupts what the main thread waits for, and does nothing else.
_WAKE = signal.SIGURG
#: The handlers that this process had before ours, while ours are in force.
_before: dict[signal.Signals, Any] = {}


@contextlib.contextmanager
def handled(grace: float, *extra: signal.Signals) -> Iterator[None]:
    """Handles SIGTERM, SIGINT and any extra signals while a worker runs in this process.

    ``grace`` are the seconds from the first signal until the process ends, whatever it does. An
    extra signal (SIGUSR2 in a Slurm job) that already has a handler keeps it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals
        return
    free = [s for s in extra if signal.getsignal(s) == signal.SIG_DFL]
    signums = [signal.SIGTERM, signal.SIGINT, *free]
    stop_request.reset()
    previous = {s: signal.signal(s, stop_request.handle) for s in signums}
    previous[_WAKE] = signal.signal(_WAKE, lambda signum, frame: None)
    _before.update(previous)
    watchdog = _Watchdog(grace, signums)
    try:
        yield
    finally:
        watchdog.close()
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        _before.clear()


def _restore_in_child() -> None:
    """Restores the handlers in a forked child, such as a loader's worker.

    Otherwise a SIGTERM to the child would reach the rank's watchdog through the pipe that they
    share, and the child itself would not end.
    """
    if _before:
        signal.set_wakeup_fd(-1)
        for signum, handler in _before.items():
            # Slurm sends SIGUSR2 to every process of a step, and it is not meant for this one.
            signal.signal(signum, signal.SIG_IGN if signum == signal.SIGUSR2 else handler)
        _before.clear()
    _unblock_after_fork()


class _Fork(threading.local):
    """The signals that were blocked in this thread before it forked."""

    mask: set[int | signal.Signals] | None = None


_fork = _Fork()


def _block_before_fork() -> None:
    """Holds signals back until the child has its own handlers, see :func:`_restore_in_child`."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(_before))


def _unblock_after_fork() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)
        _fork.mask = None


os.register_at_fork(
    before=_block_before_fork,
    after_in_parent=_unblock_after_fork,
    after_in_child=_restore_in_child,
)


class _Watchdog:
    """Ends the process when the grace is over, also while the main thread is blocked in C.

    Python runs signal handlers in the main thread only, between two byte codes; the wake-up
    descriptor is written at once.
    """

    def __init__(self, grace: float, signums: list[signal.Signals]) -> None:
        self._grace, self._signums = grace, signums
        self._closed = threading.Event()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._reader, True)
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signal watchdog")
        self._thread.start()

    def _watch(self) -> None:
        first, deadline = 0, None
        while not self._closed.is_set():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                stop_request.end(first)
            for signum in os.read(self._reader, 64):
                if signum == signal.SIGUSR1:
                    debug.report("SIGUSR1")
                if signum == signal.SIGUSR2:  # another thread takes it where the main one blocks it
                    signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
                if signum in self._signums and deadline is None:
                    first, deadline = signum, time.monotonic() + self._grace

    def close(self) -> None:
        if (current := signal.set_wakeup_fd(self._previous)) not in (self._writer, -1):
            signal.set_wakeup_fd(current)  # somebody took it over meanwhile: leave it to them
        self._closed.set()
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
