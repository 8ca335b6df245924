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

#: A terminal or a launcher may send one request twice, to the process and to its group.
ECHO_SECONDS = 1.0
_TRIAL_MODULE = "torchbearer.trial"


@dataclass
class StopRequest:
    """One request to stop, or none yet.

    Attributes:
        signum: The signal that asked, or None.
        at: When it came, on the monotonic clock.
        polled: True while training reads the request at each step, so a signal need not interrupt.
        loop: The frame of the Trial that reads it, if one does; 0 in a loop of the user's own.
        exiting: True once a second signal has started the exit handlers.
        resumable: True once a Checkpoint is in use: a restarted run continues where this one stops.
    """

    signum: int | None = None
    at: float = 0.0
    polled: bool = False
    loop: int = 0
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
    _Current.request.polled, _Current.request.loop = True, _training_loop(sys._getframe())
    return _Current.request.signum


def request(signum: int) -> None:
    """Records that the run stops for a signal which another rank received."""
    if _Current.request.signum is None:
        _Current.request.signum, _Current.request.at = signum, time.monotonic()


def received() -> int | None:
    """The signal that stopped the run, for the launcher; asking here promises no further polls."""
    return _Current.request.signum


def stop_polling() -> None:
    """Training has ended: from here on a signal interrupts at once."""
    _Current.request.polled = False


def handle(signum: int, frame: FrameType | None) -> None:
    """Records the request; interrupts only where training does not poll for it."""
    request, now = current(), time.monotonic()
    if request.signum is not None:
        if signum == signal.SIGUSR2:
            request.signum = signum  # SIGUSR2 after Slurm's SIGTERM: the job is to be requeued
        elif request.signum != signal.SIGUSR2 and now - request.at > ECHO_SECONDS:
            if not request.exiting:
                request.exiting, request.at = True, now
                with contextlib.suppress(BaseException):  # exit handlers show their own errors
                    atexit._run_exitfuncs()
            end(128 + signum)
        # A SIGTERM after SIGUSR2 is Slurm's last warning before SIGKILL: use the time that is left.
        return
    request.signum, request.at = signum, now
    # A caught exception may have ended the Trial's loop without a word to us.
    if request.polled and request.loop == _training_loop(frame):
        return
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signum)


def _training_loop(frame: FrameType | None) -> int:
    """Identifies the outermost call of a Trial's method that led to this frame; 0 without one."""
    found = 0
    while frame is not None:
        if frame.f_globals.get("__name__") == _TRIAL_MODULE:
            found = id(frame)
        frame = frame.f_back
    return found


def end(code: int) -> NoReturn:
    """Ends this process at once; what it has printed is still written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
