"""A clean process that imports once, runs the script's module level, and is forked into the ranks.

It serves where the launcher itself cannot be forked, as in a notebook. When all ranks are forked it
ends, and the kernel gives them to the launcher, which waits for them as for its own children.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from torchbearer_ddp.data import randomness
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import membership
from torchbearer_ddp.launch import fork_safety
from torchbearer_ddp.launch.forked_rank import Fork, ForkedProcess, handlers
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.process_group import end_group
from torchbearer_ddp.launch.started_rank import Process
from torchbearer_ddp.launch.worker import Task, unpack

_SET_SUBREAPER, _GET_SUBREAPER = 36, 37
_READY = b"ready"
_MESSAGE_BYTES = 1 << 10
#: Of a rank: that of its report, and those of its stdout and stderr.
_MOST_DESCRIPTORS = 3
_TICK_SECONDS = 0.05
#: How long a rank that is being forked is waited for after a signal.
_STOP_SECONDS = 2.0


class ForkServer:
    """The launcher's side of the server.

    Args:
        start: Starts the server's process, with the descriptor of its connection.
        timeout: Seconds that it may take to fork a rank.
        is_stopped: True once a signal has asked the launcher to stop.
    """

    def __init__(
        self, start: Callable[[int], Process], timeout: float, is_stopped: Callable[[], bool]
    ) -> None:
        self._timeout, self._is_stopped = timeout, is_stopped
        self._has_forked = False
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _adoption.begin()
        try:
            with other:
                self._process = start(other.fileno())
        except BaseException:
            _adoption.end()
            self._socket.close()
            raise

    def obstacle(self) -> str | None:
        """Waits for the server; why it cannot be forked into ranks, or None."""
        while not self._is_stopped():
            if self._has_answered():
                answer = self._socket.recv(_MESSAGE_BYTES)
                return None if answer == _READY else answer.decode() or "it has ended"
        return "the launch was stopped"

    def start(self, index: int, reports: int, streams: list[int]) -> ForkedProcess:
        """Lets the server fork the rank of this index.

        Raises:
            LaunchError: If the server has ended, or does not answer.
        """
        try:
            self._has_forked = True
            socket.send_fds(self._socket, [str(index).encode()], [reports, *streams])
            self._await_answer()
            return ForkedProcess(int(self._socket.recv(_MESSAGE_BYTES)))
        except (OSError, ValueError) as error:
            raise LaunchError(
                "The process that the ranks are forked from was killed before all were started. "
                "The system does that when memory runs out. See the system's log, or start fewer "
                "ranks."
            ) from error

    def _has_answered(self) -> bool:
        return bool(select.select([self._socket], [], [], _TICK_SECONDS)[0])

    def _await_answer(self) -> None:
        """Waits until a rank is forked; after a signal not for long."""
        deadline = time.monotonic() + self._timeout
        while not self._has_answered():
            now = time.monotonic()
            if self._is_stopped():
                deadline = min(deadline, now + _STOP_SECONDS)
            if now > deadline:
                # The ranks that it has forked are in its group, and wait for its end to begin.
                end_group(self._process.pid)
                raise LaunchError(
                    "The process that the ranks are forked from did not answer within "
                    f"{self._timeout:g} s (--timeout). It was frozen, or this host has no time for "
                    "it. Look at the load of the host, and start again."
                )

    def finish(self) -> None:
        """Ends the server: its ranks become children of this process."""
        self._socket.close()
        if self._process.returncode is None:
            if self._has_forked:
                os.kill(self._process.pid, signal.SIGKILL)
                self._process.wait()
            _adoption.end()
            if not self._has_forked:
                # With what its module level has started; the ranks start such things themselves.
                end_group(self._process.pid)
                self._process.wait()


class _Adoption:
    """Makes this process the parent of descendants whose parent ends, while a server runs.

    Threads may launch at the same time, and it is a setting of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers, self._before = 0, 0

    def begin(self) -> None:
        """A server starts."""
        with self._lock:
            self._servers += 1
            if self._servers == 1:
                before = ctypes.c_int()
                _prctl(_GET_SUBREAPER, ctypes.byref(before))
                self._before = before.value
                _prctl(_SET_SUBREAPER, 1)

    def end(self) -> None:
        """A server has ended."""
        with self._lock:
            self._servers -= 1
            if not self._servers:
                _prctl(_SET_SUBREAPER, self._before)


_adoption = _Adoption()


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(plan: Plan, payload: bytes, connection: int, adopt: Callable[[], None]) -> NoReturn:
    """The server's side: forks a rank for each message, and ends with the connection.

    A rank calls ``adopt`` first, which waits until the server has ended.
    """
    membership.settle()
    if plan.member.seed is not None:
        randomness.seed_all(plan.member.seed)  # for the script's module level
    load = _loaded(payload)
    with socket.socket(fileno=connection) as messages:
        why = fork_safety.obstacle([connection])
        messages.send(_READY if why is None else why.encode()[:_MESSAGE_BYTES])
        fork = Fork(plan, dict(os.environ), load, [connection], handlers(), adopt)
        while True:
            index, found, _, _ = socket.recv_fds(messages, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
            if not index:
                os._exit(0)
            for descriptor in found:
                os.set_inheritable(descriptor, False)
            process = fork.start(int(index), found[0], found[1:])
            for descriptor in found:
                os.close(descriptor)
            messages.send(str(process.pid).encode())


def _loaded(payload: bytes) -> Callable[[], Task]:
    """The worker, or the error of the script's module level, which every rank then reports."""
    try:
        task = unpack(payload)
    except BaseException as error:
        return functools.partial(_raise, error)
    return lambda: task


def _raise(error: BaseException) -> NoReturn:
    raise error
