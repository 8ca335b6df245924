"""Whether this rank was asked to stop: a flag that training reads at each step.

:mod:`torchbearer_ddp.launch.signals` installs :func:`handle` for as long as a worker runs. The
request lives here because callbacks read it, and they do not depend on how the rank was launched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torchbearer

#: The key of ``trial.state`` that says after ``run()`` why it has ended before its last step: the
#: name of a signal (``'SIGINT'`` after Ctrl-C), ``'callback'`` if a callback asked for it, such as
#: EarlyStopping, or None if the run is complete.
CUT_SHORT = torchbearer.state_key("cut_short")
#: A terminal or a launcher may send one request twice, to the process and to its group.
ECHO_SECONDS = 1.0


@dataclass
class StopRequest:
    """One request to stop, or none yet.

    Attributes:
        signum: The signal that asked, or None.
        at: When it came, on the monotonic clock.
        polled: True while training reads the request at each step, so a signal need not interrupt.
        exiting: True once a second signal has started the exit handlers.
        resumable: True once a Checkpoint is in use: a restarted run continues where this one stops.
    """

    signum: int | None = None
    at: float = 0.0
    polled: bool = False
    exiting: bool = False
    resumable: bool = False


class _Current:
    request = StopRequest()


def current() -> StopRequest:
    """The request of the running worker."""
    return _Current.request


def reset() -> None:
    """Forgets any request; called when a worker starts."""
    _Current.request = StopRequest()


def requested() -> int | None:
    """The signal that asked this rank to stop, or None; to be called at each step.

    From the first call on, a signal does not interrupt the step but waits to be found here.
    """
    _Current.request.polled = True
    return _Current.request.signum


def request(signum: int) -> None:
    """Records that the run stops for a signal which another rank received."""
    if _Current.request.signum is None:
        _Current.request.signum, _Current.request.at = signum, time.monotonic()


def received() -> int | None:
    """The signal that stopped the run, for the launcher; asking here promises no further polls."""
    return _Current.request.signum


def stop_polling() -> None:
    """A run has ended, perhaps by an exception: from here on a signal interrupts at once."""
    _Current.request.polled = False


def handle(signum: int, frame: FrameType | None) -> None:
    """Records the request; interrupts only where training does not poll for it."""
    request, now = current(), time.monotonic()
    if request.signum is not None:
        if signum == signal.SIGUSR2:
            request.signum = signum  # SIGUSR2 after Slurm's SIGTERM: the job is to be requeued
        elif (request.signum, signum) == (signal.SIGUSR2, signal.SIGTERM):
            pass  # Slurm's last warning before SIGKILL: use the time that is left
        elif now - request.at > ECHO_SECONDS:
            if not request.exiting:
                request.exiting, request.at = True, now
                with contextlib.suppress(BaseException):  # exit handlers show their own errors
                    atexit._run_exitfuncs()
            end(128 + signum)
        return
    request.signum, request.at = signum, now
    if not request.polled:
        interrupt(signum)


def interrupt(signum: int) -> NoReturn:
    """Raises what a signal raises in a Python program that stops for it."""
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signum)


def end(code: int) -> NoReturn:
    """Ends this process at once; what it has printed is still written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
