"""The store in which the ranks of a launch meet, as far as their launcher has to do with it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import descriptors, rendezvous, waiting
from torchbearer_ddp.launch import fork_safety
from torchbearer_ddp.launch.plan import Plan

#: How long a launcher tries to record in the store of another host why its rank died.
_PUBLISH_SECONDS = 2.0


class Meeting:
    """The store of a plan, which this process holds if the plan says so.

    Its port is open at once. The store itself has threads, so it begins when the ranks are started:
    a process with threads cannot be forked.
    """

    def __init__(self, plan: Plan) -> None:
        self._wanted = plan
        self._store: Any = None
        self._open()

    def _open(self) -> None:
        self.plan, wanted, self._port = self._wanted, self._wanted, None
        if wanted.serve:
            descriptors.allow(wanted.member.world_size, holds_store=True)
            self._port = rendezvous.OpenPort(wanted.host, wanted.ports[0])
            self.plan = dataclasses.replace(wanted, ports=(self._port.port,))

    def renew(self) -> None:
        """Ends the store of an attempt that has failed, and opens a port for the next."""
        self._store = None
        self._open()

    def descriptors(self) -> list[int]:
        """The descriptors that belong to the store alone."""
        return self._port.descriptors() if self._port else []

    def begin(self) -> None:
        """Lets the store answer the ranks, which are started now."""
        if self._port is not None and self._store is None:
            with fork_safety.store_begins():
                self._store = self._port.serve(self.plan.member.timeout)

    def publish_failure(self, prefix: str, rank: int, text: str) -> None:
        """Records why a rank died, for ranks on other hosts."""
        with contextlib.suppress(LaunchError):  # the store's host is gone, and so are its ranks
            port = self.plan.ports[0]
            store = self._store or rendezvous.connect(self.plan.host, port, _PUBLISH_SECONDS)
            waiting.record_failure(rendezvous.run_store(store, prefix), rank, text)

    def await_departures(self, seconds: float) -> None:
        """Keeps the store for ranks of other hosts until they have left it, or so long."""
        member = self.plan.member
        if self._store is not None and member.world_size > member.local_world_size:
            store = rendezvous.run_store(self._store, self.plan.prefix)
            rendezvous.await_departures(store, member.world_size, seconds)
