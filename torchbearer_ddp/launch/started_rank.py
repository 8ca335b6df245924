"""One rank that the launcher has started: its process, and what it has reported."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torchbearer_ddp.errors import DistributedError, LaunchError
from torchbearer_ddp.group import failures
from torchbearer_ddp.launch.process_group import end_group
from torchbearer_ddp.launch.streams import RankStream

_READ_BYTES = 1 << 16
_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Process(Protocol):
    """The process of a rank, see :class:`subprocess.Popen`."""

    pid: int
    returncode: Any

    def wait(self) -> int:
        """Waits for its end, and returns its exit code."""


class StartedRank:
    """A started process that sends messages and a report, after which a result follows pickled.

    Args:
        rank: Its number.
        start: Starts its process, with the descriptor that it reports to and those of its streams.
        streams: Its stdout and stderr, one for both, or none if it has those of the launcher.
    """

    def __init__(
        self,
        rank: int,
        start: Callable[[int, list[int]], Process],
        streams: Sequence[RankStream] = (),
    ) -> None:
        self.rank = rank
        self.streams = streams
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        self.reader, writer = self._socket.fileno(), other.fileno()
        self._received = bytearray()
        #: What it has told on the way, see :mod:`torchbearer_ddp.group.launcher`.
        self._messages: list[dict[str, Any]] = []
        #: True once it has written everything that it will write.
        self.has_reported = False
        #: True once the launcher has signalled this rank; its exit is then not a failure.
        self.ended_by_us = False
        #: Its report, see :func:`torchbearer_ddp.group.failures.report_of`; empty until it comes.
        self.report: dict[str, Any] = {}
        try:
            self.process = start(writer, [stream.writer for stream in streams])
        except BaseException:
            self._socket.close()
            raise
        finally:
            other.close()
            for stream in streams:
                stream.close_writer()

    def read(self) -> None:
        """Takes what has arrived, so that the rank never waits for the launcher."""
        with suppress(BlockingIOError):
            with suppress(ConnectionResetError):  # it has ended, and has not read an answer
                while chunk := os.read(self.reader, _READ_BYTES):
                    self._received += chunk
            self.has_reported = True
        while not self.has_result and b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            message = json.loads(line)
            if message["kind"] in ("result", "error"):
                self.report = message
            else:
                self._messages.append(message)
        # Not only at the end of the stream, which a process that the rank has forked keeps open.
        if self.has_result and len(self._received) >= self.report["bytes"]:
            self.has_reported = True

    def messages(self) -> Iterator[dict[str, Any]]:
        """The messages that have come since the last call."""
        while self._messages:
            yield self._messages.pop(0)

    def answer(self) -> None:
        """Tells the rank, which waits for it, that its message was acted on."""
        with suppress(OSError):
            os.write(self.reader, b"\n")

    def has_ended(self) -> bool:
        """True once the process is gone and all that it wrote is read."""
        if self.process.returncode is None:
            # WNOWAIT: until it is reaped, its process id and group cannot be another process's.
            if os.waitid(os.P_PID, self.process.pid, _LOOK) is None:
                return False
            self.read()
            if not self.has_result:
                self.kill()
            self.process.wait()
        return True

    def send(self, signum: int) -> None:
        """Sends a signal to the process, if it still runs."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        if self.process.returncode is None:
            # By itself too: one that was just forked has no group yet.
            self.send(signal.SIGKILL)
            end_group(self.process.pid)

    def close(self) -> None:
        """Ends the process if it still runs, and closes the pipe."""
        self.kill()
        self.process.wait()
        self._socket.close()

    # How it ended.

    @property
    def has_result(self) -> bool:
        """True once its worker's result has come."""
        return self.report.get("kind") == "result"

    @property
    def has_failed(self) -> bool:
        """True once it has reported an error."""
        return self.report.get("kind") == "error"

    @property
    def result(self) -> bytes:
        """What its worker returned, pickled."""
        return bytes(self._received)

    @property
    def signal(self) -> int | None:
        """The signal for which it stopped, if it did."""
        return self.report.get("signal")

    @property
    def is_failure(self) -> bool:
        """True if it ended without its result, or with another exit code than it should."""
        expected = 128 + self.signal if self.signal else 0
        succeeded = self.ended_by_us or self.process.returncode == expected
        return not (self.has_result and succeeded)

    @property
    def distance(self) -> int:
        """How far its end is from the first cause: 0 for its own error, 1 for a death."""
        if not self.has_failed or self.signal:
            return 4 if self.ended_by_us else 1
        if not self.report["secondary"]:
            return 0
        return 2 if self.report["cause"] is not None else 3

    def what(self) -> str:
        """What happened to it, in words that follow its name."""
        if self.has_failed:
            return str(self.report["what"])
        code = self.process.returncode
        if code < 0:
            hint = " The system does that when memory runs out." if code == -signal.SIGKILL else ""
            name = signal.Signals(-code).name
            return f"was killed by {name}.{hint} See its output, and the system's log."
        return (
            f"exited with code {code} and without a result: os._exit, or a crash in native code. "
            "See its output."
        )

    def error(self) -> DistributedError:
        """The error to raise for its failure."""
        if self.report.get("launch"):
            return LaunchError(self.report["message"])
        known = {"rank": self.rank, "host": socket.gethostname(), "what": self.what()}
        known["exitcode"] = self.process.returncode
        return failures.worker_error({**known, **self.report})
