"""Processes that a command starts: none outlives it, whether it is stopped or killed."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

#: How long a process may take to end its ranks.
_STOP_SECONDS = 5.0


@contextmanager
def ended_afterwards(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Ends a process with the block, if it still runs; it is asked first."""
    try:
        yield
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Asks a process that still runs to end, and kills it if it does not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks end with it
        process.wait()


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit, as Ctrl-C raises, so that a command ends what it started."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signum, signal.SIG_DFL)  # a second one ends a command that hangs
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
