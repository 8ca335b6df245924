"""What the ranks of this host print: whole lines, in one log file for each rank, and shown.

stdout and stderr of a rank are pipes that the supervisor reads, also for native code and loader
workers. If the launcher has a terminal, rank zero has a terminal of its own instead: its progress
bar is passed on as it is, and drawn again below the lines of other ranks. Everywhere else only the
last state of a line that was overwritten with carriage returns counts.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from torchbearer_ddp.launch.console import Console
from torchbearer_ddp.launch.notebook import is_notebook
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.streams import RankStream
from torchbearer_ddp.log import logger

#: How often an open line that is being overwritten, such as a long bar, is shown without terminal.
_SNAPSHOT_SECONDS = 60.0
#: A longer line is shown in parts.
_MOST_OF_A_LINE = 1 << 26
#: More than a pipe can hold.
_MOST_PIECES = 64
#: So many lines of a rank that is not shown are kept for the case that it fails.
_KEPT_LINES = 50


class Output:
    """Shows and keeps what the ranks of a plan print.

    Args:
        plan: Says which ranks are shown, and where the log files are.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._out, self._err = Console(sys.stdout, "stdout"), Console(sys.stderr, "stderr")
        if self._out.is_same_as(self._err):
            self._out = self._err
        self._streams: list[_Stream] = []
        self._files: dict[int, BinaryIO] = {}
        self._kept: dict[int, deque[bytes]] = {}
        #: How the terminal was before a debugger had it.
        self._mode: list[Any] | None = None
        shown = 1 if plan.quiet_ranks else plan.member.local_world_size
        self._has_prefix = plan.tee or (shown > 1 and self._has_terminal)

    @property
    def _consoles(self) -> list[Console]:
        return [self._out] if self._out is self._err else [self._out, self._err]

    @property
    def _has_terminal(self) -> bool:
        return any(each.is_terminal for each in self._consoles)

    def open_for(self, rank: int) -> tuple[RankStream, ...]:
        """The streams for stdout and stderr of a rank; one if the launcher's are the same."""
        if self._plan.log_dir is not None and rank not in self._files:
            self._files[rank] = _open_log(log_file(self._plan.log_dir, rank))
        made = []
        for console in self._consoles:
            size = console.size if console.is_terminal and rank == 0 else None
            stream = _Stream(RankStream(size), console, rank)
            self._streams.append(stream)
            made.append(stream.source)
        return tuple(made)

    def take(self, source: RankStream) -> bool:
        """Reads what has arrived on a stream; False if it must wait, as nobody reads the rest."""
        stream = next(each for each in self._streams if each.source is source)
        if stream.console.is_full:
            return False
        self._read(stream)
        return True

    def _read(self, stream: _Stream) -> bool:
        """Reads a piece; False if there was none."""
        chunk = stream.source.read()
        live = stream.source.is_terminal and self._is_shown(stream.rank)
        if live:
            prefix = self._prefix(stream.rank)
            for piece in chunk.splitlines(keepends=True) if prefix else [chunk] if chunk else []:
                stream.console.pass_on(stream.with_prefix(piece, prefix))
        for line in stream.assemble(chunk):
            self._write_file(stream.rank, line)
            if not live:
                self._show_line(stream.rank, stream.console, line)
        return bool(chunk)

    def tick(self) -> None:
        """To be called often: shows what could not be shown before, and the state of long lines."""
        for console in self._consoles:
            console.flush()
        now = time.monotonic()
        for stream in self._streams:
            if (line := stream.snapshot(now)) is not None:
                self._write_file(stream.rank, line)
                if not stream.source.is_terminal:
                    self._show_line(stream.rank, stream.console, line)

    def show(self, rank: int, text: str) -> None:
        """Shows text that a rank would have written to stderr, if that rank is shown."""
        for line in text.splitlines():
            self._show_line(rank, self._err, f"{line}\n".encode())

    def say(self, text: str) -> None:
        """Shows a line of the launcher itself, above an open line."""
        self._err.write_line(f"torchbearer_ddp: {text}\n".encode())

    def keep(self, rank: int, text: str) -> None:
        """Writes text into the log file of a rank, if it has one."""
        self._write_file(rank, text.encode())

    def show_kept(self, rank: int) -> None:
        """Shows the last lines of a rank that has failed and is not shown."""
        if self._is_shown(rank):
            return
        for stream in self._streams:
            if stream.rank == rank:
                self._drain(stream)
                if rest := stream.rest():
                    self._write_file(rank, rest)
                    self._show_line(rank, stream.console, rest)
        for line in self._kept.pop(rank, ()):
            self._err.write_line(f"[rank {rank}] ".encode() + line)

    def resize(self) -> None:
        """The launcher's terminal has another size."""
        for stream in self._streams:
            if stream.source.is_open and (size := stream.console.size):
                stream.source.resize(size)

    def hold(self, held: bool) -> None:
        """While a debugger has the terminal, nothing is shown there."""
        if held and self._has_terminal:
            with suppress(termios.error):
                self._mode = termios.tcgetattr(0)
        for stream in self._streams:
            self._drain(stream)
        for console in self._consoles:
            console.flush()
            console.is_held = held and console.is_terminal

    def close(self, gives_up: Callable[[], bool] = bool) -> None:
        """Shows the rest, unless it is given up; pipes that others hold open are not waited for."""
        if any(each.is_held for each in self._consoles) and self._mode is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._mode)  # the debugger was killed
        self.hold(False)
        for stream in self._streams:
            if rest := stream.rest():
                self._write_file(stream.rank, rest)
                if stream.source.is_terminal and self._is_shown(stream.rank):
                    stream.console.end_line()
                else:
                    self._show_line(stream.rank, stream.console, rest)
            stream.source.close()
        self._streams.clear()
        for console in self._consoles:
            console.flush(gives_up)
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _drain(self, stream: _Stream) -> None:
        """Reads what is there; not for ever, as a process that is left may go on writing."""
        for _ in range(_MOST_PIECES):
            if not stream.source.is_open or not self._read(stream):
                break

    # One line.

    def _is_shown(self, rank: int) -> bool:
        return rank == 0 or not self._plan.quiet_ranks

    def _prefix(self, rank: int) -> bytes:
        return f"[rank {rank}] ".encode() if self._has_prefix else b""

    def _show_line(self, rank: int, console: Console, line: bytes) -> None:
        if self._is_shown(rank):
            console.write_line(self._prefix(rank) + line)
        else:
            self._kept.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(line)

    def _write_file(self, rank: int, line: bytes) -> None:
        if (file := self._files.get(rank)) is None:
            return
        try:
            file.write(line)
        except OSError as error:
            del self._files[rank]
            file.close()
            path = log_file(self._plan.log_dir or "", rank)
            logger.warning(
                f"{path} cannot be written ({error.strerror}): it ends here. Training continues"
            )


