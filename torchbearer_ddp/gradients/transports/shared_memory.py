"""Buckets in memory that the ranks of a host share: summed in place, without sockets.

Ranks that sum the same numbers in the same order get the same bits, on every rank and in every run.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchbearer_ddp.errors import DesyncError, DistributedError
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.hosts import Hosts, Process
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.segment import LINE_BYTES, Segment
from torchbearer_ddp.group.semaphores import Signals
from torchbearer_ddp.group.waiting import Wait

#: What a rank sums at a time, over all ranks together: less costs more calls than it saves in the
#: cache (measured with 1 MB to 40 MB, on cores with 1 MB of their own and 32 MB together).
CACHE_BYTES = 2 * 2**20
#: The most elements that torch never shares out between threads.
ONE_THREAD_NUMEL = 2**15 - 1


class SegmentError(DistributedError):
    """The ranks of a host cannot share memory; the same message on every rank of the world."""


class LocalRanks:
    """The ranks of this host, the memory they share, and the signals between them."""

    def __init__(self, group: Group, local: list[Process], part_bytes: int) -> None:
        self.group = group
        self.local = local
        self.size = len(local)
        self.me = [process.rank for process in local].index(group.member.rank)
        # A launcher may have bound each rank to cores of its own.
        cores = set().union(*(os.sched_getaffinity(process.pid) for process in local))
        self.are_crowded = self.size * torch.get_num_threads() > len(cores)
        signal_bytes = LINE_BYTES * self.size
        #: Where the part of a rank has room for the buckets.
        self.offset = 2 * signal_bytes
        self.segment = Segment(local[0], self.me, self.size, self.offset + part_bytes)
        #: A rank's numbers are in place.
        self.arrivals = Signals(self.segment, 0, local, self.me)
        #: A rank has summed its slice.
        self.departures = Signals(self.segment, signal_bytes, local, self.me)


class Exchange:
    """A bucket in shared memory, of which every rank sums one slice for all.

    No rank sums before all numbers are in place, and none reads the sum before all slices are
    summed. (A small bucket could do with one signal, if every rank summed all of it; in steps of
    half a millisecond the difference was lost in the noise.)
    """

    def __init__(self, ranks: LocalRanks, bucket: Bucket, offset: int) -> None:
        self._ranks = ranks
        #: In front of each rank's numbers: the round they belong to, and their weight.
        # Memory and not tensors: a fraction of the time for two numbers.
        self._stamps: list[Any] = [
            memoryview(stamp.numpy())  # type: ignore[arg-type]
            for stamp in ranks.segment.tensors(offset, 2, torch.float64)
        ]
        # An empty bucket too has a place: torch makes no tensor over no memory.
        parts = ranks.segment.tensors(offset + LINE_BYTES, max(1, bucket.size), bucket.dtype)
        self.tensor = parts[ranks.me][: bucket.size]
        begin, end = _slice(bucket.size, bucket.dtype.itemsize, ranks.me, ranks.size)
        self._pieces = _pieces(parts, begin, end, bucket.numel, self._piece_numel(bucket.dtype))
        self._round = 0
        self._summed = True

    @staticmethod
    def part_bytes(bucket: Bucket) -> int:
        """The room in each rank's part: the stamp and the numbers, on cache lines of their own."""
        lines = -(-max(1, bucket.size) * bucket.dtype.itemsize // LINE_BYTES)
        return (1 + lines) * LINE_BYTES

    def begin(self, weight: float) -> None:
        """Signals that this rank's numbers are in place."""
        self._round += 1
        stamp = self._stamps[self._ranks.me]
        stamp[0], stamp[1] = self._round, weight
        self._ranks.arrivals.post()
        self._summed = False

    def advance(self, wait: Wait | None = None) -> bool:
        """Sums this rank's slice if the numbers of all ranks are in place, or waits for them.

        Without a wait it returns False if some are missing. The sooner, the more is in the cache.
        """
        if not self._summed and self._ranks.arrivals.collect(wait):
            self._sum()
        return self._summed

    def complete(self, wait: Wait) -> None:
        """Waits for the other ranks' slices."""
        self.try_complete(wait)

    def try_complete(self, wait: Wait | None) -> bool:
        """The same, or False where it would have to wait and must not."""
        return self.advance(wait) and self._ranks.departures.collect(wait)

    def _piece_numel(self, dtype: torch.dtype) -> int:
        """How many elements are summed at a time."""
        numel = max(1, CACHE_BYTES // (self._ranks.size * dtype.itemsize))
        # With more threads than cores, an operation of several threads waits for one that has no
        # core: for the scheduler, a thousand times as long as the sum takes.
        return min(numel, ONE_THREAD_NUMEL) if self._ranks.are_crowded else numel

    def _weights(self) -> Sequence[float]:
        """The weight of each rank's numbers.

        Raises:
            DesyncError: If another rank began another bucket, or another round of this one.
        """
        rounds = [stamp[0] for stamp in self._stamps]
        if rounds.count(self._round) != len(rounds):
            group = self._ranks.group
            group.broken = True
            process, number = next(
                (process, number)
                for process, number in zip(self._ranks.local, rounds, strict=True)
                if number != self._round
            )
            raise DesyncError(
                f"Rank {process.rank} is at a different exchange than rank "
                f"{group.member.rank}: this bucket's round is {number:.0f} there and "
                f"{self._round} here. Every rank must take the same steps: look for a loop, a "
                "stop or a callback that only some ranks have."
            )
        return [stamp[1] for stamp in self._stamps]

    def _sum(self) -> None:
        """Sums this rank's slice and copies it to all."""
        weights = self._weights()
        for piece in self._pieces:
            piece.add(weights)
            piece.copy_to_all()
        self._ranks.departures.post()
        self._summed = True


@dataclass
class Piece:
    """What is summed at a time: the same elements in every rank's part, by rank.

    Attributes:
        whole: All of it.
        body: Without the header, which has no weight.
        header: The header alone; no tensors where the piece has none of it.
    """

    whole: list[torch.Tensor]
    body: list[torch.Tensor]
    header: list[torch.Tensor]

    def add(self, weights: Sequence[float]) -> None:
        """Puts the weighted sum, in rank order, in the place of the first."""
        if weights.count(1.0) == len(weights):
            _add(self.whole)
            return
        total = self.body[0]
        if weights[0] != 1.0:
            total.mul_(weights[0])
        for each, weight in zip(self.body[1:], weights[1:], strict=True):
            if weight:
                total.add_(each, alpha=weight)
        _add(self.header)

    def copy_to_all(self) -> None:
        """Copies the first to all others."""
        for each in self.whole[1:]:
            each.copy_(self.whole[0])


def _add(tensors: list[torch.Tensor]) -> None:
    for each in tensors[1:]:
        tensors[0].add_(each)


def _pieces(parts: list[torch.Tensor], begin: int, end: int, header: int, step: int) -> list[Piece]:
    """Cuts a slice of every part into pieces; the last one carries what it has of the header."""
    body = min(max(begin, header), end)
    ends = [*range(begin + step, body, step), end] if begin < end else []
    pieces = []
    for first, last in zip([begin, *ends], ends, strict=False):
        middle = min(last, body)
        whole, before, after = (
            [part[a:b] for part in parts]
            for a, b in ((first, last), (first, middle), (middle, last))
        )
        pieces.append(Piece(whole, before, after if middle < last else []))
    return pieces


def _slice(numel: int, itemsize: int, index: int, count: int) -> tuple[int, int]:
    """Where one of ``count`` nearly equal slices begins and ends, on cache lines of its own."""
    line = max(1, LINE_BYTES // itemsize)
    step = -(-numel // (count * line)) * line
    return min(numel, index * step), min(numel, (index + 1) * step)


class SharedMemoryTransport:
    """Sums buckets in one segment of memory that the ranks of a host share; collective to make.

    Raises:
        SegmentError: On every rank, if the ranks of some host cannot share that much memory.
    """

    name = "shm"
    overlaps = False
    #: The numbers pass through the core's cache anyway.
    applies_weight = True
    _exchange: type[Exchange] = Exchange

    def __init__(self, group: Group, buckets: Sequence[Bucket], by_host: Hosts) -> None:
        for owner, *_ in by_host:
            if owner.problem:
                raise SegmentError(f"rank {owner.rank} {owner.problem}")
        local = next(local for local in by_host if group.member.rank in [p.rank for p in local])
        sizes = [Exchange.part_bytes(bucket) for bucket in buckets]
        problem = None
        try:
            self._ranks = LocalRanks(group, local, sum(sizes))
        except OSError as error:
            problem = f"cannot share memory with rank {local[0].rank}: {error}"
        # After this no rank posts a signal that another has not made yet, and the rank that offers
        # the memory may close it.
        for rank, found in enumerate(collectives.all_gather(problem, "the shared memory")):
            if found is not None:
                raise SegmentError(f"rank {rank} {found}")
        offsets = itertools.accumulate(sizes, initial=self._ranks.offset)
        self._exchanges: Sequence[Exchange] = [
            self._exchange(self._ranks, bucket, offset)
            for bucket, offset in zip(buckets, offsets, strict=False)
        ]
        self.tensors = [exchange.tensor for exchange in self._exchanges]
        self._begun: deque[Exchange] = deque()

    def start(self, index: int, weight: float = 1.0) -> None:
        """Gives the bucket to the other ranks, and sums what all have given so far."""
        exchange = self._exchanges[index]
        exchange.begin(weight)
        self._begun.append(exchange)
        for each in self._begun:  # in this order on every rank: signals have no names
            if not each.advance():
                break

    def finish(self, index: int, wait: Wait) -> None:
        """Waits until the bucket, the oldest that is not finished, holds the sum."""
        self._begun.popleft().complete(wait)

    def commit(self) -> None:
        """Nothing is lost that the next exchange could add."""
