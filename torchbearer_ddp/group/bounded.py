"""Run calls with a deadline: torch's own timeouts do not cover a peer that never answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from torchbearer_ddp.errors import DistributedError, LaunchError

_T = TypeVar("_T")


def in_time(
    action: Callable[[], _T],
    deadline: float,
    message: str,
    failed: str | None = None,
    extended: Callable[[], float] = float,
) -> _T:
    """Runs an action that may block forever; at the deadline raises LaunchError and leaves it.

    ``failed`` is the message for an action that fails before, without the time that has not passed;
    ``extended`` says whether the deadline is later meanwhile.
    """
    future = in_background(action)
    while not futures.wait([future], max(0.0, deadline - time.monotonic())).done:
        deadline = max(deadline, extended())
        if time.monotonic() >= deadline:
            raise LaunchError(message)
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, DistributedError):
        raise error
    # What has a timeout of its own may fail at the deadline, a moment before it is noticed here.
    is_early = time.monotonic() < deadline
    raise LaunchError(failed if failed and is_early else message) from error


def in_background(action: Callable[[], _T]) -> Future[_T]:
    """Runs an action in a daemon thread, which does not keep the process from ending."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="torchbearer_ddp-rendezvous").start()
    return future
