"""Ending a rank with all that it has started, but for what tidies up after it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_PROC = Path("/proc")
_TRACKER = b"multiprocessing.resource_tracker"
#: In which states a process has ended, as the kernel writes them.
_ENDED = ("Z", "X")
_SECONDS = 2.0
_POLL_SECONDS = 0.01


def end_group(leader: int) -> None:
    """Ends every process of a group at once, except Python's resource trackers.

    A tracker ends by itself after the others, and removes the semaphores that they have left in
    /dev/shm: those of loader workers that are spawned.
    """
    deadline = time.monotonic() + _SECONDS
    while _trackers_of(leader) and time.monotonic() < deadline:
        # The leader first: it starts no more then.
        others = [leader, *(_members(leader) - {leader} - _trackers_of(leader))]
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not _members(leader) - _trackers_of(leader):
            return
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _trackers_of(leader: int) -> set[int]:
    found = set()
    for pid in _members(leader):
        with contextlib.suppress(OSError):  # it has ended
            if _TRACKER in (_PROC / str(pid) / "cmdline").read_bytes():
                found.add(pid)
    return found


def _members(leader: int) -> set[int]:
    """The running processes of a group; none where the kernel does not list them."""
    found = set()
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # The name of the program, in parentheses, may hold anything.
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == leader and state not in _ENDED:
                    found.add(int(entry.name))
    return found
