"""The rendezvous: a store that one process holds, in which the ranks of a run find each other.

Everything here is bounded by the timeout as a whole, whatever listens on the port. In the roll call
a missing rank, two processes with one rank, or nodes that disagree on the world size are found and
named, on every rank alike.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import pathlib
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# torch.distributed has these names as well, but its types do not say so.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from torchbearer_ddp.errors import DistributedError, LaunchError

DEFAULT_TIMEOUT = 300.0
#: How long the store stays for others after success, and for them to read the cause of a failure.
LEAVE_SECONDS = 3.0
ABANDON_SECONDS = 2.0
#: How long a departure may take beyond that; the store does not answer where the network is cut.
_STORE_SECONDS = 1.0
_POLL_SECONDS = 0.02
_RETRY_SECONDS = 0.1
#: A program that is not a store may say so itself.
_SPEAK_SECONDS = 0.05
_T = TypeVar("_T")

#: Stores that this process holds on a fixed port. They stay open until it ends: another rank may
#: begin the next run on that port before this process does.
_held: dict[tuple[str, int], TCPStore] = {}


@dataclass(frozen=True)
class Member:
    """Which rank this process is, and where the others find it.

    Args:
        rank: The rank in the world.
        world_size: The number of ranks.
        local_rank: The rank on this host, or -1 to let the roll call find it.
        local_world_size: The number of ranks on this host; the roll call finds it likewise.
        device: The device this rank computes on; plain ``cuda`` is the GPU of the local rank.
        backend: torch.distributed's name of the backend.
        timeout: Seconds that any wait for other ranks may take.
        seed: The base seed, or None for the one in force on rank zero.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: str = "cpu"
    backend: str = "gloo"
    timeout: float = DEFAULT_TIMEOUT
    seed: int | None = None


