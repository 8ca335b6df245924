"""Buckets in memory that the ranks of a host share: summed where they lie, without sockets.

Ranks that sum the same numbers in the same order get the same bits, on every rank and in every run.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Protocol

import torch

from torchbearer_ddp import collectives
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.process_group import Group
from torchbearer_ddp.reducer.hosts import Process
from torchbearer_ddp.reducer.segment import share
from torchbearer_ddp.reducer.signals import Signals
from torchbearer_ddp.waiting import Wait

#: Up to this size every rank sums the whole bucket, which saves a meeting.
WHOLE_BYTES = 64 * 1024
#: What a rank sums at a time, over all ranks together: it stays in the core's own cache.
CACHE_BYTES = 512 * 1024
#: A cache line: what ranks write by turns begins on one of its own.
LINE_BYTES = 64


class _Stamp(ctypes.Structure):
    """In front of a rank's numbers: which round they belong to, and what they weigh."""

    _fields_ = (("round", ctypes.c_int64), ("weight", ctypes.c_double))
    round: int
    weight: float


class Neighbourhood:
    """The ranks of this host and the signals between them; collective to make.

    Args:
        group: The group of all ranks.
        local: The processes of this host, in rank order.

    Raises:
        SegmentError: On every rank of the world, if some host's ranks cannot share memory.
    """

    def __init__(self, group: Group, local: list[Process]) -> None:
        self.group = group
        self.local = local
        self.size = len(local)
        self.me = [process.rank for process in local].index(group.member.rank)
        segment = share(local, Signals.part_bytes(2, self.size))
        #: "My numbers are in place."
        self.arrivals = Signals(segment, 0, local, self.me)
        #: "I have summed my slice."
        self.departures = Signals(segment, 1, local, self.me)
        collectives.barrier("the signals in shared memory")  # nobody posts before all are made

    def weights(self, stamps: list[_Stamp], number: int) -> list[float]:
        """What each rank's numbers weigh.

        Raises:
            DesyncError: If another rank began another bucket, or another round of this one.
        """
        for index, stamp in enumerate(stamps):
            if stamp.round != number:
                self.group.broken = True
                raise DesyncError(
                    f"Rank {self.local[index].rank} is in another place than rank "
                    f"{self.local[self.me].rank}: this bucket's round is {stamp.round} there and "
                    f"{number} here. Every rank must take the same steps: look for a loop, a stop "
                    "or a callback that only some ranks have."
                )
        return [stamp.weight for stamp in stamps]


class Exchange(Protocol):
    """One bucket's way to its sum."""

    bucket: torch.Tensor

    def begin(self, weight: float) -> None:
        """Lets the others have this rank's numbers."""
        ...

    def advance(self) -> bool:
        """Does what can be done without waiting; False if the next bucket's turn has not come."""
        ...

    def complete(self, wait: Wait) -> None:
        """Waits until the bucket holds the sum."""
        ...


