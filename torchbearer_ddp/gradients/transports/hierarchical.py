"""Shared memory inside each host, gloo between hosts: each host sends the gradient once.

Each rank sums one slice over the ranks of its host and exchanges only that slice with the ranks
that have the same one on the other hosts, so all ranks drive the network together.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from torchbearer_ddp.gradients.transports import sums
from torchbearer_ddp.gradients.transports.hosts import Process
from torchbearer_ddp.gradients.transports.shared_memory import (
    Exchange,
    LocalRanks,
    SharedMemoryTransport,
)
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait, complete


class HierarchicalExchange(Exchange):
    """A bucket whose slices also travel between hosts, while backward goes on.

    Args:
        local_ranks: The ranks of this host.
        numel: The size of the bucket.
        dtype: Its type.
        header: How many elements at the end have no weight.
        channel: Connects this rank with those of the same slice on the other hosts.
        compress: What travels between hosts instead of single precision, or None.
    """

    def __init__(
        self,
        local_ranks: LocalRanks,
        numel: int,
        dtype: torch.dtype,
        header: int,
        channel: Any,
        compress: str | None,
    ) -> None:
        super().__init__(local_ranks, numel, dtype, header)
        self._ways = [
            sums.make(channel, piece.whole[0], piece.header[0].numel(), compress)
            for piece in self._pieces
        ]

    def _piece_numel(self, dtype: torch.dtype) -> int:
        return sums.piece_numel(dtype)

    def _sum(self) -> None:
        """Sums this host's slice, putting each piece on the wire as soon as it is ready."""
        weights = self._local_ranks.weights(self._stamps, self._round)
        for piece, ways in zip(self._pieces, self._ways, strict=True):
            piece.add(weights)
            for way in ways:
                way.start()
        self._summed = True

    def complete(self, wait: Wait) -> None:
        """Waits for the other hosts, then for the other slices."""
        for ways in self._ways:
            for way in ways:
                way.turn(wait)
        for piece, ways in zip(self._pieces, self._ways, strict=True):
            for way in ways:
                way.finish(wait)
            piece.hand_out()
        self._local_ranks.departures.post()
        self._departures.complete(wait)


class HierarchicalTransport(SharedMemoryTransport):
    """Sums buckets inside each host first, and then between hosts; collective to make.

    Args:
        group: The group of all ranks.
        by_host: The processes of each host, in rank order, equally many on each.
        local: Those of this host.
        compress: What travels between hosts instead of single precision, or None.

    Raises:
        SegmentError: On every rank, if the ranks of some host cannot share memory.
    """

    name = "hierarchical"
    overlaps = True

    def __init__(
        self,
        group: Group,
        by_host: list[list[Process]],
        local: list[Process],
        compress: str | None = None,
    ) -> None:
        super().__init__(group, local)
        same_slice = zip(*by_host, strict=True)
        wait = Wait(group, "the channels between hosts")
        channels = [
            complete(partial(group.channel_between, [each.rank for each in column]), wait)
            for column in same_slice
        ]
        self._channel = channels[self._local_ranks.me]
        self._compress = compress

    def _exchange(self, numel: int, dtype: torch.dtype, header: int) -> Exchange:
        return HierarchicalExchange(
            self._local_ranks, numel, dtype, header, self._channel, self._compress
        )

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits until the bucket, the oldest that is not finished, holds the sum."""
        # One rank may have summed a bucket at its start, another only comes to it here. All must
        # put the same messages on the wire in one order: first whatever was started, then this.
        for each in self._begun:
            each.join(wait)
        super().finish(bucket, wait)
