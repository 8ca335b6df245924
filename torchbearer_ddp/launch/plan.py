"""The plan of a launch: which ranks to start, where, and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torchbearer_ddp.group.membership import Member

DEFAULT_GRACE = 30.0
#: More ranks than any run has.
MOST_RANKS = 10**6


@dataclass(frozen=True)
class Plan:
    """What is to be started, and why.

    Attributes:
        launcher: The launcher that was chosen; never ``auto``.
        reason: Why it was chosen.
        member: The rank that this process is, or the first of those that it starts.
        host: The address of the store.
        ports: The store is on the first of these that is free; 0 is any free one.
        serve: True if this process holds the store.
        prefix: Separates this run from others on the same store.
        grace: Seconds that ranks have to end by themselves after a signal.
        debug: True if ranks report where they are, see :mod:`torchbearer_ddp.group.debug`.
        slurm: The flags of a submission.
        log_dir: The folder of a log file for each rank, or None.
        tee: True to show every line with the number of its rank, also without a terminal.
        quiet_ranks: True to show rank zero only.
        max_restarts: How often the ranks start again after a failure.
        debug_rank: The rank whose ``breakpoint()`` has the terminal.
    """

    launcher: str = "inline"
    reason: str = ""
    member: Member = field(default_factory=Member)
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)
    serve: bool = True
    prefix: str = "run"
    grace: float = DEFAULT_GRACE
    debug: bool = False
    slurm: dict[str, Any] = field(default_factory=dict)
    log_dir: str | None = None
    tee: bool = False
    quiet_ranks: bool = False
    max_restarts: int = 0
    debug_rank: int = 0

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Plan:
        """The plan of which :func:`dataclasses.asdict` made these fields."""
        return cls(**{**fields, "member": Member(**fields["member"])})

    def with_member(self, **changes: Any) -> Plan:
        """The same plan with some fields of its member changed."""
        return dataclasses.replace(self, member=dataclasses.replace(self.member, **changes))

    def member_at(self, index: int) -> Member:
        """The ``index``-th of the ranks that are started here."""
        return dataclasses.replace(
            self.member, rank=self.member.rank + index, local_rank=self.member.local_rank + index
        )

    def describe(self, threads: int) -> str:
        """The line that rank zero shows; ``threads`` are the CPU threads of each rank."""
        world_size, device = self.member.world_size, self.member.device
        if world_size == 1:
            ranks, how = "1 process", f"on {device}"
        else:
            one_host = world_size == self.member.local_world_size
            place = " on this host" if one_host else f", rendezvous at {self.host}:{self.ports[0]}"
            ranks, how = f"{world_size} ranks{place}", f"{self.member.backend} on {device}"
        share = f", {threads} thread{'s' * (threads > 1)}{' each' * (world_size > 1)}"
        # The share of each rank is only known here if the ranks on this host are.
        return f"{ranks} ({self.reason}), {how}{share * (self.member.local_rank >= 0)}"
