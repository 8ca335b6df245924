"""Start the ranks of this host, watch them, and say what went wrong first."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from torchbearer_ddp.errors import LaunchError, WorkerError
from torchbearer_ddp.group.stop_request import ECHO_SECONDS
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.log import logger

_TICK_SECONDS = 0.05
#: After a failure the others have this long to notice and to report what they know.
_NOTICE_SECONDS = 3.0
_READ_BYTES = 1 << 16
_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


class StartedRank:
    """One started process, and what it has reported."""

    def __init__(self, rank: int, command: list[str], task: int, threads: int | None) -> None:
        self.rank = rank
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._received = bytearray()
        #: True once it has written everything that it will write.
        self.has_reported = False
        #: True once the launcher has signalled this rank; its exit is then not a failure.
        self.ended_by_us = False
        self.head: dict[str, Any] = {}
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        # Blocked until the rank can deal with it: Python's start-up would show a traceback.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # A session of its own: a Ctrl-C in the terminal reaches the launcher alone, which
            # passes it on once, and the rank's own children can be ended with it.
            self.process = subprocess.Popen(
                [*command, str(task), str(writer)],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(task, writer),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(writer)

    def read(self) -> None:
        """Takes what has arrived, so that the rank never waits for the launcher."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.reader, _READ_BYTES):
                self._received += chunk
            self.has_reported = True
        if not self.head and b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self.head = json.loads(line)

    def has_ended(self) -> bool:
        """True once the process is gone and all that it wrote is read."""
        if self.process.returncode is None:
            # Looked at but not yet reaped, its number still is its own, and its children's.
            if os.waitid(os.P_PID, self.process.pid, _LOOK) is None:
                return False
            self.read()
            if self.head.get("kind") != "result":
                self.kill()
            self.process.wait()
        return True

    def send(self, signum: int) -> None:
        """Sends a signal to the process, if it is still there."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends what is left of it."""
        self.kill()
        self.process.wait()
        os.close(self.reader)

    # How it ended.

    @property
    def result(self) -> bytes:
        """What its worker returned, pickled."""
        return bytes(self._received)

    @property
    def signal(self) -> int | None:
        """The signal that it was told to stop with, if it did stop for it."""
        return self.head.get("signal")

    @property
    def succeeded(self) -> bool:
        """True if it has delivered its result and ended as it should."""
        expected = 128 + self.signal if self.signal else 0
        return self.head.get("kind") == "result" and self.process.returncode == expected

    @property
    def is_failure(self) -> bool:
        """True if it ended in any other way, unless the launcher ended it after its result."""
        return not self.succeeded and not (self.ended_by_us and self.head.get("kind") == "result")

    @property
    def importance(self) -> int:
        """How near to the first cause its end is: its own error, a death, another's error."""
        if self.head.get("kind") != "error" or self.signal:
            return 4 if self.ended_by_us else 1
        if not self.head["secondary"]:
            return 0
        return 2 if self.head["cause"] is not None else 3

    def explain(self) -> str:
        """What happened to it, with its traceback if it has one."""
        if message := self.head.get("message"):
            return str(message)
        host = self.head.get("host", socket.gethostname())
        return f"Rank {self.rank} on {host} {self.what}"

    @property
    def what(self) -> str:
        """What happened to it, in words that follow its name."""
        if self.head.get("kind") == "error":
            return str(self.head["what"])
        code = self.process.returncode
        if code < 0:
            hint = " The system does that when memory runs out." if code == -signal.SIGKILL else ""
            name = signal.Signals(-code).name
            return f"was killed by {name}.{hint} Look at its output, and at the system's log."
        return (
            f"exited with code {code} and without a result: os._exit, or a crash in native code. "
            "Look at its output."
        )


