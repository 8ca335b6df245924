"""How the processes of the ranks come into being.

Forked from the launcher, a rank has everything imported and all that the script did so far. Where
that is not safe (see :mod:`torchbearer_ddp.launch.fork_safety`), one new Python imports everything,
runs the script's module level and is forked into the ranks. If it cannot be forked either, a new
Python is started for each rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group.join import usable_cores
from torchbearer_ddp.launch import fork_safety
from torchbearer_ddp.launch.child import SERVER, die_with
from torchbearer_ddp.launch.fork_server import ForkServer
from torchbearer_ddp.launch.forked_rank import Fork
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.started_rank import Process
from torchbearer_ddp.launch.worker import Task, pack, prepare_fork
from torchbearer_ddp.log import logger

#: How ranks are started; without it in the best way that is safe.
VARIABLE = "TORCHBEARER_DDP_START_METHOD"
_METHODS = _FORK, _SERVER, _ = "fork", "forkserver", "spawn"
_CHILD_FILE = Path(__file__).with_name("child.py")


class Starter(Protocol):
    """A way to start ranks."""

    def start(self, index: int, reports: int, streams: list[int]) -> Process:
        """Starts a rank, with the descriptor that it reports to and those of its streams."""

    def finish(self) -> None:
        """Called when all ranks are started."""


@contextlib.contextmanager
def chosen(
    plan: Plan,
    environment: Mapping[str, str],
    worker: Task,
    own: Collection[int],
    handlers: Mapping[int, Any],
    is_stopped: Callable[[], bool],
) -> Iterator[Starter]:
    """The fastest way to start ranks that is safe here.

    Args:
        plan: The plan of the ranks.
        environment: All environment variables of the ranks.
        worker: What they run.
        own: Descriptors of the launcher, which the ranks do not get.
        handlers: The handlers of signals that were in force before those of the launcher.
        is_stopped: True once a signal has asked the launcher to stop.

    Raises:
        ValueError: If the environment names a way that is none.
        LaunchError: If the worker cannot be sent, or the system refuses to start a process.
    """
    method = os.environ.get(VARIABLE, _FORK)
    if method not in _METHODS:
        raise ValueError(
            f"TORCHBEARER_DDP_START_METHOD is {method!r}; it can be {', '.join(_METHODS)}."
        )
    if method == _FORK:
        why = _prepare_fork(plan, own)
        if why is None:
            prepare_fork(worker)
            adopt = functools.partial(die_with, os.getpid())
            yield Fork(plan, environment, lambda: worker, own, handlers, adopt)
            return
        logger.debug("the ranks are not forked from the launcher: %s", why)
    with contextlib.ExitStack() as stack:
        task = stack.enter_context(_task_file(plan, pack(worker)))
        spawn = _Spawn(environment, task.fileno())
        if method in (_FORK, _SERVER) and _gains_by_server(plan):
            with refusals_explained("The process that the ranks are forked from"):
                server = ForkServer(
                    lambda connection: spawn.start(SERVER, connection, []),
                    plan.member.timeout,
                    is_stopped,
                )
            stack.callback(server.finish)
            why = server.obstacle()
            if why is None:
                yield server
                return
            server.finish()
            logger.debug("the ranks are not forked from a clean process: %s", why)
        yield spawn


@contextlib.contextmanager
def refusals_explained(name: str) -> Iterator[None]:
    """Says what can be done where the system refuses to start a process.

    Raises:
        LaunchError: Instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{name} cannot be started ({error}). It needs a process, a few open files and memory "
            "of its own. See the limits (ulimit -a, and those of the container), or start fewer "
            "ranks."
        ) from error


def _gains_by_server(plan: Plan) -> bool:
    return plan.member.local_world_size > 1 and sys.platform == "linux"


def _prepare_fork(plan: Plan, own: Collection[int]) -> str | None:
    """Why this process cannot be forked, or None; what all ranks would import late is imported."""
    why = fork_safety.obstacle(own)
    if why is None and plan.member.local_world_size > usable_cores():
        # The first optimizer of a process imports torch's compiler, which takes a second.
        torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)], lr=0.0)
        why = fork_safety.obstacle(own)
    return why


class _Spawn:
    """Starts a Python of its own for each rank."""

    def __init__(self, environment: Mapping[str, str], task: int) -> None:
        self._environment, self._task = environment, task

    def start(self, index: int, reports: int, streams: list[int]) -> Process:
        command = [sys.executable, str(_CHILD_FILE)]
        numbers = (index, os.getpid(), self._task, reports, len(streams))
        # Blocked until child.py has set its handler: Python's start-up would show a traceback.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # A session of its own: a Ctrl-C in the terminal reaches the launcher alone, which
            # passes it on once, and the rank's own children can be ended with it.
            return subprocess.Popen(
                [*command, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=streams[0] if streams else None,
                stderr=streams[-1] if streams else None,
                env=dict(self._environment),
                pass_fds=(self._task, reports),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def finish(self) -> None:
        pass


@contextlib.contextmanager
def _task_file(plan: Plan, payload: bytes) -> Iterator[BinaryIO]:
    """What every rank reads: a file without a name, which is gone with the last process."""
    # Python itself passes over entries of the path that are no strings.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    head = {"path": path, "argv": list(map(str, sys.argv)), "plan": dataclasses.asdict(plan)}
    with tempfile.TemporaryFile() as task:
        task.write(json.dumps(head).encode() + b"\n" + payload)
        task.flush()
        yield task
