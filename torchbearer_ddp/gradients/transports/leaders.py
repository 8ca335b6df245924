"""Shared memory inside each host, a communication hook between one rank of each host.

A hook that works on whole matrices, such as PowerSGD, cannot be given a slice. So the first rank of
each host gets the host's sum, averages it over the hosts, and gives the result to its host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from torchbearer_ddp.gradients.transports.compression import Compression
from torchbearer_ddp.gradients.transports.hooked import HookedBuckets, hook_for
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.gradients.transports.shared_memory import SharedMemoryTransport
from torchbearer_ddp.group.hosts import Hosts
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait, complete


class LeaderTransport(SharedMemoryTransport):
    """Sums buckets inside each host, and lets the first rank of each average them; collective."""

    name = "hierarchical"
    overlaps = True

    def __init__(
        self, group: Group, buckets: Sequence[Bucket], by_host: Hosts, compression: Compression
    ) -> None:
        super().__init__(group, buckets, by_host)
        self._hosts = len(by_host)
        self._leads = self._ranks.me == 0
        self._headers = [t[b.numel :] for t, b in zip(self.tensors, buckets, strict=True)]
        #: Buckets of which this host's sum is not complete, in their order.
        self._summing: deque[int] = deque()
        leaders = [local[0].rank for local in by_host]
        wait = Wait(group, "the channels between hosts")
        channel = complete(partial(group.channel_between, leaders), wait)
        hook, state = hook_for(compression, group, leaders)
        if self._leads:
            compression.memory.begin(buckets, state)
            self._hooked = HookedBuckets(buckets, self.tensors, lambda _: channel, hook, state)

    def start(self, index: int, weight: float = 1.0) -> None:
        """Gives the bucket to the other ranks of the host."""
        # The hook makes a mean over the hosts of what is to be added up over them.
        self._exchanges[index].begin(weight * self._hosts)
        self._summing.append(index)
        self._sum_inside(None)

    def finish(self, index: int, wait: Wait) -> None:
        """Waits for the other hosts."""
        # What was started inside the host first: signals have no names, so all ranks need one
        # order of them.
        self._sum_inside(wait)
        exchange = self._exchanges[index]
        if self._leads:
            self._hooked.finish(index, wait)
        else:
            self._headers[index].zero_()
        exchange.begin(1.0 if self._leads else 0.0)
        exchange.complete(wait)

    def _sum_inside(self, wait: Wait | None) -> None:
        """Completes the sums of this host as far as possible, or all; the leader passes them on."""
        while self._summing:
            if not self._exchanges[self._summing[0]].try_complete(wait):
                return
            index = self._summing.popleft()
            if self._leads:
                self._hooked.start(index)
        if self._leads:
            self._hooked.calls.advance()