class _Stream:
    """The lines of one stream of one rank."""

    def __init__(self, source: RankStream, console: Console, rank: int) -> None:
        self.source, self.console, self.rank = source, console, rank
        self._received = bytearray()
        self._at_line_start = True
        self._shown_at = time.monotonic()

    def with_prefix(self, piece: bytes, prefix: bytes) -> bytes:
        """The piece with a prefix if it begins a line, and not a bar, which begins anew anyway."""
        begins, self._at_line_start = self._at_line_start, piece.endswith(b"\n")
        return prefix + piece if begins and piece[:1] not in (b"\r", b"\x1b", b"\n") else piece

    def assemble(self, chunk: bytes) -> Iterable[bytes]:
        """The lines that this chunk completes, as they look in the end."""
        self._received += chunk
        *lines, rest = bytes(self._received).split(b"\n") if b"\n" in chunk else [b""]
        if lines:
            self._received, self._shown_at = bytearray(rest), time.monotonic()
        elif len(self._received) > _MOST_OF_A_LINE:
            lines = [self.rest()[:-1]]
        elif b"\r" in chunk[:-1]:
            # Only the last state of a bar is kept.
            del self._received[: max(0, self._received.rfind(b"\r", 0, -1))]
        return [_last_state(line) for line in lines]

    def snapshot(self, now: float) -> bytes | None:
        """The open line, if it has been overwritten for a long time."""
        if now - self._shown_at < _SNAPSHOT_SECONDS or b"\r" not in self._received[:-1]:
            return None
        self._shown_at = now
        return _last_state(bytes(self._received))

    def rest(self) -> bytes:
        """The last line, which was not completed."""
        rest, self._received = bytes(self._received), bytearray()
        return _last_state(rest) if rest.strip() else b""


def _last_state(line: bytes) -> bytes:
    """A line as it looks after its carriage returns, with its line feed."""
    end = b"\r\n" if line.endswith(b"\r") else b"\n"
    states = [each for each in line.split(b"\r") if each.strip()]
    return (states[-1].rstrip(b" ") if b"\r" in line[:-1] and states else line.rstrip(b"\r")) + end


def is_captured(plan: Plan) -> bool:
    """True if the launcher reads what its ranks print; else a single rank has its terminal."""
    several = plan.member.local_world_size > 1
    return several or plan.log_dir is not None or plan.tee or is_notebook()


def prepare(plan: Plan) -> None:
    """Makes the folder of the log files, before anything is started.

    Raises:
        ValueError: If it cannot be made.
    """
    if plan.log_dir is None:
        return
    try:
        Path(plan.log_dir).mkdir(parents=True, exist_ok=True)
        for index in range(plan.member.local_world_size):
            _open_log(log_file(plan.log_dir, plan.member.rank + index)).close()
    except OSError as error:
        raise ValueError(
            f"The log folder {plan.log_dir} cannot be used ({error.strerror}). Give --log-dir a "
            "folder that this user may write."
        ) from error


def _open_log(path: Path) -> BinaryIO:
    """Opens a file to add to it; a link would lead elsewhere, and a pipe wait for its reader."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a file")
    return os.fdopen(descriptor, "ab", buffering=0)


def log_file(folder: str, rank: int) -> Path:
    """The log file of a rank."""
    return Path(folder) / f"rank-{rank}.log"
