"""Signals between the ranks of a host: semaphores in shared memory, with waits that notice a death.

A semaphore of the C library orders memory: what a rank wrote before it posts is what the other
reads after it has taken the signal, on every architecture.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

from torchbearer_ddp.group.hosts import Process
from torchbearer_ddp.group.segment import LINE_BYTES, Segment
from torchbearer_ddp.group.waiting import POLL_SECONDS, Wait

#: How long a wait yields its core to others before it sleeps: a sleep costs a wake-up (measured:
#: two ranks signal each other in 1 us instead of 9, four on two cores in 13 us instead of 30).
_YIELD_SECONDS = 1e-4
#: How often a sleeping wait checks that the other process is alive.
_LIFE_SECONDS = 0.2
_CLOCK_MONOTONIC = 1
_NO_ARGUMENTS: tuple[tuple[()], ...] = ((),)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(clock: float) -> _Timespec:
    return _Timespec(int(clock), int(clock % 1 * 1e9))


class Signals:
    """Counted signals from each rank of a host to each other one.

    The n-th signal that a rank takes from another is the n-th that the other posted, so ranks that
    do the same things in the same order need no names for them.

    Each rank's part of the segment has one semaphore (32 bytes, on a cache line for itself) for
    each rank, from ``offset`` on. No rank may post before every rank has made its signals.
    """

    def __init__(self, segment: Segment, offset: int, local: list[Process], me: int) -> None:
        self._segment = segment  # the semaphores live as long as it does
        library = ctypes.CDLL(None, use_errno=True)
        # These never block, so they need not release the interpreter's lock.
        quick = ctypes.PyDLL(None)
        base = segment.address + offset

        def semaphore(owner: int, poster: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(base + owner * segment.part_bytes + poster * LINE_BYTES)

        others = [index for index in range(len(local)) if index != me]
        for other in others:
            if library.sem_init(semaphore(me, other), 1, 0) != 0:
                raise OSError(ctypes.get_errno(), "sem_init failed")
        #: Rounds in which this rank has signalled, and has not taken all signals of the others.
        self._rounds: list[None] = []
        self._posts: list[partial[Any]] = [
            *(partial(quick.sem_post, semaphore(other, me)) for other in others),
            partial(self._rounds.append, None),
        ]
        self._peers = [
            _Peer(
                local[other],
                take=partial(quick.sem_trywait, semaphore(me, other)),
                sleep=_sleeper(library, semaphore(me, other)),
            )
            for other in others
        ]
        self._missing = [_Signal(peer) for peer in self._peers]

    @property
    def are_owed(self) -> bool:
        """True if this rank has signalled, and has not taken the others' signals of that round."""
        return bool(self._rounds)

    def post(self, before: partial[Any] | None = None) -> None:
        """Signals every other rank, after a last call that belongs to it."""
        posts = self._posts if before is None else [before, *self._posts]
        # In one call of C: Ctrl-C, which a script may catch, cannot come between two of these.
        deque(map(partial.__call__, posts), maxlen=0)

    def collect(self, wait: Wait | None = None) -> bool:
        """Takes one signal of every other rank; without a wait it gives up if one is missing.

        What was taken before it gave up, or before an exception ended it, counts the next time.
        """
        while self._missing:
            if not self._missing[-1].is_taken():
                if wait is None:
                    return False
                _wait_for_signal(self._missing, wait)
            self._missing.pop()
        missing = [_Signal(peer) for peer in self._peers]
        # No call between the two: see above.
        self._missing = missing
        del self._rounds[-1]
        return True


class _Peer(NamedTuple):
    """Another rank: its process, and how to take its signal, or to wait for it until a time."""

    process: Process
    take: Callable[[], int]
    sleep: tuple[Callable[[Any], int], Callable[[], float]]


class _Signal:
    """One signal of another rank.

    One that is taken and not noted, because an exception came in between, would be lost: C takes
    and notes it in one call.
    """

    def __init__(self, peer: _Peer) -> None:
        self.process = peer.process
        self._peer = peer
        #: What the last attempt to take it has returned: 0 if it did.
        self._last = deque((1,), 1)

    def is_taken(self) -> bool:
        """Takes it, if it is there and was not taken yet."""
        if self._last[0]:
            self._last.extend(starmap(self._peer.take, _NO_ARGUMENTS))
        return not self._last[0]

    def is_taken_soon(self) -> bool:
        """The same, after a while; a signal of the system ends it, so that its handler runs."""
        if self._last[0]:
            sleep, clock = self._peer.sleep
            until = ctypes.byref(_timespec(clock() + _LIFE_SECONDS))
            self._last.extend(map(sleep, (until,)))
        return not self._last[0]


def _wait_for_signal(missing: list[_Signal], wait: Wait) -> None:
    """Waits for the last of these signals, and takes it.

    Raises:
        PeerLost: If one of the ranks has ended, or the last did not come within the timeout.
        DesyncError: If another rank waits for something else.
    """
    signal = missing[-1]
    now = time.monotonic()
    until, next_poll = now + _YIELD_SECONDS, now + min(POLL_SECONDS, wait.timeout)
    while time.monotonic() < until:
        os.sched_yield()
        if signal.is_taken():
            return
    while not signal.is_taken_soon():
        for each in [each for each in missing if not each.process.alive()]:
            if not each.is_taken():
                cause = f"rank {each.process.rank}, process {each.process.pid}, has ended"
                raise wait.connection_error(ProcessLookupError(cause), lost=each.process.rank)
            if each is signal:  # it posted before it ended
                return
            missing.remove(each)
        if time.monotonic() >= next_poll:
            wait.poll()
            next_poll = time.monotonic() + POLL_SECONDS


def _sleeper(
    library: ctypes.CDLL, semaphore: ctypes.c_void_p
) -> tuple[Callable[[Any], int], Callable[[], float]]:
    """A function that waits for a semaphore until a time, and the clock of that time."""
    if hasattr(library, "sem_clockwait"):  # glibc 2.30: not moved by changes of the wall clock
        return partial(library.sem_clockwait, semaphore, _CLOCK_MONOTONIC), time.monotonic
    return partial(library.sem_timedwait, semaphore), time.time
