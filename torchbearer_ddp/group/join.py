"""Join and leave the group of ranks: rendezvous, device, threads, memory."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed exports these names as well, but its type hints lack them.
from torch._C._distributed_c10d import PrefixStore

from torchbearer_ddp.errors import DesyncError, LaunchError
from torchbearer_ddp.group import (
    descriptors,
    environment,
    exchanges,
    membership,
    memory,
    own_device,
    rendezvous,
    unsynchronised,
)
from torchbearer_ddp.group.bounded import in_time
from torchbearer_ddp.group.membership import Group, Member, transport_timeout
from torchbearer_ddp.group.network import quiet_gloo
from torchbearer_ddp.group.places import device_of
from torchbearer_ddp.group.roll_call import roll_call
from torchbearer_ddp.version import __version__

#: How long a rank that has nothing to do waits for slower ones to connect.
_CONNECT_SECONDS = 30.0
#: How long a script's last messages may take, once it has ended.
_CLOSE_SECONDS = 2.0


def join(
    member: Member,
    host: str,
    ports: int | Sequence[int],
    *,
    serve: bool = False,
    is_open: bool = False,
    prefix: str = "run",
) -> int:
    """Connects to the other ranks in a process group; returns the seed that all ranks share.

    With several ports the store is on the first that was free on rank zero's host. ``serve`` makes
    this process hold the store, and ``is_open`` says that another has opened its port already;
    ``prefix`` separates this run from another on the same store.

    Raises:
        LaunchError: If ranks are missing at the timeout, or were started with different settings.
    """
    if dist.is_initialized():
        raise LaunchError(
            "torch.distributed is already initialised, so run_distributed cannot make its group. "
            "Remove the call to init_process_group: run_distributed does that."
        )
    ports = [ports] if isinstance(ports, int) else ports
    deadline = time.monotonic() + member.timeout
    meet = rendezvous.serve if serve else partial(rendezvous.find, is_open=is_open)
    descriptors.allow(member.world_size, holds_store=serve)
    store = rendezvous.run_store(meet(host, ports, prefix, member.timeout), prefix)
    member, roll = roll_call(store, member, deadline, serves=serve)
    own_device.select(member.device)
    _share_cores(member)
    environment.prepare(host, member.backend, member.world_size)
    if torch.device(member.device).type == "cpu":
        memory.keep_freed()
    hosts = [entry["host"] for entry in roll]
    group = Group(member, store, hosts, serves_store=serve, address=host)

    def connect_ranks() -> None:
        own_device.select(member.device)  # a setting of each thread
        with quiet_gloo():
            dist.init_process_group(
                member.backend,
                store=rendezvous.own_connection(PrefixStore("torch", store)),
                rank=member.rank,
                world_size=member.world_size,
                timeout=datetime.timedelta(seconds=transport_timeout(member.timeout)),
            )
        group.make_channels()

    try:
        _connect(connect_ranks, member, f"{host}:{ports[0]}", deadline)
        group.connect_devices(deadline)
    except LaunchError:
        group.torch_group = dist.group.WORLD
        _give_up(group)
        raise
    _enter(group)
    return int(roll[0]["seed"]) if member.seed is None else member.seed


def _enter(group: Group) -> None:
    membership.set_current(group)
    if group.member.world_size > 1:
        exchanges.open_channels(group)  # here, where every rank comes first
        unsynchronised.watch(afresh=True)


def _connect(
    connect_ranks: Callable[[], None], member: Member, store: str, deadline: float
) -> None:
    where = (
        f"rank {member.rank} of {member.world_size} reached the store at {store} but the ranks "
        "could not connect to each other"
    )
    remedy = (
        "Check that the hosts reach each other on any port, and set GLOO_SOCKET_IFNAME to the "
        "interface that does."
    )
    late = f"{where} within {member.timeout:g} s. {remedy}"
    failed = f"{where}: another rank has ended meanwhile, or cannot be reached. {remedy}"
    in_time(connect_ranks, deadline, late, failed)


def join_single(member: Member) -> int | None:
    """Prepares this process for a run of one rank; returns the user's seed, if any."""
    device = device_of(member, torch.cuda.device_count())
    own_device.select(device)
    membership.set_current(None, dataclasses.replace(member, device=device))
    return member.seed


def leave(why: str = "returned from the worker") -> None:
    """Closes the group after success; a broken one stays open, because closing it could hang.

    The rank that holds the store waits until the others have left, or for a few seconds. A rank
    that still waits for this one raises an error that says ``why`` it left.
    """
    group = membership.set_current(None)
    if group is not None and dist.is_initialized():
        _await_connections(group)
        # A rank that is still in an exchange which this one has completed does not wait for it.
        farewell = {"rank": group.member.rank, "why": why, "sequence": group.sequence}
        _depart(group, rendezvous.LEAVE_SECONDS, farewell)
        if group.broken:
            membership.keep_open(group)
        else:
            dist.destroy_process_group()
            environment.restore()


@atexit.register
def _close_adopted() -> None:
    """Closes what this package has added to the process group of a script that ends.

    A thread of gloo that puts down its last message while Python ends would abort the process: so
    ends many a script that does not destroy its group. Registered when this module is imported, so
    that it is called after the handlers of the script.
    """
    group = membership.adopted()
    if group is not None and group.pid == os.getpid() and not group.broken:
        # A message that no rank receives is still pending, or this Python starts no more threads.
        with contextlib.suppress(LaunchError, RuntimeError):
            in_time(group.close_channels, time.monotonic() + _CLOSE_SECONDS, "a message is pending")


def _await_connections(group: Group) -> None:
    """Waits until every rank has connected the newest channel: to close before would break it."""
    channel = group.newest_channel
    if channel is None or group.address is None or rendezvous.is_gone(group.store):
        return  # the user's own group, or nobody to ask
    size, seconds = group.member.world_size, min(group.member.timeout, _CONNECT_SECONDS)
    with contextlib.suppress(LaunchError, DesyncError):
        in_time(
            lambda: rendezvous.await_count(group.store, channel, size, seconds),
            time.monotonic() + seconds + rendezvous.STORE_SECONDS,
            "the store does not answer",
        )


def abandon() -> None:
    """Leaves the group after a failure without closing it, which could hang or hide the cause.

    The rank that holds the store waits for a moment, so that the others can read the cause there.
    """
    group = membership.set_current(None)
    if group is not None:
        _give_up(group)


def _give_up(group: Group) -> None:
    """Leaves torch's process group, if it was made, as it is; the others can read the cause."""
    membership.keep_open(group)
    _depart(group, rendezvous.ABANDON_SECONDS, None)


def _depart(group: Group, seconds: float, farewell: dict[str, Any] | None) -> None:
    wait = seconds if group.serves_store else 0.0
    rendezvous.depart(group.store, group.member.world_size, wait, farewell)


def usable_cores() -> int:
    """The cores this process may use (in a container or under Slurm fewer than the host has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_rank(member: Member) -> int:
    """An equal share of the usable cores for each rank on this host."""
    return max(1, usable_cores() // max(1, member.local_world_size))


def _share_cores(member: Member) -> None:
    if "OMP_NUM_THREADS" not in os.environ and member.local_world_size > 1:
        torch.set_num_threads(cores_per_rank(member))


def versions() -> dict[str, str]:
    """What must be equal on all ranks for equal results."""
    return {
        "torch": str(torch.__version__),
        "torchbearer_ddp": __version__,
        "the machine": platform.machine(),
    }