class Supervisor:
    """Runs the ranks of a plan on this host.

    Args:
        plan: The plan; the ranks connect to the store at its host and port.
        threads: The CPU threads of each rank, or None if the user has set them.
        publish_failure: Called with a rank that ended without a report and what happened to it, so
            that ranks on other hosts learn of it.
    """

    def __init__(
        self, plan: Plan, threads: int | None, publish_failure: Callable[[int, str], None]
    ) -> None:
        self._plan, self._threads, self._publish_failure = plan, threads, publish_failure
        self._ranks: list[StartedRank] = []
        self._running: list[StartedRank] = []
        self._ended: list[StartedRank] = []
        self._seen: list[StartedRank] = []
        self._signal: int | None = None
        self._signal_at = 0.0
        #: True after a second signal.
        self._is_urgent = False
        self._kill_at: float | None = None

    def run(self, worker: tuple[Any, ...]) -> list[Any]:
        """Runs the worker (function, arguments, keyword arguments) on every rank.

        Raises:
            WorkerError: If a rank failed; it carries the first cause.
            SystemExit: If a signal stopped the ranks.
        """
        payload = pickled_worker(worker)
        with ExitStack() as stack:
            task = stack.enter_context(_task_file(self._plan, payload))
            stack.enter_context(self._signals_forwarded())
            selector = stack.enter_context(selectors.DefaultSelector())
            command = [sys.executable, str(Path(__file__).with_name("child.py"))]
            for index in range(self._plan.member.local_world_size):
                rank = StartedRank(
                    self._plan.member.rank + index,
                    [*command, str(index), str(os.getpid())],
                    task.fileno(),
                    self._threads,
                )
                stack.callback(rank.close)
                selector.register(rank.reader, selectors.EVENT_READ, rank)
                self._ranks.append(rank)
                self._running.append(rank)
                if self._signal is not None:  # it came while the ranks were being started
                    self._end_all(self._signal, self._plan.grace)
                    break
            while self._running:
                self._watch(selector)
        return self._outcome()

    def _watch(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_TICK_SECONDS):
            key.data.read()
            if key.data.has_reported:
                selector.unregister(key.fd)
        for rank in [r for r in self._running if r.has_ended()]:
            self._running.remove(rank)
            self._ended.append(rank)
            if rank.is_failure and rank.importance == 1:
                self._publish_failure(rank.rank, rank.what)
                self._end_all(signal.SIGTERM, _NOTICE_SECONDS)
        for rank in self._ranks:
            # Act on the report itself; the reporting process may never exit.
            if rank.head.get("kind") == "error" and rank not in self._seen:
                self._seen.append(rank)
                if not rank.ended_by_us or rank.importance == 0:
                    self._end_all(signal.SIGTERM, _NOTICE_SECONDS)
        if self._kill_at is None and all(rank.has_reported for rank in self._running):
            # All results are here; a thread that never ends must not keep the run from ending.
            self._kill_at = time.monotonic() + self._plan.grace
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            for rank in self._running:
                rank.ended_by_us = True
                rank.kill()

    def _end_all(self, signum: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(deadline, self._kill_at)
        for rank in self._running:
            if rank.head.get("kind") != "error":
                rank.ended_by_us = True
                if self._plan.debug:
                    rank.send(signal.SIGUSR1)  # the last chance to report where it is
                rank.send(signum)

    @contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        """The ranks get the launcher's signals; a third one, or the end of grace, kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def forward_signal(signum: int, frame: Any) -> None:
            now = time.monotonic()
            if self._signal is None:
                self._signal, self._signal_at = signum, now
                self._end_all(signum, self._plan.grace)
            elif now - self._signal_at > ECHO_SECONDS:
                self._signal_at = now
                if self._is_urgent:
                    self._kill_at = now
                self._is_urgent = True
                for rank in self._running:
                    rank.send(signum)

        def forward_debug_signal(signum: int, frame: Any) -> None:
            for rank in self._running:
                rank.send(signum)

        previous = {s: signal.signal(s, forward_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        if self._plan.debug:
            previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, forward_debug_signal)
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _outcome(self) -> list[Any]:
        # After a signal the ranks leave one by one; that one misses another is then not a cause.
        worst = 0 if self._signal else 3
        causes = [r for r in self._ended if r.is_failure and r.importance <= worst]
        first = min(causes, key=lambda r: r.importance, default=None)
        if first is not None and not first.signal:
            raise _error_of(first)
        told = first or next((r for r in self._ended if r.signal), None)
        signum = self._signal or (told.signal if told else None)
        if signum is not None:
            who = "the launcher" if self._signal or told is None else f"rank {told.rank}"
            name = signal.Signals(signum).name
            logger.warning("%s got %s, all ranks have ended", who, name)
            raise SystemExit(128 + signum)
        return [cloudpickle.loads(rank.result) for rank in self._ranks]


def _error_of(rank: StartedRank) -> Exception:
    message = rank.explain()
    if rank.head.get("type") == LaunchError.__name__:
        return LaunchError(message)
    cause = rank.head.get("cause") if rank.importance == 2 else rank.rank
    host = rank.head.get("cause_host") or rank.head.get("host") or socket.gethostname()
    return WorkerError(message, rank=cause, host=host, exitcode=rank.process.returncode)


def pickled_worker(worker: tuple[Any, ...]) -> bytes:
    """The function, its arguments and keyword arguments, for another process."""
    try:
        return bytes(cloudpickle.dumps(worker))
    except Exception as error:
        name = getattr(worker[0], "__qualname__", repr(worker[0]))
        raise LaunchError(
            f"The worker {name} or its arguments cannot be sent to other processes "
            f"({type(error).__name__}: {error}). Open files, locks and connections inside the "
            "worker instead of handing them over."
        ) from error


@contextmanager
def _task_file(plan: Plan, payload: bytes) -> Iterator[BinaryIO]:
    """What every rank reads: a file without a name, which is gone with the last process."""
    head = {"path": sys.path, "argv": sys.argv, "plan": dataclasses.asdict(plan)}
    with tempfile.TemporaryFile() as task:
        task.write(json.dumps(head).encode() + b"\n" + payload)
        task.flush()
        yield task