class Meeting:
    """Takes one signal of every other rank, now or later.

    Args:
        signals: Which signals are taken.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._missing: list[int] = []

    def begin(self) -> None:
        """Expects everybody."""
        self._missing = self._signals.peers.copy()

    def advance(self) -> bool:
        """Takes what is there; True if nobody is missing."""
        while self._missing and self._signals.take(self._missing[-1]):
            self._missing.pop()
        return not self._missing

    def complete(self, wait: Wait) -> None:
        """Waits until nobody is missing."""
        while self._missing:
            self._signals.wait(self._missing[-1], wait)
            self._missing.pop()


class WholeExchange:
    """A small bucket: every rank sums all of it into memory of its own, so one meeting is enough.

    The numbers go into two places by turns. When a rank fills the first again, all others have
    begun the second, so they are done with the first.

    Args:
        hood: The ranks of this host.
        numel: The size of the bucket.
        dtype: Its type.
        header: How many elements at the end have no weight.
    """

    def __init__(self, hood: Neighbourhood, numel: int, dtype: torch.dtype, header: int) -> None:
        room = LINE_BYTES + -(-numel * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        segment = share(hood.local, 2 * room)
        self.bucket = torch.zeros(numel, dtype=dtype)
        self._hood = hood
        parts = range(hood.size)
        self._stamps = [[segment.place(p, turn * room, _Stamp) for p in parts] for turn in (0, 1)]
        self._inputs = [
            [segment.tensor(p, turn * room + LINE_BYTES, numel, dtype) for p in parts]
            for turn in (0, 1)
        ]
        body = numel - header
        self._body, self._header = self.bucket[:body], self.bucket[body:]
        self._bodies = [[each[:body] for each in inputs] for inputs in self._inputs]
        self._headers = [[each[body:] for each in inputs] for inputs in self._inputs]
        self._arrivals = Meeting(hood.arrivals)
        self._round = 0
        self._summed = True

    def begin(self, weight: float) -> None:
        """Copies the numbers in and says so."""
        self._round += 1
        turn, me = self._round & 1, self._hood.me
        self._inputs[turn][me].copy_(self.bucket)
        stamp = self._stamps[turn][me]
        stamp.round, stamp.weight = self._round, weight
        self._hood.arrivals.post()
        self._arrivals.begin()
        self._summed = False

    def advance(self) -> bool:
        """Sums if all have arrived."""
        if not self._summed and self._arrivals.advance():
            self._sum()
        return self._summed

    def complete(self, wait: Wait) -> None:
        """Sums as soon as all have arrived."""
        if not self._summed:
            self._arrivals.complete(wait)
            self._sum()

    def _sum(self) -> None:
        turn = self._round & 1
        weights = self._hood.weights(self._stamps[turn], self._round)
        if any(weight != 1.0 for weight in weights):
            _add_weighted(self._bodies[turn], weights, self._body)
            _add(self._headers[turn], self._header)
        else:
            _add(self._inputs[turn], self.bucket)
        self._summed = True


class SlicedExchange:
    """A large bucket: it lies in shared memory, and every rank sums one slice of it for all.

    Args:
        hood: The ranks of this host.
        numel: The size of the bucket.
        dtype: Its type.
        header: How many elements at the end have no weight.
    """

    def __init__(self, hood: Neighbourhood, numel: int, dtype: torch.dtype, header: int) -> None:
        segment = share(hood.local, LINE_BYTES + numel * dtype.itemsize)
        parts = [segment.tensor(p, LINE_BYTES, numel, dtype) for p in range(hood.size)]
        self.bucket = parts[hood.me]
        self._hood = hood
        self._stamps = [segment.place(p, 0, _Stamp) for p in range(hood.size)]
        begin, end = _slice(numel, dtype.itemsize, hood.me, hood.size)
        self._total = parts[0][begin:end]
        body = min(max(begin, numel - header), end)
        step = max(1, CACHE_BYTES // (hood.size * dtype.itemsize))
        #: By chunk of this rank's slice: the same numbers' places in every rank's part.
        self._body = _chunks(parts, begin, body, step)
        self._header = _chunks(parts, body, end, step)
        self._arrivals = Meeting(hood.arrivals)
        self._departures = Meeting(hood.departures)
        self._round = 0
        self._summed = True

    def begin(self, weight: float) -> None:
        """Says that the numbers are in place."""
        self._round += 1
        stamp = self._stamps[self._hood.me]
        stamp.round, stamp.weight = self._round, weight
        self._hood.arrivals.post()
        self._arrivals.begin()
        self._departures.begin()
        self._summed = False

    def advance(self) -> bool:
        """Sums this rank's slice if all have arrived: the sooner, the more is in the cache."""
        if not self._summed and self._arrivals.advance():
            self._sum()
        return self._summed

    def complete(self, wait: Wait) -> None:
        """Sums this rank's slice, and waits for the others' slices."""
        if not self._summed:
            self._arrivals.complete(wait)
            self._sum()
        self._departures.complete(wait)

    def _sum(self) -> None:
        self._add_slice(hand_out=True)
        self._hood.departures.post()
        self._summed = True

    def _add_slice(self, *, hand_out: bool) -> None:
        """Sums this rank's slice into the first rank's part, and copies it to the others' parts."""
        weights = self._hood.weights(self._stamps, self._round)
        weighted = any(weight != 1.0 for weight in weights)
        for chunk in self._body:
            if weighted:
                _add_weighted(chunk, weights, chunk[0])
            else:
                _add(chunk, chunk[0])
            if hand_out:
                _copy(chunk)
        for chunk in self._header:
            _add(chunk, chunk[0])
            if hand_out:
                _copy(chunk)

    def _hand_out(self) -> None:
        """Copies this rank's slice to the others' parts, and says so."""
        for chunk in (*self._body, *self._header):
            _copy(chunk)
        self._hood.departures.post()


