"""The launcher's own stdout and stderr, as places where lines of several ranks are shown."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchbearer_ddp.log import logger

#: So much a pipe takes without blocking once it is writable.
_PIECE = select.PIPE_BUF
#: With more than this unwritten, the ranks have to wait as they would for the console itself.
_MOST_PENDING = 1 << 20
_WAIT_MILLISECONDS = 100
#: To the start of the line, and clear it.
_CLEAR = b"\r\x1b[K"


class Console:
    """One stream of the launcher; what is written to it never blocks the launcher.

    On a terminal one rank may have an open line, such as a progress bar: it is removed before a
    line of another rank is shown, and drawn again below it.

    Args:
        stream: ``sys.stdout`` or ``sys.stderr``, or what the program has replaced it by.
        name: What it is called in a message.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._descriptor = _descriptor_of(stream)
        self._pending = bytearray()
        #: What stands in the last line of the terminal, if that line is not complete.
        self._open = b""
        #: True while a debugger has the terminal: lines wait.
        self.is_held = False
        self._is_broken = stream is None

    @property
    def is_terminal(self) -> bool:
        """True if it is a terminal, not a file, a pipe or a notebook."""
        return self._descriptor is not None and os.isatty(self._descriptor)

    @property
    def is_full(self) -> bool:
        """True if nobody reads it: the ranks should wait."""
        return len(self._pending) > _MOST_PENDING

    @property
    def size(self) -> os.terminal_size | None:
        """Columns and lines of the terminal."""
        with suppress(OSError):
            return None if self._descriptor is None else os.get_terminal_size(self._descriptor)
        return None

    def is_same_as(self, other: Console) -> bool:
        """True if both write to one file or terminal."""
        if self._descriptor is None or other._descriptor is None:
            return False
        return os.path.sameopenfile(self._descriptor, other._descriptor)

    def write_line(self, line: bytes) -> None:
        """Shows a whole line, which must end with a line feed."""
        self._write(self._around(line) if self._open else line)

    def pass_on(self, piece: bytes) -> None:
        """Shows what the one rank with an open line has written, at once and as it is."""
        self._write(piece)
        last = (self._open + piece).rpartition(b"\n")[2]
        self._open = last[max(0, last.rfind(b"\r")) :]

    def end_line(self) -> None:
        """Completes an open line: its rank has ended."""
        if self._open:
            self._write(b"\n")
            self._open = b""

    def _around(self, line: bytes) -> bytes:
        """A line above the open one."""
        size = self.size
        columns = size.columns if size else 0  # 0 if the terminal does not know
        wraps = 0 < columns < len(self._open.decode(errors="replace"))
        return (b"\n" if wraps else _CLEAR) + line + self._open

    def _write(self, data: bytes) -> None:
        if not self._is_broken:
            self._pending += data
            self.flush()

    def flush(self, gives_up: Callable[[], bool] | None = None) -> None:
        """Writes what can be written now; or everything, unless the function says to give up."""
        try:
            while self._pending and not self.is_held:
                if not self._write_piece(0 if gives_up is None else _WAIT_MILLISECONDS) and (
                    gives_up is None or gives_up()
                ):
                    return
        except (OSError, ValueError) as error:  # ValueError: the program has closed it
            self._is_broken = True
            self._pending.clear()
            why = getattr(error, "strerror", None) or error
            logger.warning(
                f"{self._name} of this command cannot be written ({why}): what the ranks print "
                "there is no longer shown. Training continues"
            )

    def _write_piece(self, milliseconds: int) -> bool:
        """Writes a piece; False if that would block for longer."""
        if self._descriptor is None:
            self._stream.write(self._pending.decode(errors="replace"))
            self._stream.flush()
            self._pending.clear()
            return True
        self._stream.flush()  # what the launcher itself has printed comes first
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        if not poll.poll(milliseconds):
            return False
        del self._pending[: os.write(self._descriptor, self._pending[:_PIECE])]
        return True


def _descriptor_of(stream: Any) -> int | None:
    """The descriptor behind a stream; None for one of a notebook, which has no bytes."""
    if not hasattr(stream, "buffer"):
        return None
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None
