"""Which rank this process is, and the group it belongs to."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

# torch.distributed exports these names as well, but its type hints lack them.
from torch._C._distributed_c10d import PrefixStore, Store

from torchbearer_ddp import checked, log
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import device_backend, launcher, own_device
from torchbearer_ddp.group.network import quiet_gloo
from torchbearer_ddp.group.rendezvous import count, own_connection
from torchbearer_ddp.log import logger

DEFAULT_TIMEOUT = 300.0
#: The first step may compile, download or fill caches, so it may take this many timeouts.
FIRST_STEP_TIMEOUTS = 4
#: So long a rank may be held in a debugger, where its launcher has a terminal.
_DEBUGGER_SECONDS = 7 * 24 * 3600.0


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
    #: The store's address; None in a group that the user made.
    address: str | None = None
    #: True once the first gradients were exchanged: from then on the plain timeout applies.
    past_first_step: bool = False
    #: True once a wait has failed: messages may be pending that no rank will receive.
    broken: bool = False
    #: The number of runs, evaluations and predictions begun so far.
    runs: int = 0
    #: The number of exchanges so far, equal on ranks that are in step.
    sequence: int = 0
    #: True once it is decided what small messages go through.
    is_open: bool = False
    #: What they go through where all ranks are on one host and share memory; else None: gloo.
    host_channel: Any = field(default=None, repr=False)
    #: True once every rank has an entry on the board, see :func:`board.read`.
    board_is_complete: bool = False
    #: Where ranks count that have made the newest channel; None before the first.
    newest_channel: str | None = None
    #: The process that has joined: one that it forks inherits the group, but is not the rank.
    pid: int = field(default_factory=os.getpid, repr=False)
    _made: int = field(default=0, repr=False)
    #: torch's process group that this group uses.
    torch_group: Any = field(default=None, repr=False)
    _channels: tuple[Any, Any] | None = field(default=None, repr=False)
    _is_connected: bool = field(default=False, repr=False)
    #: Channels of some ranks that were made, by their lane and ranks: each has threads and sockets.
    _between: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)
    #: Channels with messages that no rank will receive; their memory must not be freed.
    _abandoned: list[Any] = field(default_factory=list, repr=False)

    @property
    def has_channels(self) -> bool:
        """True once the channels were made."""
        return self._channels is not None

    def make_channels(self) -> tuple[Any, Any]:
        """The channels for small values and for gradients; collective the first time."""
        if self._channels is None:
            self._channels = self._make_channel(), self._make_channel(backend=None)
        return self._channels

    def connect_devices(self, deadline: float | None = None) -> None:
        """Connects the devices of all ranks, unless they are; collective the first time.

        Raises:
            LaunchError: On every rank, if that fails, or takes longer than the timeout.
        """
        if not self._is_connected:
            member, channel = self.member, self.make_channels()[1]
            deadline = deadline or time.monotonic() + member.timeout
            where = (member.rank, member.device, self.store)
            device_backend.connect(channel, *where, deadline, member.timeout)
            self._is_connected = True

    def channel_between(self, ranks: list[int], lane: int = 0) -> Any:
        """The channel of some ranks; the first time collective, also for ranks not in it.

        Ranks may have several, each a lane with an order of messages of its own.
        """
        key = (lane, *ranks)
        if key not in self._between:
            self._between[key] = self._make_channel(ranks)
        return self._between[key]

    def renew_gradients(self) -> None:
        """Makes a new channel for gradients, as messages are left in the old one; collective."""
        control, gradients = self.make_channels()
        self._abandoned += [gradients, *self._between.values()]
        self._between.clear()
        self._channels = control, self._make_channel(backend=None)
        self._is_connected = False
        self.connect_devices()

    def close_channels(self) -> None:
        """Closes the channels on gloo, once their threads have put down what they last carried."""
        made = [*(self._channels or ()), *self._between.values(), *self._abandoned]
        self._channels = None
        self._between.clear()
        self._abandoned.clear()
        if dist.is_initialized() and self.torch_group is dist.group.WORLD:
            own = [each for each in made if each != dist.GroupMember.NON_GROUP_MEMBER]
            for channel in own:
                if dist.get_backend(channel) == "gloo":
                    dist.destroy_process_group(channel)
        else:  # the user has destroyed it, and only these references keep its threads
            self.torch_group = None

    def _make_channel(self, ranks: list[int] | None = None, backend: str | None = "gloo") -> Any:
        timeout = datetime.timedelta(seconds=transport_timeout(self.member.timeout))
        with quiet_gloo():
            made = dist.new_group(ranks, backend=backend, timeout=timeout)
        # Other ranks may still be connecting: none may close before all have.
        self._made += 1
        self.newest_channel = f"connected/{self._made}"
        count(self.store, self.newest_channel, 1)
        return made

    @property
    def control(self) -> Any:
        """The channel of small values, always on gloo and the CPU."""
        return self.make_channels()[0]

    @property
    def gradients(self) -> Any:
        """The channel of gradients, separate so that no other message can be taken for one."""
        self.connect_devices()
        return self.make_channels()[1]


class _Membership:
    """The group of this process, or its member in a run of one rank, which needs no group."""

    group: Group | None = None
    single: Member | None = None
    #: torch's process group of a run that failed: it stays open, but is not used any more.
    abandoned: Any = None
    #: True once it is decided whether this process joins a group.
    settled = False
    join_by_itself: Callable[[], None] | None = None
    on_adoption: Callable[[], None] | None = None
    #: torch's process group of the process that has forked this one, and that process.
    inherited: tuple[Any, int] = None, 0


def register(join_by_itself: Callable[[], None], on_adoption: Callable[[], None]) -> None:
    """Sets how a process joins by itself, and what follows if it uses the user's own group.

    The layer above, which knows how ranks are launched, registers itself here.
    """
    _Membership.join_by_itself, _Membership.on_adoption = join_by_itself, on_adoption


def settle() -> None:
    """From now on this process does not join a group by itself."""
    _Membership.settled = True


def ensure_joined() -> None:
    """Joins the group that torchrun or srun has started this process for, at the first call."""
    if _Membership.settled or current() is not None:
        return
    settle()
    if _Membership.join_by_itself is not None:
        _Membership.join_by_itself()


def current() -> Group | None:
    """The group this process has joined, or the user's own process group of torch."""
    found = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    known = _Membership.group
    if known is not None and known.torch_group is not found:
        # The user has called destroy_process_group, and perhaps made another group since.
        logger.warning("the script has destroyed the process group that this process was part of")
        set_current(None)
    if _Membership.group is None and found is not None and found is not _Membership.abandoned:
        set_current(_adopt())
        if _Membership.on_adoption is not None:
            _Membership.on_adoption()
    return _Membership.group


