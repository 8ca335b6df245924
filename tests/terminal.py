"""Programs in a terminal of their own, and what stands on its screen."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
from typing import Any

from tests.processes import Program, until

COLUMNS, LINES = 100, 40


class TerminalProgram(Program):
    """A program whose stdin, stdout and stderr are a terminal, which a test types into."""

    def __init__(self, *command: str, **options: Any) -> None:
        self._master, self._slave = os.openpty()
        size = struct.pack("HHHH", LINES, COLUMNS, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        self.typed = bytearray()
        super().__init__(*command, **options, terminal=self._slave)
        os.close(self._slave)
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 1 << 16):
                self.typed += data
        except OSError:  # the last process has closed the terminal
            pass

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str, seconds: float = 60.0) -> None:
        """Waits until the terminal has shown a text."""
        until(lambda: text in self.text() or self.process.poll() is not None, seconds)
        assert text in self.text(), self.text()

    def text(self) -> str:
        return self.typed.decode(errors="replace")

    def screen(self) -> list[str]:
        """The lines as they look in the end."""
        return screen(self.text())


def screen(text: str) -> list[str]:
    """The lines of a terminal that knows carriage returns and clearing a line."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[K|\r|\n|[^\r\n\x1b]+|\x1b", text):
        if piece == "\n":
            lines.append("")
            column = 0  # as after the terminal's own carriage return
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            line = lines[-1].ljust(column)
            lines[-1] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines]
