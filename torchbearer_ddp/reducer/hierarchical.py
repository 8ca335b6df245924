"""Shared memory inside each host, gloo between hosts: each host sends the gradient once.

Each rank sums one slice over the ranks of its host and exchanges only that slice with the ranks
that have the same one on the other hosts, so all ranks drive the network together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchbearer_ddp.process_group import Group
from torchbearer_ddp.reducer.hosts import Process
from torchbearer_ddp.reducer.shared_memory import (
    Exchange,
    Neighbourhood,
    SharedMemoryTransport,
)
from torchbearer_ddp.waiting import Wait, wait_for


class HierarchicalExchange(Exchange):
    """A bucket whose slices also travel between hosts, while backward goes on.

    Args:
        channel: Connects this rank with those of the same slice on the other hosts.
        hood: The ranks of this host.
        numel: The size of the bucket.
        dtype: Its type.
        header: How many elements at the end have no weight.
    """

    def __init__(
        self, channel: Any, hood: Neighbourhood, numel: int, dtype: torch.dtype, header: int
    ) -> None:
        super().__init__(hood, numel, dtype, header)
        self._channel = channel
        self._work: Any = None

    def _sum(self) -> None:
        """Sums this host's slice and puts it on the wire."""
        self._add_slice(hand_out=False)
        if self._total.numel():
            self._work = dist.all_reduce(self._total, group=self._channel, async_op=True)
        self._summed = True

    def complete(self, wait: Wait) -> None:
        """Waits for the other hosts, then for the other slices."""
        if not self._summed:
            self._arrivals.complete(wait)
            self._sum()
        if self._work is not None:
            wait_for(self._work, wait)
            self._work = None
        self._hand_out()
        self._departures.complete(wait)


class HierarchicalTransport(SharedMemoryTransport):
    """Sums buckets inside each host first, and then between hosts; collective to make.

    Args:
        group: The group of all ranks.
        by_host: The processes of each host, in rank order, equally many on each.
        local: Those of this host.

    Raises:
        SegmentError: On every rank, if the ranks of some host cannot share memory.
    """

    name = "hierarchical"

    def __init__(self, group: Group, by_host: list[list[Process]], local: list[Process]) -> None:
        super().__init__(group, local)
        same_slice = zip(*by_host, strict=True)
        channels = [group.among([each.rank for each in column]) for column in same_slice]
        self._channel = channels[self._hood.me]

    def _exchange(self, numel: int, dtype: torch.dtype, header: int) -> Exchange:
        return HierarchicalExchange(self._channel, self._hood, numel, dtype, header)
