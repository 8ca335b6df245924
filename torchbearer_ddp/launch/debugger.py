"""``breakpoint()`` on a rank: one rank has the terminal, and the others wait for it.

A rank reads the launcher's terminal itself while its debugger waits for a command. Meanwhile the
launcher shows nothing, and the other ranks know of it through the store.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torchbearer_ddp.group import debugging, launcher, stop_request
from torchbearer_ddp.log import logger

#: Python's variable for another debugger.
_VARIABLE = "PYTHONBREAKPOINT"
_NO_TERMINAL = (
    "there is no terminal for a debugger. Start the script in one, with --nproc-per-node or with "
    "python -m torchbearer_ddp run; in a notebook, run it in one process (--launcher inline)"
)


@contextlib.contextmanager
def offered(rank: int, debug_rank: int) -> Iterator[None]:
    """Lets ``breakpoint()`` work on this rank, for as long as its worker runs."""
    previous = sys.breakpointhook
    sys.breakpointhook = _Hook(rank, debug_rank, previous)
    try:
        yield
    finally:
        sys.breakpointhook = previous


class _Hook:
    """What ``breakpoint()`` calls."""

    def __init__(self, rank: int, debug_rank: int, previous: Callable[..., Any]) -> None:
        self._rank, self._debug_rank, self._previous = rank, debug_rank, previous
        self._passed: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = os.environ.get(_VARIABLE, "")
        if chosen == "0":
            return None
        frame, is_debugged = sys._getframe(1), self._rank == self._debug_rank
        if chosen not in ("", "pdb.set_trace"):  # the user's own debugger
            return self._previous(*args, **kwargs) if is_debugged else None
        if debugging.terminal() is None:
            if is_debugged:
                self._pass_by(frame, _NO_TERMINAL)
        elif is_debugged:
            _Debugger(self._rank).set_trace(frame)
        else:
            remedy = f"--debug-rank {self._rank} gives it to this rank"
            self._pass_by(frame, f"rank {self._debug_rank} has the terminal. {remedy}")
        return None

    def _pass_by(self, frame: FrameType, why: str) -> None:
        place = _place(frame)
        if place not in self._passed:
            self._passed.add(place)
            logger.warning(f"rank {self._rank} does not stop at breakpoint() in {place}: {why}")


class _Debugger(pdb.Pdb):
    """Python's debugger, with the terminal while it waits for a command.

    A signal that stops the run ends the debugger, so that the ranks can stop together and save.
    """

    def __init__(self, rank: int) -> None:
        # nosigint: else Ctrl-C would open the debugger once more after a "continue".
        super().__init__(nosigint=True)
        self._rank = rank

    def interaction(self, frame: Any, *args: Any) -> None:
        """Called wherever the debugger stops."""
        if stop_request.received() is not None:
            self.set_continue()
            return
        request = stop_request.current()
        polled, request.polled = request.polled, False
        try:
            self._interact(frame, *args)
        finally:
            request.polled = polled
        if request.signum is not None and not polled:
            stop_request.interrupt(request.signum)

    def cmdloop(self, intro: Any = None) -> None:
        """Reads commands until one goes on, or until a signal comes."""
        try:
            super().cmdloop(intro)
        except (KeyboardInterrupt, SystemExit, SystemError):
            # SystemError: Python 3.10, if the signal comes twice while it reads a line.
            if stop_request.received() is None:
                raise
            self.message("")  # the prompt was an open line
            self.set_continue()

    def postcmd(self, stop: bool, line: str) -> bool:
        """Called after each command, which may have caught what the signal raised."""
        if stop_request.received() is not None:
            self.set_continue()
            return True
        return super().postcmd(stop, line)

    def _interact(self, frame: Any, *args: Any) -> None:
        place = _place(frame) if frame is not None else "an error"
        with debugging.held(place), _own_terminal(debugging.terminal() or os.ctermid()):
            self.message(
                f"torchbearer_ddp: rank {self._rank} is in the debugger at {place}; the others "
                "wait for it, without a timeout"
            )
            super().interaction(frame, *args)


@contextlib.contextmanager
def _own_terminal(path: str) -> Iterator[None]:
    """Stdin and stdout of this process are the terminal; the launcher does not write to it."""
    sys.stdout.flush()
    sys.stderr.flush()
    launcher.ask("debugger", opens=True)
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    before = [os.dup(number) for number in (0, 1)]
    try:
        for number in (0, 1):
            os.dup2(terminal, number)
        yield
    finally:
        sys.stdout.flush()
        for number, descriptor in enumerate(before):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(terminal)
        launcher.ask("debugger", opens=False)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