def serve_store(host: str, port: int, timeout: float) -> TCPStore:
    """Holds a store on exactly that address (torch's own would listen on every interface).

    A store on a certain port is held until the process ends, and given again when asked for again.

    Args:
        host: The address to listen on; a name that is not this host's means every interface.
        port: The port, or 0 for any free one (read it back as ``store.port``).
        timeout: Seconds any request to the store may take.
    """
    if (host, port) in _held:
        return _held[host, port]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    host_here = host
    try:
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            # Not an address of this host (a NAT's or a cloud's public one): listen on all.
            listener.bind(("", port))
            host_here = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"Port {port} on {host} cannot be opened for the rendezvous ({error.strerror}). "
            "Another program or run may hold it: give every node another --port."
        ) from error
    actual = listener.getsockname()[1]
    store = TCPStore(
        host_here,
        actual,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    if port:
        _held[host, port] = store
    return store


def connect(host: str, port: int, timeout: float) -> TCPStore:
    """Connects to the store, within the timeout whatever listens there.

    Args:
        host: The address of the store.
        port: Its port.
        timeout: Seconds that this, and any request to the store, may take.
    """
    deadline = time.monotonic() + timeout
    late = (
        f"No rendezvous at {host}:{port} within {timeout:g} s: rank 0 has not started there, or "
        "something else holds that port. Start rank 0 on that host with the same --port, or "
        "choose another port on every node."
    )
    while not _answers(host, port, deadline):
        if time.monotonic() > deadline:
            raise LaunchError(late)
        time.sleep(_RETRY_SECONDS)
    return in_time(
        lambda: TCPStore(
            host,
            port,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
        ),
        deadline,
        late,
    )


def _answers(host: str, port: int, deadline: float) -> bool:
    """True if something listens there that could be a store: one that waits to be spoken to.

    torch would retry as well, but with a screenful of warnings each time.
    """
    wait = max(_RETRY_SECONDS, deadline - time.monotonic())
    try:
        with socket.create_connection((host, port), wait) as probe:
            return not select.select([probe], [], [], _SPEAK_SECONDS)[0]
    except OSError:
        return False


def run_store(base: Store, prefix: str) -> Store:
    """The part of a store that belongs to one run.

    Args:
        base: A store of :func:`serve_store` or :func:`connect`.
        prefix: Sets this run apart from another on the same store.
    """
    return PrefixStore(f"torchbearer_ddp/{prefix}", base)


def own_connection(store: Store) -> Store:
    """The same store, but a rank that waits on this one can still ask the other.

    Args:
        store: A store, or a part of one.
    """
    clone: Store = store.clone()  # type: ignore[attr-defined]  # torch's types do not know it
    return clone


def is_gone(store: Store) -> bool:
    """True if nobody holds this store any more; asking it then prints a screenful of warnings.

    Args:
        store: A store, or a part of one.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        try:
            socket.create_connection((store.host, store.port), _STORE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # out of reach, which is not the same
    return False


def depart(store: Store, world_size: int, seconds: float) -> None:
    """Says that this rank leaves; whoever holds the store stays a while for the others.

    Args:
        store: The run's part of the store.
        world_size: The number of ranks in the run.
        seconds: How long to stay if others have not left yet.
    """

    def leave() -> None:
        if not is_gone(store):
            store.add("left", 1)
            await_departures(store, world_size, seconds)

    # The store's holder may be gone already, or out of reach: fine.
    with contextlib.suppress(LaunchError):
        in_time(leave, time.monotonic() + seconds + _STORE_SECONDS, "the store does not answer")


def await_departures(store: Store, world_size: int, seconds: float) -> None:
    """Keeps the store open until every rank has left the run, but not for longer than that.

    Args:
        store: The run's part of the store, see :func:`run_store`.
        world_size: The number of ranks in the run.
        seconds: How long to wait for them.
    """
    deadline = time.monotonic() + seconds
    while store.add("left", 0) < world_size and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def roll_call(
    store: Store, member: Member, deadline: float, *, serves: bool
) -> list[dict[str, Any]]:
    """Waits until every rank has said who it is; returns what they said, by rank.

    Args:
        store: The run's part of the store.
        member: Who this process is.
        deadline: When the ranks must all have come.
        serves: True if this process holds the store.

    Raises:
        LaunchError: If they do not all come, or do not fit together; the same on every rank.
    """
    lost = (
        f"Lost the rendezvous store while waiting for the other ranks (rank {member.rank} of "
        f"{member.world_size}): the process that holds it has ended or is frozen, or the network "
        "is cut. Look at its output."
    )
    try:
        # At the deadline it says itself who is missing, unless the store does not answer.
        return in_time(lambda: _exchange(store, member, deadline), deadline + _STORE_SECONDS, lost)
    except LaunchError:
        depart(store, member.world_size, ABANDON_SECONDS if serves else 0.0)
        raise


def _exchange(store: Store, member: Member, deadline: float) -> list[dict[str, Any]]:
    """Waits until every rank has said who it is; returns what they said, by rank."""
    mine = {
        "rank": member.rank,
        "world_size": member.world_size,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "seed": torch.initial_seed(),
    }

    def refuse(message: str) -> LaunchError:
        # The first verdict counts: every rank raises the same one.
        return LaunchError(store.compare_set("refused", "", message).decode())

    known = {member.rank: mine}
    if store.add(f"claim/{member.rank}", 1) > 1:
        other = json.loads(store.get(f"here/{member.rank}"))
        raise refuse(
            f"Two processes have rank {member.rank}: process {other['pid']} on {other['host']} "
            f"and process {mine['pid']} on {mine['host']}. Start each with its own --rank."
        )
    store.set(f"here/{member.rank}", json.dumps(mine))
    announced = False
    while not announced or store.add("ready", 0) < member.world_size:
        if store.check(["refused"]):
            raise refuse("")
        for rank in range(member.world_size):
            if rank not in known and store.check([f"here/{rank}"]):
                known[rank] = info = json.loads(store.get(f"here/{rank}"))
                if info["world_size"] != member.world_size:
                    raise refuse(
                        f"The world size differs: {member.world_size} on rank {member.rank} "
                        f"({mine['host']}), {info['world_size']} on rank {rank} "
                        f"({info['host']}). Give every node the same --world-size."
                    )
        if len(known) == member.world_size and not announced:
            store.add("ready", 1)
            announced = True
            continue
        if time.monotonic() > deadline:
            missing = [r for r in range(member.world_size) if r not in known]
            raise refuse(
                f"Only {len(known)} of {member.world_size} ranks arrived within "
                f"{member.timeout:g} s; missing: {', '.join(map(str, missing)) or 'none'}. "
                "Start them, look at their output, or give more time with --timeout."
            )
        time.sleep(_POLL_SECONDS)
    return [known[rank] for rank in range(member.world_size)]


def _machine() -> str:
    """Tells hosts apart that have the same name, until they are booted anew."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}"
    return socket.gethostname()


def in_time(action: Callable[[], _T], deadline: float, message: str) -> _T:
    """Runs an action that may block for ever (torch's own timeouts do not cover a mute peer)."""
    future = in_background(action)
    done, _ = futures.wait([future], max(0.0, deadline - time.monotonic()))
    if not done:
        raise LaunchError(message)
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, DistributedError):
        raise error
    raise LaunchError(message) from error


def in_background(action: Callable[[], _T]) -> Future[_T]:
    """Runs an action in a thread that does not keep the process from ending."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="torchbearer_ddp-rendezvous").start()
    return future
