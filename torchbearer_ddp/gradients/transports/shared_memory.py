"""Buckets in memory that the ranks of a host share: summed where they lie, without sockets.

Ranks that sum the same numbers in the same order get the same bits, on every rank and in every run.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass

import torch

from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients.transports.hosts import Process
from torchbearer_ddp.gradients.transports.segment import share
from torchbearer_ddp.gradients.transports.semaphores import Signals
from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait

#: What a rank sums at a time, over all ranks together: less costs more calls than it saves in the
#: cache (measured with 1 MB to 40 MB, on cores with 1 MB of their own and 32 MB together).
CACHE_BYTES = 2 * 2**20
#: A cache line: what ranks write by turns begins on one of its own.
LINE_BYTES = 64


class _Stamp(ctypes.Structure):
    """In front of a rank's numbers: which round they belong to, and what they weigh."""

    _fields_ = (("round", ctypes.c_int64), ("weight", ctypes.c_double))
    round: int
    weight: float


class LocalRanks:
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
                    f"Rank {self.local[index].rank} is at a different exchange than rank "
                    f"{self.local[self.me].rank}: this bucket's round is {stamp.round} there and "
                    f"{number} here. Every rank must take the same steps: look for a loop, a stop "
                    "or a callback that only some ranks have."
                )
        return [stamp.weight for stamp in stamps]


class PendingPeers:
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


class Exchange:
    """A bucket that lies in shared memory, and of which every rank sums one slice for all.

    Two meetings guard it: nobody sums before all have arrived, and nobody reads the sum before all
    slices are there. (A small bucket could do with one, if every rank summed all of it; in steps of
    half a millisecond the difference was lost in the noise.)

    Args:
        local_ranks: The ranks of this host.
        numel: The size of the bucket.
        dtype: Its type.
        header: How many elements at the end have no weight.
    """

    def __init__(
        self, local_ranks: LocalRanks, numel: int, dtype: torch.dtype, header: int
    ) -> None:
        segment = share(local_ranks.local, LINE_BYTES + numel * dtype.itemsize)
        parts = [segment.tensor(p, LINE_BYTES, numel, dtype) for p in range(local_ranks.size)]
        self.bucket = parts[local_ranks.me]
        self._local_ranks = local_ranks
        self._stamps = [segment.place(p, 0, _Stamp) for p in range(local_ranks.size)]
        begin, end = _slice(numel, dtype.itemsize, local_ranks.me, local_ranks.size)
        self._pieces = _pieces(parts, begin, end, numel - header, self._piece_numel(dtype))
        self._arrivals = PendingPeers(local_ranks.arrivals)
        self._departures = PendingPeers(local_ranks.departures)
        self._round = 0
        self._summed = True

    def begin(self, weight: float) -> None:
        """Says that the numbers are in place."""
        self._round += 1
        stamp = self._stamps[self._local_ranks.me]
        stamp.round, stamp.weight = self._round, weight
        self._local_ranks.arrivals.post()
        self._arrivals.begin()
        self._departures.begin()
        self._summed = False

    def advance(self) -> bool:
        """Sums this rank's slice if all have arrived: the sooner, the more is in the cache."""
        if not self._summed and self._arrivals.advance():
            self._sum()
        return self._summed

    def join(self, wait: Wait) -> None:
        """Sums this rank's slice as soon as all have arrived."""
        if not self._summed:
            self._arrivals.complete(wait)
            self._sum()

    def complete(self, wait: Wait) -> None:
        """Waits for the others' slices."""
        self.join(wait)
        self._departures.complete(wait)

    def _piece_numel(self, dtype: torch.dtype) -> int:
        """How much is summed at a time."""
        return max(1, CACHE_BYTES // (self._local_ranks.size * dtype.itemsize))

    def _sum(self) -> None:
        """Sums this rank's slice and gives it to all."""
        weights = self._local_ranks.weights(self._stamps, self._round)
        for piece in self._pieces:
            piece.add(weights)
            piece.hand_out()
        self._local_ranks.departures.post()
        self._summed = True


@dataclass
class Piece:
    """What is summed at a time: the same numbers in every rank's part.

    Args:
        whole: All of it, by rank.
        body: Without the header, which has no weight.
        header: The header alone.
    """

    whole: list[torch.Tensor]
    body: list[torch.Tensor]
    header: list[torch.Tensor]

    def add(self, weights: list[float]) -> None:
        """The weighted sum, in rank order, in the place of the first."""
        if all(weight == 1.0 for weight in weights):
            _add(self.whole)
            return
        total = self.body[0].mul_(weights[0])
        for each, weight in zip(self.body[1:], weights[1:], strict=True):
            total.add_(each, alpha=weight)
        if self.header[0].numel():
            _add(self.header)

    def hand_out(self) -> None:
        """Gives every rank what the first has."""
        for each in self.whole[1:]:
            each.copy_(self.whole[0])


def _add(tensors: list[torch.Tensor]) -> None:
    total = tensors[0]
    for each in tensors[1:]:
        total.add_(each)


def _pieces(parts: list[torch.Tensor], begin: int, end: int, header: int, step: int) -> list[Piece]:
    """Cuts a slice of every part into pieces; the last one carries what it has of the header."""
    body = min(max(begin, header), end)
    if begin == end:
        return []
    ends = [*range(begin + step, body, step), end]
    return [
        Piece(
            [part[first:last] for part in parts],
            [part[first : min(last, body)] for part in parts],
            [part[min(last, body) : last] for part in parts],
        )
        for first, last in zip([begin, *ends], ends, strict=False)
    ]


def _slice(numel: int, itemsize: int, index: int, count: int) -> tuple[int, int]:
    """Where one of ``count`` nearly equal slices begins and ends, on cache lines of its own."""
    line = max(1, LINE_BYTES // itemsize)
    step = -(-numel // (count * line)) * line
    return min(numel, index * step), min(numel, (index + 1) * step)


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
    #: The numbers pass through the core's cache anyway.
    applies_weight = True
    #: One bucket is summed while the next is filled, and both fit the cache.
    bucket_bytes = 4 * 2**20

    def __init__(self, group: Group, local: list[Process]) -> None:
        self._local_ranks = LocalRanks(group, local)
        self._exchanges: dict[int, Exchange] = {}
        self._begun: deque[Exchange] = deque()

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, header: int = 0
    ) -> torch.Tensor:
        """A bucket in shared memory.

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
        return Exchange(self._local_ranks, numel, dtype, header)

    def start(self, bucket: torch.Tensor, weight: float = 1.0) -> None:
        """Lets the others have the bucket, and sums what all have by now."""
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
