"""Signals that ask a rank to stop.

A signal may come in the middle of a step, on one rank only. While training reads the stop request
at each step, the handler therefore only sets a flag; the ranks agree on a step to stop at, and save
there. Otherwise the signal interrupts at once, as in any Python program. A second signal ends the
process after its exit handlers, because a checkpoint may be being written. A third signal ends it
at once, and so does the end of the grace time, which starts with the first.

A rank that has failed says so before a SIGTERM ends it, see :func:`hold_back`.
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
#: How often the main thread is interrupted until it has handled the first signal.
_WAKE_SECONDS = 0.05
#: How long after an error a SIGTERM is held back.
_REPORT_SECONDS = 2.0
#: Ends the thread; no signal has this number.
_CLOSE = 0
#: The handlers that this process had before ours, while ours are in force.
_before: dict[signal.Signals, Any] = {}


def from_slurm() -> list[signal.Signals]:
    """SIGUSR2, which Slurm sends to a whole job before its time limit; a script's handler stays."""
    is_free = signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    return [signal.SIGUSR2] if is_free and "SLURM_JOB_ID" in os.environ else []


@contextlib.contextmanager
def handled(grace: float, *extra: signal.Signals) -> Iterator[None]:
    """Handles SIGTERM, SIGINT and any extra signals while a worker runs in this process.

    The process ends ``grace`` seconds after the first signal at the latest. An extra signal
    (SIGUSR2 in a Slurm job) that already has a handler keeps it.
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
    try:
        with _watched(grace, signums):
            yield
    finally:
        for signum, handler in _before.items():
            signal.signal(signum, handler)
        _before.clear()


def hold_back() -> None:
    """Gives this rank, which has failed, the time to say why before a SIGTERM ends it.

    torchrun ends all other ranks as soon as one has ended, and the first to end is often not the
    one that failed first. A script that catches the error gets the signal a moment later.
    """
    handler = _before.get(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if handler is None or not is_main or stop_request.received() is not None:
        return
    deadline = time.monotonic() + _REPORT_SECONDS

    def held_back(signum: int, frame: Any) -> None:
        left = deadline - time.monotonic()
        if left > 0:
            again = threading.Timer(left, os.kill, (os.getpid(), signum))
            again.daemon = True
            again.start()
            return
        signal.signal(signum, handler)
        signal.raise_signal(signum)

    _before[signal.SIGTERM] = held_back
    signal.signal(signal.SIGTERM, held_back)


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


@contextlib.contextmanager
def _watched(grace: float, signums: list[signal.Signals]) -> Iterator[None]:
    """Ends the process when the grace time is over, also while the main thread is blocked in C.

    Python runs signal handlers only in the main thread, between two instructions of Python code,
    but writes to the wake-up descriptor at once.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reader, True)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader, grace, signums), daemon=True)
    thread.start()
    try:
        yield
    finally:
        if (current := signal.set_wakeup_fd(previous)) not in (writer, -1):
            signal.set_wakeup_fd(current)  # the worker has set its own meanwhile
        os.write(writer, bytes([_CLOSE]))
        thread.join()
        os.close(reader)
        os.close(writer)


def _watch(reader: int, grace: float, signums: list[signal.Signals]) -> None:
    """Reads the numbers of the signals that have come."""
    first, deadline = 0, None
    while True:
        if not select.select([reader], [], [], _seconds_to_wait(deadline))[0]:
            if deadline is not None and time.monotonic() < deadline:
                _wake_main_thread()
                continue
            stop_request.end(128 + first)
        for signum in os.read(reader, 64):
            if signum == _CLOSE:
                return
            if signum == signal.SIGUSR1:
                debug.report("SIGUSR1")
            if signum in (*signums, signal.SIGUSR2):  # for SIGUSR2 see slurm/task.py
                _wake_main_thread()
            if signum in signums and deadline is None:
                first, deadline = signum, time.monotonic() + grace


def _seconds_to_wait(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = max(0.0, deadline - time.monotonic())
    return left if stop_request.received() is not None else min(left, _WAKE_SECONDS)


def _wake_main_thread() -> None:
    """Interrupts what the main thread waits for, so that it runs the handler of a signal.

    The kernel may give a signal to any thread, and one that comes just before the main thread
    begins to wait does not interrupt it.
    """
    signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
