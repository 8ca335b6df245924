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
from typing import NamedTuple

from torchbearer_ddp.group.hosts import Process
from torchbearer_ddp.group.segment import LINE_BYTES, Segment
from torchbearer_ddp.group.waiting import POLL_SECONDS, Wait

#: How long a wait yields its core to others before it sleeps: a sleep costs a wake-up (measured:
#: two ranks signal each other in 1 us instead of 9, four on two cores in 13 us instead of 30).
_YIELD_SECONDS = 1e-4
#: How often a sleeping wait checks that the other process is alive.
_LIFE_SECONDS = 0.2
_CLOCK_MONOTONIC = 1


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
        self._posts = [
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
        self._missing = self._peers.copy()

    @property
    def are_owed(self) -> bool:
        """True if this rank has signalled, and has not taken the others' signals of that round."""
        return bool(self._rounds)

    def post(self) -> None:
        """Signals every other rank."""
        # In one call of C: Ctrl-C, which a script may catch, cannot come between two signals.
        deque(map(partial.__call__, self._posts), maxlen=0)

    def collect(self, wait: Wait | None = None) -> bool:
        """Takes one signal of every other rank; without a wait it gives up if one is missing.

        What was taken before it gave up counts the next time.
        """
        while self._missing:
            if self._missing[-1].take() != 0:
                if wait is None:
                    return False
                _wait_for_signal(self._missing, wait)
            self._missing.pop()
        missing = self._peers.copy()
        # No call between the two: see above.
        self._missing = missing
        del self._rounds[-1]
        return True


class _Peer(NamedTuple):
    """Another rank: its process, and how to take its signal, or to wait for it for a while."""

    process: Process
    take: Callable[[], int]
    sleep: Callable[[], bool]


def _wait_for_signal(missing: list[_Peer], wait: Wait) -> None:
    """Waits for the signal of the last of these ranks, and takes it.

    Raises:
        PeerLost: If one of the ranks has ended, or the last did not come within the timeout.
        DesyncError: If another rank waits for something else.
    """
    peer = missing[-1]
    now = time.monotonic()
    until, next_poll = now + _YIELD_SECONDS, now + min(POLL_SECONDS, wait.timeout)
    while time.monotonic() < until:
        os.sched_yield()
        if peer.take() == 0:
            return
    while not peer.sleep():
        for each in [each for each in missing if not each.process.alive()]:
            if each.take() != 0:
                cause = f"rank {each.process.rank}, process {each.process.pid}, has ended"
                raise wait.connection_error(ProcessLookupError(cause), lost=each.process.rank)
            if each is peer:  # it posted before it ended
                return
            missing.remove(each)
        if time.monotonic() >= next_poll:
            wait.poll()
            next_poll = time.monotonic() + POLL_SECONDS


def _sleeper(library: ctypes.CDLL, semaphore: ctypes.c_void_p) -> Callable[[], bool]:
    """A function that waits for a semaphore for a while, and returns whether it got it.

    A signal ends that wait early, so that Python's handler runs.
    """
    if hasattr(library, "sem_clockwait"):  # glibc 2.30: not moved by changes of the wall clock
        clockwait = partial(library.sem_clockwait, semaphore, _CLOCK_MONOTONIC)
        return lambda: clockwait(ctypes.byref(_timespec(time.monotonic() + _LIFE_SECONDS))) == 0
    timedwait = partial(library.sem_timedwait, semaphore)
    return lambda: timedwait(ctypes.byref(_timespec(time.time() + _LIFE_SECONDS))) == 0
