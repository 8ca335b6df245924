"""The descriptors that a started rank has as stdout and stderr, and what the launcher reads."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from contextlib import suppress

_READ_BYTES = 1 << 16
#: As large as an ordinary user's pipe may be: a rank waits less for a launcher that is busy.
_PIPE_BYTES = 1 << 20


class RankStream:
    """A pipe, or a terminal of its own, that a rank writes to and the launcher reads.

    Args:
        size: Columns and lines, for a rank that is to believe in a terminal; None for a pipe.
    """

    def __init__(self, size: os.terminal_size | None = None) -> None:
        self.is_terminal = False
        if size is not None:
            with suppress(OSError):  # no pseudo-terminals here, as in some containers
                self.reader, self.writer = os.openpty()
                self.is_terminal = True
                self._pass_bytes_unchanged()
                self.resize(size)
        if not self.is_terminal:
            self.reader, self.writer = os.pipe()
            with suppress(OSError, AttributeError):  # Linux has it
                fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self.reader, False)
        self.is_open = True

    def _pass_bytes_unchanged(self) -> None:
        mode = termios.tcgetattr(self.writer)
        mode[1] &= ~termios.OPOST  # else each line feed becomes two characters
        termios.tcsetattr(self.writer, termios.TCSANOW, mode)

    def resize(self, size: os.terminal_size) -> None:
        """Tells the rank the size of the launcher's terminal."""
        if self.is_terminal:
            packed = struct.pack("HHHH", size.lines, size.columns, 0, 0)
            fcntl.ioctl(self.reader, termios.TIOCSWINSZ, packed)

    def close_writer(self) -> None:
        """To be called when the rank has its own copy."""
        os.close(self.writer)

    def read(self) -> bytes:
        """What has arrived, at most 64 KiB; empty if there is nothing, or nothing any more."""
        try:
            chunk = os.read(self.reader, _READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:  # the last process with this terminal has ended
            chunk = b""
        if not chunk:
            self.is_open = False
        return chunk

    def close(self) -> None:
        """Closes the launcher's end."""
        self.is_open = False
        os.close(self.reader)
