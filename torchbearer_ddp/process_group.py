"""Join and leave the group of ranks: rendezvous, device, threads, memory, seed, timeout."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed has these names as well, but its types do not say so.
from torch._C._distributed_c10d import PrefixStore, Store

from torchbearer_ddp import memory, randomness
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.network import interface_of, loopback, route_to
from torchbearer_ddp.rendezvous import (
    ABANDON_SECONDS,
    LEAVE_SECONDS,
    Member,
    connect,
    depart,
    in_time,
    own_connection,
    roll_call,
    run_store,
    serve_store,
)
from torchbearer_ddp.spare_ports import find, serve_first_free

#: The first step may compile, download or fill caches, so it may take this many timeouts.
FIRST_STEP_TIMEOUTS = 4


@dataclass
class Group:
    """The group this process belongs to."""

    member: Member
    store: Store
    hosts: list[str]
    serves_store: bool = False
    #: The store's address, if it is known: gloo uses the interface that leads there.
    address: str | None = None
    #: Set once the first gradients were exchanged: from then on the plain timeout holds.
    warm: bool = False
    #: Set when a wait failed: messages are under way that nobody will take.
    broken: bool = False
    #: Set once each rank draws from a stream of its own.
    parted: bool = False
    sequence: int = 0
    _groups: tuple[Any, Any] | None = field(default=None, repr=False)

    def _channels(self) -> tuple[Any, Any]:
        if self._groups is None:  # collective: only reached from within a collective
            wait = datetime.timedelta(seconds=_transport_timeout(self.member.timeout))
            with _gloo_interface(self.address):
                self._groups = (
                    dist.new_group(backend="gloo", timeout=wait),
                    dist.new_group(timeout=wait),
                )
        return self._groups

    def among(self, ranks: list[int]) -> Any:
        """A channel of some ranks, on gloo and the CPU; every rank must ask for it, in one order.

        Args:
            ranks: The ranks that the channel connects.
        """
        wait = datetime.timedelta(seconds=_transport_timeout(self.member.timeout))
        with _gloo_interface(self.address):
            return dist.new_group(ranks, backend="gloo", timeout=wait)

    @property
    def control(self) -> Any:
        """The channel of small values, always on gloo and the CPU."""
        return self._channels()[0]

    @property
    def gradients(self) -> Any:
        """The channel of gradients: its own, so that no other message can be taken for one."""
        return self._channels()[1]


_group: Group | None = None
#: This process in a run of one rank, which needs no group.
_alone: Member | None = None


def alone() -> Member | None:
    """Who this process is in a run of one rank, if it is in one."""
    return _alone


def current() -> Group | None:
    """The group this process has joined; one that the user made with torch counts as well."""
    global _group
    if _group is None and dist.is_available() and dist.is_initialized():
        _group = _adopt()
    return _group


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


def join(
    member: Member,
    host: str,
    port: int,
    *spare_ports: int,
    serve: bool = False,
    prefix: str = "run",
) -> None:
    """Meets the other ranks and makes the process group.

    Args:
        member: Who this process is.
        host: The address of the store.
        port: The port of the store.
        spare_ports: Where it is if something else holds that port; the same on every rank.
        serve: True if this process is to hold the store itself.
        prefix: Sets this run apart from another on the same store (a restart, say).

    Raises:
        LaunchError: If the ranks did not all arrive in time, or do not fit together.
    """
    global _group
    if dist.is_initialized():
        raise LaunchError(
            "torch.distributed is initialised already, so run_distributed cannot make its group. "
            "Remove the call to init_process_group: run_distributed does that."
        )
    deadline = time.monotonic() + member.timeout
    store = run_store(_meet(member.timeout, host, port, spare_ports, serve, prefix), prefix)
    roll = roll_call(store, member, deadline, serves=serve)
    member = _settled(member, roll)
    _use_device(member)
    _share_cores(member)
    if torch.device(member.device).type == "cpu":
        memory.keep_freed()
    randomness.seed_all(roll[0]["seed"] if member.seed is None else member.seed)
    group = Group(
        member, store, [entry["host"] for entry in roll], serves_store=serve, address=host
    )

    def connect_ranks() -> None:
        _init_process_group(store, member, host)
        group._channels()

    in_time(
        connect_ranks,
        deadline,
        f"rank {member.rank} of {member.world_size} reached the store at {host}:{port} but the "
        f"ranks could not connect to each other within {member.timeout:g} s. Check that the hosts "
        "reach each other on any port, and set GLOO_SOCKET_IFNAME to the interface that does.",
    )
    _group = group


def _meet(
    timeout: float, host: str, port: int, spare_ports: tuple[int, ...], serve: bool, prefix: str
) -> Store:
    if not spare_ports:
        return serve_store(host, port, timeout) if serve else connect(host, port, timeout)
    meet = serve_first_free if serve else find
    return meet(host, (port, *spare_ports), prefix, timeout)


def stay_alone(member: Member) -> None:
    """Prepares this process for a run of one rank: device and seed, no group.

    Args:
        member: Who this process is. Without a seed the generators are left alone.
    """
    global _alone
    _alone = member
    _use_device(member)
    if member.seed is not None:
        randomness.seed_all(member.seed)


def _settled(member: Member, roll: list[dict[str, Any]]) -> Member:
    """The member with what only the roll call could tell: its place on its host, and its GPU."""
    if member.local_rank < 0:
        machine = roll[member.rank]["machine"]
        neighbours = [rank for rank, entry in enumerate(roll) if entry["machine"] == machine]
        member = dataclasses.replace(
            member,
            local_rank=neighbours.index(member.rank),
            local_world_size=len(neighbours),
        )
    if member.device == "cuda":
        gpus = torch.cuda.device_count()
        index = 0 if gpus == 1 else member.local_rank
        if index >= gpus:
            raise LaunchError(
                f"Rank {member.rank} is the process number {index + 1} on this host but {gpus} "
                "GPUs are visible: each rank needs its own. Start fewer here, or use --device cpu."
            )
        member = dataclasses.replace(member, device=f"cuda:{index}")
    return member


def leave() -> None:
    """Closes the group after success; a broken one is left as it is, closing it could hang.

    The rank that holds the store stays until the others have left, or for a few seconds.
    """
    global _group, _alone
    group, _group, _alone = _group, None, None
    if group is None or not dist.is_initialized():
        return
    _depart(group, LEAVE_SECONDS)
    if not group.broken:
        dist.destroy_process_group()


def abandon() -> None:
    """Leaves the group after a failure: nothing is closed, which could hang or hide the cause.

    The rank that holds the store stays for a moment, so that the others can read the cause there.
    """
    global _group, _alone
    group, _group, _alone = _group, None, None
    if group is not None:
        _depart(group, ABANDON_SECONDS)


def _depart(group: Group, seconds: float) -> None:
    depart(group.store, group.member.world_size, seconds if group.serves_store else 0.0)


def _init_process_group(store: Store, member: Member, host: str) -> None:
    with _gloo_interface(host):
        dist.init_process_group(
            member.backend,
            store=own_connection(PrefixStore("torch", store)),
            rank=member.rank,
            world_size=member.world_size,
            timeout=datetime.timedelta(seconds=_transport_timeout(member.timeout)),
        )


def _transport_timeout(timeout: float) -> float:
    """The transport's own timeout is the last resort: our waits end before, with a better word."""
    return FIRST_STEP_TIMEOUTS * timeout + 60


@contextlib.contextmanager
def _gloo_interface(host: str | None) -> Iterator[None]:
    """Lets gloo use the interface that leads to the store: the host's name may mean another.

    A run on one host so listens on loopback only.
    """
    name = "GLOO_SOCKET_IFNAME"
    interface = None
    if host is not None and name not in os.environ:
        interface = interface_of(loopback(host) or route_to(host))
    if interface is None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _use_device(member: Member) -> None:
    """Before any other CUDA call, so that no rank leaves a context on the first GPU."""
    device = torch.device(member.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def usable_cores() -> int:
    """The cores this process may use (a container or Slurm may give fewer than the host has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _share_cores(member: Member) -> None:
    if "OMP_NUM_THREADS" not in os.environ and member.local_world_size > 1:
        torch.set_num_threads(max(1, usable_cores() // member.local_world_size))


def versions() -> dict[str, str]:
    """What must be the same on every rank for the numbers to be."""
    from torchbearer_ddp import __version__

    return {
        "torch": str(torch.__version__),
        "torchbearer_ddp": __version__,
        "the machine": platform.machine(),
    }
