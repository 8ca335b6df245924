"""Which rank this process is, and the group it belongs to."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

# torch.distributed exports these names as well, but its type hints lack them.
from torch._C._distributed_c10d import PrefixStore, Store

from torchbearer_ddp import log
from torchbearer_ddp.group.network import interface_of, loopback, route_to
from torchbearer_ddp.group.rendezvous import own_connection

DEFAULT_TIMEOUT = 300.0
#: The first step may compile, download or fill caches, so it may take this many timeouts.
FIRST_STEP_TIMEOUTS = 4


@dataclass(frozen=True)
class Member:
    """One rank of a run.

    Attributes:
        local_rank: The rank on this host; -1 until the roll call has found it.
        local_world_size: The number of ranks on this host; likewise.
        device: The device this rank computes on; plain ``cuda`` until the local rank is known.
        backend: torch.distributed's name of the backend.
        timeout: Seconds that any wait for other ranks may take.
        seed: The base seed, or None for the one in force on rank zero.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: str = "cpu"
    backend: str = "gloo"
    timeout: float = DEFAULT_TIMEOUT
    seed: int | None = None


@dataclass
class Group:
    """The group that this process has joined."""

    member: Member
    store: Store
    hosts: list[str]
    serves_store: bool = False
    #: The store's address, if it is known: gloo uses the network interface that leads there.
    address: str | None = None
    #: True once the first gradients were exchanged: from then on the plain timeout applies.
    past_first_step: bool = False
    #: True once a wait has failed: messages may be pending that no rank will receive.
    broken: bool = False
    #: The number of runs, evaluations and predictions begun so far.
    runs: int = 0
    #: The number of exchanges so far, equal on ranks that are in step.
    sequence: int = 0
    #: Channels that were made, by their ranks and purpose: each has threads and sockets.
    _channels: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    #: Channels with messages that no rank will receive; their memory must not be freed.
    _abandoned: list[Any] = field(default_factory=list, repr=False)

    def make_channels(self) -> tuple[Any, Any]:
        """The channels for small values and for gradients; collective the first time."""
        return self.channel_between(purpose="control"), self.channel_between(backend=None)

    def channel_between(
        self,
        ranks: list[int] | None = None,
        backend: str | None = "gloo",
        purpose: str = "gradients",
    ) -> Any:
        """The channel of some ranks, or of all; the first time collective, also for other ranks."""
        key = (purpose, backend, *(ranks or ()))
        if key not in self._channels:
            timeout = datetime.timedelta(seconds=transport_timeout(self.member.timeout))
            with gloo_interface(self.address):
                self._channels[key] = dist.new_group(ranks, backend=backend, timeout=timeout)
        return self._channels[key]

    def abandon_gradients(self) -> None:
        """Lets new channels be made for gradients: messages are left in those there are."""
        for key in [key for key in self._channels if key[0] == "gradients"]:
            self._abandoned.append(self._channels.pop(key))

    @property
    def control(self) -> Any:
        """The channel of small values, always on gloo and the CPU."""
        return self.make_channels()[0]

    @property
    def gradients(self) -> Any:
        """The channel of gradients, separate so that no other message can be taken for one."""
        return self.make_channels()[1]


class _Membership:
    """The group of this process, or its member in a run of one rank, which needs no group."""

    group: Group | None = None
    single: Member | None = None


def current() -> Group | None:
    """The group this process has joined, or the user's own process group of torch."""
    if _Membership.group is None and dist.is_available() and dist.is_initialized():
        set_current(_adopt())
    return _Membership.group


def single() -> Member | None:
    """The member of this process in a run of one rank, or None."""
    return _Membership.single


def set_current(group: Group | None, single: Member | None = None) -> Group | None:
    """Replaces the group of this process, and returns the previous one."""
    previous = _Membership.group
    _Membership.group, _Membership.single = group, single
    # After the run this process keeps its rank in the log: its last lines are about that run.
    if member := group.member if group else single:
        log.set_rank(member.rank)
    return previous


def _adopt() -> Group:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    member = Member(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        backend=dist.get_backend(),
    )
    store = PrefixStore("torchbearer_ddp", dist.distributed_c10d._get_default_store())
    return Group(member, own_connection(store), hosts=["?"] * world_size)


def transport_timeout(timeout: float) -> float:
    """The transport's own timeout, in seconds; our waits end before it."""
    return FIRST_STEP_TIMEOUTS * timeout + 60


@contextlib.contextmanager
def gloo_interface(host: str | None) -> Iterator[None]:
    """Makes gloo use the interface that leads to the store, which is loopback on a single host.

    Otherwise gloo takes the interface that the host's name resolves to, which may be another one.
    """
    name = "GLOO_SOCKET_IFNAME"
    interface = None
    if host is not None and name not in os.environ:
        interface = interface_of(loopback(host) or route_to(host))
    if interface:
        os.environ[name] = interface
    try:
        yield
    finally:
        if interface:
            os.environ.pop(name, None)