def adopted() -> Group | None:
    """The user's own process group, if this process uses it."""
    group = _Membership.group
    return group if group is not None and group.address is None else None


def keep_open(group: Group) -> None:
    """Leaves torch's process group of a group as it is: it is neither closed nor used again."""
    _Membership.abandoned = group.torch_group


def single() -> Member | None:
    """The member of this process in a run of one rank, or None."""
    return _Membership.single


def set_current(group: Group | None, single: Member | None = None) -> Group | None:
    """Replaces the group of this process, and returns the previous one."""
    previous = _Membership.group
    _Membership.group, _Membership.single = group, single
    if group is not None:
        group.torch_group = dist.group.WORLD
    # After the run this process keeps its rank in the log: its last lines are about that run.
    if member := group.member if group else single:
        log.set_rank(member.rank)
    return previous


def _adopt() -> Group:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with checked.as_error(LaunchError, after=". Unset it, or set what is right."):
        local_size = checked.variable(os.environ, "LOCAL_WORLD_SIZE", world_size, 1, world_size)
        local_rank = checked.variable(os.environ, "LOCAL_RANK", rank, 0, world_size - 1)
    member = Member(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        device=own_device.adopted_device(),
        backend=dist.get_backend(),
    )
    store = PrefixStore("torchbearer_ddp", dist.distributed_c10d._get_default_store())
    inherited, pid = _Membership.inherited
    if inherited is not dist.group.WORLD:
        pid = os.getpid()
    return Group(member, own_connection(store), hosts=["?"] * world_size, pid=pid)


def _note_what_is_inherited() -> None:
    if dist.is_available() and dist.is_initialized():
        _Membership.inherited = dist.group.WORLD, os.getppid()


os.register_at_fork(after_in_child=_note_what_is_inherited)


def transport_timeout(timeout: float) -> float:
    """The transport's own timeout, in seconds; our waits end before it, or last for a debugger."""
    held = _DEBUGGER_SECONDS if launcher.TERMINAL_VARIABLE in os.environ else 0
    return max(FIRST_STEP_TIMEOUTS * timeout + 60, held)
