"""A rank that is forked from a process with everything imported.

It is made as a process that was started by itself: its session, descriptors, signals, environment
and exit handlers are its own. What the script has done so far is there.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import signal
import stat
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from multiprocessing import process, util
from typing import Any

from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import failures
from torchbearer_ddp.launch import fork_safety
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.rank import main
from torchbearer_ddp.launch.worker import Task

_STANDARD = (0, 1, 2)


class ForkedProcess:
    """A forked child, with what a launcher needs of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Waits for its end, and returns its exit code."""
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # its fork server was killed together with it
                self.returncode = -signal.SIGKILL
        return self.returncode


def handlers() -> dict[int, Any]:
    """The handlers that are in force for the signals which a launcher handles."""
    names = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
    signums = [signal.Signals[name] for name in names]
    return {int(signum): signal.getsignal(signum) for signum in signums}


class Fork:
    """Forks ranks from this process, which has imported everything and has the worker.

    Args:
        plan: The plan of the ranks.
        environment: All environment variables of the ranks.
        load: Returns the worker.
        own: Descriptors that the ranks do not keep; what is opened from here on is added to them.
        handlers: The script's own handlers of signals that the launcher handles while it runs.
        adopt: Called first in a rank: makes it end with its launcher.
    """

    def __init__(
        self,
        plan: Plan,
        environment: Mapping[str, str],
        load: Callable[[], Task],
        own: Collection[int],
        handlers: Mapping[int, Any],
        adopt: Callable[[], None],
    ) -> None:
        self._plan, self._environment, self._load, self._adopt = plan, environment, load, adopt
        self._handlers = handlers
        with contextlib.suppress(OSError):  # nobody reads them any more
            failures.flush_files()  # else every rank would write what is still in the buffers
        self._files = failures.open_files()
        #: What the script has opened.
        self._keep = {each for each, _, _ in fork_safety.open_descriptors()}.difference(own)

    def start(self, index: int, reports: int, streams: list[int]) -> ForkedProcess:
        """Forks the rank of this index."""
        foreign = self._foreign(reports)
        # A handler of the launcher must not run in the rank.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            child = os.fork()
            if not child:
                try:
                    self._adopt()
                    os.setsid()
                    self._settle(streams, foreign)
                    signal.pthread_sigmask(signal.SIG_SETMASK, blocked - {signal.SIGINT})
                    main(index, self._plan, self._load, reports, captured=bool(streams))
                except BaseException:
                    traceback.print_exc()
                finally:  # never back into the frames of the launcher
                    os._exit(1)
            return ForkedProcess(child)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def finish(self) -> None:
        """All ranks are forked."""
        self._files = []

    def _foreign(self, reports: int) -> dict[int, str]:
        """What a rank closes: all that is the launcher's, and connections that it has inherited."""
        return {
            descriptor: target
            for descriptor, kind, target in fork_safety.open_descriptors()
            if descriptor not in (*_STANDARD, reports)
            and (
                descriptor not in self._keep
                or (fork_safety.is_connection(kind) and not fork_safety.is_own(descriptor))
            )
        }

    def _settle(self, streams: list[int], foreign: Mapping[int, str]) -> None:
        """Makes a forked child a process of its own."""
        _set_streams(streams)
        _set_descriptors(foreign)
        os.environ.clear()
        os.environ.update(self._environment)
        _forget_launcher()
        failures.inherit(self._files)
        chosen = self._environment.get("OMP_NUM_THREADS", "")
        if chosen.isdigit() and int(chosen):
            fork_safety.limit_threads(int(chosen))
        _set_signals(self._handlers, self._plan.debug)


def _set_streams(streams: list[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if sys.stdin is not None:
        sys.stdin = os.fdopen(0, closefd=False)  # without what was read ahead
    for number, descriptor in enumerate([streams[0], streams[-1]] if streams else (), 1):
        os.dup2(descriptor, number)
    if streams and sys.stdout is not None:
        # Lines arrive as they are printed, and the last ones of a rank that dies are not lost.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _set_descriptors(foreign: Mapping[int, str]) -> None:
    """Closes what belongs to the launcher, and gives each file a position of its own."""
    for descriptor, kind, target in fork_safety.open_descriptors():
        # A library may have renewed its own when it was forked, under the same number.
        if foreign.get(descriptor) == target:
            os.close(descriptor)
        elif kind == stat.S_IFREG and descriptor not in _STANDARD:
            _open_again(descriptor)


def _open_again(descriptor: int) -> None:
    """Opens a file anew under the same number: its position is no longer that of other ranks."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):  # not readable any more, or a special file
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        again = os.open(f"/proc/self/fd/{descriptor}", flags & ~os.O_CREAT & ~os.O_TRUNC)
        os.lseek(again, position, os.SEEK_SET)
        os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
        os.close(again)


def _forget_launcher() -> None:
    """Forgets children and exit handlers of the launcher, which tidies up by itself.

    As in a child that multiprocessing forks: a handler may delete what the launcher still needs.
    """
    process._children.clear()  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    # What Python and this package register once in each process.
    atexit.register(logging.shutdown)
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(finish_writing)


def _set_signals(restored: Mapping[int, Any], debug: bool) -> None:
    signal.set_wakeup_fd(-1)
    for signum, handler in restored.items():
        if handler is not None:
            signal.signal(signum, handler)
    if restored.get(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the worker runs: no traceback
    if debug:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the worker runs
