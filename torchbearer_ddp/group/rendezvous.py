"""The rendezvous: a store that one process holds, in which the ranks of a run find each other.

Everything here is bounded by the timeout as a whole, whatever listens on the port.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import select
import socket
import time
from collections.abc import Sequence

# torch.distributed has these names as well, but its types do not say so.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group.bounded import in_time

#: How long the store stays for others after success, and for them to read the cause of a failure.
LEAVE_SECONDS = 3.0
ABANDON_SECONDS = 2.0
#: How much longer a departure may take; the store does not answer if the network is cut.
STORE_SECONDS = 1.0
POLL_SECONDS = 0.02
_RETRY_SECONDS = 0.1
#: A program that is not a store may speak first.
_SPEAK_SECONDS = 0.05
#: How long one of several ports may take to answer as a store.
_PROBE_SECONDS = 1.0
#: What rank zero writes into a store that one of several ports leads to.
_SERVED = "served"

#: Stores that this process holds on a fixed port. They stay open until it ends: another rank may
#: begin the next run on that port before this process does.
_held: dict[tuple[str, int], TCPStore] = {}


def serve(host: str, ports: Sequence[int], prefix: str, timeout: float) -> TCPStore:
    """Holds the run's store on the first of these ports that is free."""
    for port in ports:
        try:
            store = serve_store(host, port, timeout)
        except LaunchError as error:
            if len(ports) == 1 or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            continue
        run_store(store, prefix).set(_SERVED, "1")
        return store
    raise LaunchError(
        f"Ports {', '.join(map(str, ports))} on {host} are in use, so rank 0 cannot open the "
        "rendezvous. Give every rank another --port."
    )


def find(host: str, ports: Sequence[int], prefix: str, timeout: float) -> TCPStore:
    """Connects to the run's store, which rank zero holds on one of these ports.

    With several ports (in a Slurm job, where nobody can tell the ranks which one was free) another
    program or another run may hold one of them: only a store with this run's mark is taken.
    """
    if len(ports) == 1:
        return connect(host, ports[0], timeout)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for port in ports:
            with contextlib.suppress(LaunchError, RuntimeError):  # it may belong to another run
                if _answers(host, port, time.monotonic() + _PROBE_SECONDS):
                    store = connect(host, port, _PROBE_SECONDS)
                    if run_store(store, prefix).check([_SERVED]):
                        store.set_timeout(datetime.timedelta(seconds=timeout))
                        return store
        time.sleep(_RETRY_SECONDS)
    raise LaunchError(
        f"No rendezvous of this run on {host} within {timeout:g} s, on any of the ports "
        f"{', '.join(map(str, ports))}: rank 0 has not started there, or its host cannot be "
        "reached. See rank 0's output, or allow more time with --timeout."
    )


def serve_store(host: str, port: int, timeout: float) -> TCPStore:
    """Holds a store on exactly that address (torch's own would listen on every interface).

    Port 0 is any free one (read it back as ``store.port``). A store on a fixed port is held until
    the process ends, and returned again when asked for again. A host name that is not this host's
    (a cloud's public address) means every interface.
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
            listener.bind(("", port))
            host_here = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"Port {port} on {host} cannot be opened for the rendezvous ({error.strerror}). "
            "Another program or run may hold it. Give every node another --port."
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
    """Connects to a store, within the timeout whatever listens there."""
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
    """The part of a store that belongs to one run, separate from other runs on the same store."""
    return PrefixStore(f"torchbearer_ddp/{prefix}", base)


def own_connection(store: Store) -> Store:
    """The same store over a second connection: a rank that waits on one can still use the other."""
    clone: Store = store.clone()  # type: ignore[attr-defined]  # torch's types do not know it
    return clone


def is_gone(store: Store) -> bool:
    """True if no process holds this store any more; using it would print many warnings."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        try:
            socket.create_connection((store.host, store.port), STORE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # out of reach, which is not the same
    return False


def depart(store: Store, world_size: int, seconds: float) -> None:
    """Records that this rank leaves, and waits up to ``seconds`` for the others to leave too."""

    def leave() -> None:
        if not is_gone(store):
            store.add("left", 1)
            await_departures(store, world_size, seconds)

    # The store's holder may be gone already, or out of reach.
    with contextlib.suppress(LaunchError):
        in_time(leave, time.monotonic() + seconds + STORE_SECONDS, "the store does not answer")


def await_departures(store: Store, world_size: int, seconds: float) -> None:
    """Keeps the store open until every rank has left the run, but no longer than that."""
    deadline = time.monotonic() + seconds
    while store.add("left", 0) < world_size and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
