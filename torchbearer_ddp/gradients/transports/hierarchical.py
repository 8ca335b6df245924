"""Shared memory inside each host, gloo between hosts: each host sends the gradient once.

Each rank sums one slice over the ranks of its host and exchanges only that slice with the ranks
that have the same one on the other hosts, so all ranks use the network together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchbearer_ddp.gradients.transports.compression import Compression
from torchbearer_ddp.gradients.transports.hooked import HookedSum
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.gradients.transports.shared_memory import (
    Exchange,
    Piece,
    SharedMemoryTransport,
)
from torchbearer_ddp.gradients.transports.sums import Lanes, Sum
from torchbearer_ddp.gradients.transports.torch_dist import lanes_between, make_sums, piece_numel
from torchbearer_ddp.group.hosts import Hosts
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait


class HierarchicalExchange(Exchange):
    """A bucket whose slices also travel between hosts, while backward goes on."""

    def connect(self, lanes: Lanes, compression: Compression, index: int) -> None:
        """Sets the channels to the ranks that have the same slice on the other hosts."""
        self._sums = [
            _sums_of(piece, lanes, compression, f"{index}:{number}")
            for number, piece in enumerate(self._pieces)
        ]

    def commit(self) -> None:
        """Says that the last exchange counts."""
        for between_hosts in self._sums:
            for each in between_hosts:
                each.commit()

    def _piece_numel(self, dtype: torch.dtype) -> int:
        return piece_numel(dtype)

    def _sum(self) -> None:
        """Sums this host's slice, and sends each piece to the other hosts once it is ready."""
        weights = self._weights()
        for piece, between_hosts in zip(self._pieces, self._sums, strict=True):
            piece.add(weights)
            for each in between_hosts:
                each.start()
        self._summed = True

    def complete(self, wait: Wait) -> None:
        """Waits for the other hosts, then for the other slices."""
        for between_hosts in self._sums:
            for each in between_hosts:
                each.advance(wait)
        for piece, between_hosts in zip(self._pieces, self._sums, strict=True):
            for each in between_hosts:
                each.finish(wait)
            piece.copy_to_all()
        self._ranks.departures.post()
        self._ranks.departures.collect(wait)


def _sums_of(piece: Piece, lanes: Lanes, compression: Compression, key: str) -> list[Sum]:
    """The sums of a piece between hosts: numbers, in fewer bytes if so chosen, and header."""
    body = piece.body[0]
    if compression.hook is None or not body.numel():
        return make_sums(lanes, piece.whole[0], body.numel(), compression, key)
    headers: list[Sum] = [Sum(lanes.first, header) for header in piece.header[:1]]
    return [HookedSum(lanes.first, body, compression.hook), *headers]


class HierarchicalTransport(SharedMemoryTransport):
    """Sums buckets inside each host first, and then between hosts; collective to make.

    Each host has the same number of ranks. What travels between hosts may be compressed.
    """

    name = "hierarchical"
    overlaps = True
    _exchange = HierarchicalExchange
    _exchanges: Sequence[HierarchicalExchange]

    def __init__(
        self, group: Group, buckets: Sequence[Bucket], by_host: Hosts, compression: Compression
    ) -> None:
        super().__init__(group, buckets, by_host)
        if compression.feeds_back:
            compression.memory.begin(buckets)
        wait = Wait(group, "the channels between hosts")
        lanes = [
            lanes_between(group, [each.rank for each in same_slice], compression, wait)
            for same_slice in zip(*by_host, strict=True)
        ]
        for index, exchange in enumerate(self._exchanges):
            exchange.connect(lanes[self._ranks.me], compression, index)

    def commit(self) -> None:
        """Says that the last exchange counts."""
        for exchange in self._exchanges:
            exchange.commit()

    def finish(self, index: int, wait: Wait) -> None:
        """Waits until the bucket, the oldest that is not finished, holds the sum."""
        # One rank may have summed a bucket at its start, another only reaches it here. All must
        # send the same messages in one order: first whatever was started, then this.
        for each in self._begun:
            each.advance(wait)
        super().finish(index, wait)