def _add(inputs: list[torch.Tensor], total: torch.Tensor) -> None:
    """The sum, in rank order; the total may be the first input."""
    torch.add(inputs[0], inputs[1], out=total)
    for each in inputs[2:]:
        total.add_(each)


def _add_weighted(inputs: list[torch.Tensor], weights: list[float], total: torch.Tensor) -> None:
    """The weighted sum, in rank order; the total may be the first input."""
    torch.mul(inputs[0], weights[0], out=total)
    for each, weight in zip(inputs[1:], weights[1:], strict=True):
        total.add_(each, alpha=weight)


def _copy(chunk: list[torch.Tensor]) -> None:
    """Gives every rank what the first has."""
    for each in chunk[1:]:
        each.copy_(chunk[0])


def _slice(numel: int, itemsize: int, index: int, count: int) -> tuple[int, int]:
    """Where one of ``count`` nearly equal slices begins and ends, on cache lines of its own."""
    line = max(1, LINE_BYTES // itemsize)
    step = -(-numel // (count * line)) * line
    return min(numel, index * step), min(numel, (index + 1) * step)


def _chunks(parts: list[torch.Tensor], begin: int, end: int, step: int) -> list[list[torch.Tensor]]:
    return [[part[at : min(at + step, end)] for part in parts] for at in range(begin, end, step)]


class SharedMemoryTransport:
    """Sums buckets in memory that all ranks share; collective to make.

    Args:
        group: The group of all ranks.
        local: The processes of this host, which are all there are, in rank order.

    Raises:
        SegmentError: On every rank, if the ranks cannot share memory.
    """

    name = "shm"
    overlaps = False

    def __init__(self, group: Group, local: list[Process]) -> None:
        self._hood = Neighbourhood(group, local)
        self._exchanges: dict[int, Exchange] = {}
        self._begun: deque[Exchange] = deque()

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, header: int = 0
    ) -> torch.Tensor:
        """A bucket in shared memory, or beside it if it is small.

        Raises:
            SegmentError: On every rank, if there is no room.
            DesyncError: On every rank, if the ranks ask for different buckets.
        """
        collectives.agree(
            {"elements": numel, "header": header, "dtype": str(dtype), "device": device.type},
            "a bucket of gradients",
            "Build the same model on every rank.",
        )
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        exchange = self._exchange(numel, dtype, header)
        self._exchanges[exchange.bucket.data_ptr()] = exchange
        return exchange.bucket

    def _exchange(self, numel: int, dtype: torch.dtype, header: int) -> Exchange:
        kind = WholeExchange if numel * dtype.itemsize <= WHOLE_BYTES else SlicedExchange
        return kind(self._hood, numel, dtype, header)

    def start(self, bucket: torch.Tensor, wait: Wait, weight: float = 1.0) -> None:
        """Lets the others have the bucket, and sums what all have by now."""
        del wait
        if bucket.numel():
            exchange = self._exchanges[bucket.data_ptr()]
            exchange.begin(weight)
            self._begun.append(exchange)
            for each in self._begun:  # in this order on every rank: signals have no names
                if not each.advance():
                    break

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits until the bucket, the oldest that is not finished, holds the sum."""
        if bucket.numel():
            self._begun.popleft().complete(wait)

    def close(self) -> None:
        """Lets go of the memory; a bucket keeps its own for as long as it is in use."""
        self._exchanges.clear()
        self._begun.clear()
