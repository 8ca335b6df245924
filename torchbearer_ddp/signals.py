"""Signals that ask a rank to stop: a flag that training reads at each step, then the end.

A signal may come in the middle of a step, on one rank only. Where training looks at
:func:`requested` each step, the handler therefore only sets a flag; the ranks agree on a step to
stop at and save. Where nobody looks, the signal interrupts at once, as in any Python program. A
second signal ends the process, once its exit handlers are through: a checkpoint may be on its way
to the disk. A third one, or ``grace`` seconds after the first, the process ends for good.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torchbearer_ddp import debug

#: A terminal or a launcher may send one request twice, to the process and to its group.
ECHO_SECONDS = 1.0
#: Interrupts what the main thread waits for, and does nothing else.
_WAKE = signal.SIGURG


class _State:
    requested: int | None = None
    at = 0.0
    #: True once training has asked: it will ask again, so that a signal need not interrupt.
    asked = False
    #: True once the exit handlers have been called.
    ending = False


_state = _State()
#: The handlers that this process had before ours, while ours are in force.
_before: dict[signal.Signals, Any] = {}


def requested() -> int | None:
    """The signal that asked this rank to stop, or None.

    To be called at each step. From the first call on, a signal does not interrupt the step but
    waits to be found here.
    """
    _state.asked = True
    return _state.requested


def request(signum: int) -> None:
    """Notes that the run stops for a signal which another rank got.

    Args:
        signum: The number of the signal.
    """
    if _state.requested is None:
        _state.requested, _state.at = signum, time.monotonic()


def received() -> int | None:
    """The signal that stopped the run, for the launcher; asking here promises nothing."""
    return _state.requested


def stop_asking() -> None:
    """Training is over and will not ask any more: from here on a signal interrupts at once."""
    _state.asked = False


@contextlib.contextmanager
def handled(grace: float, *extra: signal.Signals) -> Iterator[None]:
    """Handles SIGTERM, SIGINT and any extra signals while a worker runs in this process.

    Args:
        grace: Seconds from the first signal until the process ends, whatever it does.
        extra: More signals that mean the same, such as SIGUSR2 in a Slurm job. One that already
            has a handler keeps it.
    """
    global _state
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals
        return
    free = [s for s in extra if signal.getsignal(s) == signal.SIG_DFL]
    signums = [signal.SIGTERM, signal.SIGINT, *free]
    _state = _State()
    previous = {s: signal.signal(s, handle) for s in signums}
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


def _let_go() -> None:
    """In a forked child, such as a loader's worker: its signals are its own, not its rank's.

    Otherwise a SIGTERM to the child would reach the rank's watchdog through the pipe that they
    share, and the child itself would not end.
    """
    if _before:
        signal.set_wakeup_fd(-1)
        for signum, handler in _before.items():
            # Slurm sends SIGUSR2 to every process of a step, and it is not meant for this one.
            signal.signal(signum, signal.SIG_IGN if signum == signal.SIGUSR2 else handler)
        _before.clear()


os.register_at_fork(after_in_child=_let_go)


def handle(signum: int, frame: FrameType | None) -> None:
    """Notes the request; interrupts only where training does not ask, or asks for too long."""
    now = time.monotonic()
    if _state.requested is not None:
        if signum == signal.SIGUSR2:
            _state.requested = signum  # Slurm says why its SIGTERM came: the job is to go on later
        elif _state.requested != signal.SIGUSR2 and now - _state.at > ECHO_SECONDS:
            if not _state.ending:
                _state.ending, _state.at = True, now
                with contextlib.suppress(BaseException):  # what they raise, they have shown
                    atexit._run_exitfuncs()
            end(signum)
        # A SIGTERM after SIGUSR2 is Slurm's last word before SIGKILL: use what time is left.
        return
    _state.requested, _state.at = signum, now
    if _state.asked:
        return
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signum)


def end(signum: int) -> None:
    """Ends this process at once, with the exit code of that signal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(128 + signum)


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
                end(first)
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
