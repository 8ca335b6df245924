"""Join and leave the group of ranks: rendezvous, device, threads, seed, timeout.

Everything here is bounded by the timeout as a whole. The ranks first meet in the store (the roll
call), where a missing rank, two processes with one rank, or nodes that disagree on the world size
are found and named; only then is torch's process group made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import pathlib
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchbearer_ddp import randomness
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.network import interface_of, loopback, route_to

DEFAULT_TIMEOUT = 300.0
#: The first step may compile, download or fill caches, so it may take this many timeouts.
FIRST_STEP_TIMEOUTS = 4
_POLL_SECONDS = 0.02
_LEAVE_SECONDS = 3.0
_T = TypeVar("_T")


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


@dataclass
class Group:
    """The group this process belongs to."""

    member: Member
    store: dist.Store
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
#: Stores that this process holds on a fixed port. They stay open until it ends: another rank may
#: begin the next run on that port before this process does.
_held: dict[tuple[str, int], dist.TCPStore] = {}


def alone() -> Member | None:
    """This process in a run of one rank, if it is in one."""
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
    store = dist.PrefixStore("torchbearer_ddp", dist.distributed_c10d._get_default_store())
    return Group(member, store, hosts=["?"] * world_size)


def join(member: Member, host: str, port: int, *, serve: bool = False, prefix: str = "run") -> None:
    """Meets the other ranks and makes the process group.

    Args:
        member: Who this process is.
        host: The address of the store.
        port: The port of the store.
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
    base = serve_store(host, port, member.timeout) if serve else connect(host, port, member.timeout)
    store = run_store(base, prefix)
    roll = _roll_call(store, member, deadline)
    member = _settled(member, roll)
    _use_device(member)
    _share_cores(member)
    randomness.seed_all(roll[0]["seed"] if member.seed is None else member.seed)
    _in_time(
        lambda: _init_process_group(store, member, host),
        deadline,
        f"rank {member.rank} of {member.world_size} reached the store at {host}:{port} but the "
        f"ranks could not connect to each other within {member.timeout:g} s. Check that the hosts "
        "reach each other on any port, and set GLOO_SOCKET_IFNAME to the interface that does.",
    )
    hosts = [entry["host"] for entry in roll]
    _group = Group(member, store, hosts, serves_store=serve, address=host)
    _group._channels()


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


def run_store(base: dist.Store, prefix: str) -> dist.Store:
    """The part of a store that belongs to one run.

    Args:
        base: A store of :func:`serve_store` or :func:`connect`.
        prefix: Sets this run apart from another on the same store.
    """
    return dist.PrefixStore(f"torchbearer_ddp/{prefix}", base)


def leave() -> None:
    """Closes the group after success; a broken one is left as it is, closing it could hang.

    The rank that holds the store stays until the others have left, or for a few seconds.
    """
    global _group, _alone
    group, _group, _alone = _group, None, None
    if group is None or not dist.is_initialized():
        return
    _depart(group)
    if not group.broken:
        dist.destroy_process_group()


def abandon() -> None:
    """Leaves the group after a failure: nothing is closed, which could hang or hide the cause.

    The rank that holds the store stays for a moment, so that the others can read the cause there.
    """
    global _group, _alone
    group, _group, _alone = _group, None, None
    if group is not None:
        _depart(group)


def _depart(group: Group) -> None:
    with contextlib.suppress(RuntimeError):  # the store's holder may be gone already: fine
        group.store.add("left", 1)
        if group.serves_store:
            await_departures(group.store, group.member.world_size)


def await_departures(store: dist.Store, world_size: int) -> None:
    """Keeps the store open until every rank has left the run, or for a few seconds.

    Args:
        store: The run's part of the store, see :func:`run_store`.
        world_size: The number of ranks in the run.
    """
    deadline = time.monotonic() + _LEAVE_SECONDS
    while store.add("left", 0) < world_size and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def serve_store(host: str, port: int, timeout: float) -> dist.TCPStore:
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
            f"Port {port} on {host} cannot be opened for the rendezvous ({error.strerror}). Another "
            "program or run may hold it: give every node another --port."
        ) from error
    actual = listener.getsockname()[1]
    store = dist.TCPStore(
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


def connect(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Connects to the store, within the timeout whatever listens there."""
    return _in_time(
        lambda: dist.TCPStore(
            host,
            port,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
        ),
        time.monotonic() + timeout,
        f"No rendezvous at {host}:{port} within {timeout:g} s: rank 0 has not started there, or "
        "something else holds that port. Start rank 0 on that host with the same --port, or "
        "choose another port on every node.",
    )


def _in_time(action: Callable[[], _T], deadline: float, message: str) -> _T:
    """Runs an action that may block for ever (torch's own timeouts do not cover a mute peer)."""
    outcome: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="torchbearer_ddp-rendezvous")
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if outcome:
        return outcome[0]
    if failure and isinstance(failure[0], LaunchError):
        raise failure[0]
    raise LaunchError(message) from (failure[0] if failure else None)


def _roll_call(store: dist.Store, member: Member, deadline: float) -> list[dict[str, Any]]:
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

    late = (
        f"Lost the rendezvous store while waiting for the other ranks (rank {member.rank} of "
        f"{member.world_size}): the process that holds it has ended. Look at its output."
    )
    try:
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
                    f"{member.timeout:g} s; missing: {', '.join(map(str, missing)) or 'none'}. Start "
                    "them, look at their output, or give more time with --timeout."
                )
            time.sleep(_POLL_SECONDS)
    except LaunchError:
        raise
    except (RuntimeError, ValueError) as error:
        raise LaunchError(late) from error
    return [known[rank] for rank in range(member.world_size)]


def _machine() -> str:
    """Tells hosts apart that have the same name, until they are booted anew."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}"
    return socket.gethostname()


def _init_process_group(store: dist.Store, member: Member, host: str) -> None:
    with _gloo_interface(host):
        dist.init_process_group(
            member.backend,
            store=dist.PrefixStore("torch", store),
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
        "byte order": platform.machine(),
    }
