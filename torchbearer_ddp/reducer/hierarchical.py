"""Shared memory inside each host, gloo between hosts: each host sends the gradient once.

Each rank sums one slice over the ranks of its host and exchanges only that slice with the ranks
that have the same one on the other hosts, so all ranks drive the network together.
"""

from __future__ import annotations

from typing import Any

import torch

from torchbearer_ddp.process_group import Group
from torchbearer_ddp.reducer import sums
from torchbearer_ddp.reducer.hosts import Process
from torchbearer_ddp.reducer.shared_memory import Exchange, Neighbourhood, SharedMemoryTransport
from torchbearer_ddp.waiting import Wait


class HierarchicalExchange(Exchange):
    """A bucket whose slices also travel between hosts, while backward goes on.

    Args:
        hood: The ranks of this host.
        numel: The size of the bucket.
        dtype: Its type.
        header: How many elements at the end have no weight.
        channel: Connects this rank with those of the same slice on the other hosts.
        compress: What travels between hosts instead of single precision, or None.
    """

    def __init__(
        self,
        hood: Neighbourhood,
        numel: int,
        dtype: torch.dtype,
        header: int,
        channel: Any,
        compress: str | None,
    ) -> None:
        super().__init__(hood, numel, dtype, header)
        self._between: sums.Sum | None = None
        if self._slice.numel():  # a small bucket has no slice for some ranks
            self._between = sums.make(channel, self._slice, self._slice_header, compress)

    def _sum(self) -> None:
        """Sums this host's slice and puts it on the wire."""
        self._add_slice(hand_out=False)
        if self._between is not None:
            self._between.start()
        self._summed = True

    def complete(self, wait: Wait) -> None:
        """Waits for the other hosts, then for the other slices."""
        if self._between is not None:
            self._between.finish(wait)
        self._hand_out()
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
    bucket_bytes = 25 * 2**20

    def __init__(
        self,
        group: Group,
        by_host: list[list[Process]],
        local: list[Process],
        compress: str | None = None,
    ) -> None:
        super().__init__(group, local)
        same_slice = zip(*by_host, strict=True)
        channels = [group.among([each.rank for each in column]) for column in same_slice]
        self._channel = channels[self._hood.me]
        self._compress = compress

    def _exchange(self, numel: int, dtype: torch.dtype, header: int) -> Exchange:
        return HierarchicalExchange(self._hood, numel, dtype, header, self._channel, self._compress)

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits until the bucket, the oldest that is not finished, holds the sum."""
        # One rank may have summed a bucket at its start, another only comes to it here. All must
        # put the same messages on the wire in one order: first whatever was started, then this.
        for each in self._begun:
            each.join(wait)
        super().finish(bucket, wait)
