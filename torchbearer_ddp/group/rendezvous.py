"""The rendezvous: a key-value store, held by one process, through which ranks find each other.

No call here takes longer than its timeout, whatever listens on the port.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

# torch.distributed exports these names as well, but its type hints lack them.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError, LaunchError
from torchbearer_ddp.group import posts
from torchbearer_ddp.group.bounded import in_background, in_time
from torchbearer_ddp.group.network import quieten_torch

#: How long the store is kept for other ranks: after success, and after a failure, so that they can
#: read its cause.
LEAVE_SECONDS = 3.0
ABANDON_SECONDS = 2.0
#: How much longer a departure may take; the store does not answer if the network is cut.
STORE_SECONDS = 1.0
POLL_SECONDS = 0.02
_RETRY_SECONDS = 0.1
#: How long a port is watched for data: a store sends nothing before it is asked.
_GREETING_SECONDS = 0.05
#: How long a connection to one of several ports may take.
_PROBE_SECONDS = 1.0
_FAREWELL = checked.record(
    {"rank": checked.whole(0), "why": checked.text(), "sequence": checked.whole(0)}
)
#: The key under which each rank that leaves adds an entry.
_FAREWELLS = "farewells"
_COUNTER = checked.whole(-(2**63), 2**63 - 1)
#: The key by which a rank recognises the store of its run.
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


def find(
    host: str, ports: Sequence[int], prefix: str, timeout: float, *, is_open: bool = False
) -> TCPStore:
    """Connects to the run's store, which rank zero holds on one of these ports.

    ``is_open`` says that the only port is known to be the run's own.
    With several ports (in a Slurm job, where the ranks cannot know which one was free) another
    program or another run may hold one of them: only a store with this run's mark is taken.
    """
    if len(ports) == 1:
        return connect(host, ports[0], timeout, is_open=is_open)
    deadline = time.monotonic() + timeout
    # One attempt at a time for each port: a program that is not a store may never answer.
    attempts: dict[int, Future[TCPStore]] = {}
    while time.monotonic() < deadline:
        for port in ports:
            if port not in attempts:
                if _answers(host, port, time.monotonic() + _PROBE_SECONDS):
                    attempts[port] = in_background(partial(connect, host, port, timeout))
            elif attempts[port].done():
                try:
                    store = attempts[port].result()
                    if run_store(store, prefix).check([_SERVED]):
                        return store
                except RuntimeError:  # the store of another run, which has ended since
                    del attempts[port]
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
    return OpenPort(host, port).serve(timeout)


class OpenPort:
    """A port where ranks can connect already, before its store answers.

    A store has threads, and a process with threads cannot be forked into ranks.
    """

    def __init__(self, host: str, port: int) -> None:
        self._key = host, port
        self._listener: socket.socket | None = None
        self._address = host
        if self._key in _held:
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            try:
                self._listener = socket.create_server((host, port), family=family, backlog=1024)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                self._listener = socket.create_server(("", port), family=family, backlog=1024)
                self._address = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        except OSError as error:
            raise LaunchError(
                f"Port {port} on {host} cannot be opened for the rendezvous "
                f"({os.strerror(error.errno or 0)}). Another program or run may hold it. Give "
                "every node another --port."
            ) from error

    @property
    def port(self) -> int:
        """Its number."""
        if self._listener is None:
            return self._key[1]
        return int(self._listener.getsockname()[1])

    def descriptors(self) -> list[int]:
        """Its descriptor, until its store has it."""
        return [] if self._listener is None else [self._listener.fileno()]

    def serve(self, timeout: float) -> TCPStore:
        """Lets a store answer there."""
        if self._listener is None:
            return _held[self._key]
        port, listener, self._listener = self.port, self._listener.detach(), None
        quieten_torch()
        store = TCPStore(
            self._address,
            port,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        if self._key[1]:
            _held[self._key] = store
        return store


def connect(host: str, port: int, timeout: float, *, is_open: bool = False) -> TCPStore:
    """Connects to a store; fails after the timeout, whatever listens on that port.

    A port that is not known to be open is looked at first.
    """
    deadline = time.monotonic() + timeout
    late = (
        f"No rendezvous at {host}:{port} within {timeout:g} s: rank 0 has not started there, or "
        "something else holds that port. Start rank 0 on that host with the same --port, or "
        "choose another port on every node."
    )
    while not is_open and not _answers(host, port, deadline):
        if time.monotonic() > deadline:
            raise LaunchError(late)
        time.sleep(_RETRY_SECONDS)
    quieten_torch()  # what answers may be no store
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
        f"The rendezvous at {host}:{port} could not be reached: something else holds that port, or "
        "what held it has just ended. Start rank 0 on that host with the same --port, or choose "
        "another port on every node.",
    )


def _answers(host: str, port: int, deadline: float) -> bool:
    """True if something listens there that could be a store: it does not send before it is asked.

    torch would retry as well, but prints many warnings each time.
    """
    wait = max(_RETRY_SECONDS, deadline - time.monotonic())
    try:
        with socket.create_connection((host, port), wait) as probe:
            greeting = select.poll()  # unlike select.select it takes any descriptor
            greeting.register(probe, select.POLLIN)
            return not greeting.poll(1000 * _GREETING_SECONDS)
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
            return False  # unreachable, but it may still exist
    return False


def depart(store: Store, world_size: int, seconds: float, farewell: dict[str, Any] | None) -> None:
    """Records that this rank leaves, and waits up to ``seconds`` for the others to leave too.

    ``farewell`` is what those that still wait for it should know.
    """

    def leave() -> None:
        if not is_gone(store):
            if farewell is not None:
                entry = json.dumps(farewell) + ","
                store.append(_FAREWELLS, entry)  # type: ignore[attr-defined]  # torch's types lack it
            count(store, "left", 1)
            await_departures(store, world_size, seconds)

    # The process that holds the store may have ended already, or be unreachable.
    with contextlib.suppress(LaunchError, DesyncError):
        in_time(leave, time.monotonic() + seconds + STORE_SECONDS, "the store does not answer")


def farewells(store: Store) -> list[dict[str, Any]]:
    """What the ranks that have left said; one question, or two, however many they are."""
    entries = store.get(_FAREWELLS) if store.check([_FAREWELLS]) else b""
    found: list[dict[str, Any]] = posts.parse(
        b"[%s]" % entries.removesuffix(b","), _FAREWELLS, checked.items(_FAREWELL)
    )
    return found


def await_departures(store: Store, world_size: int, seconds: float) -> None:
    """Waits until every rank has left the run, for at most ``seconds``."""
    await_count(store, "left", world_size, seconds)


def await_count(store: Store, key: str, number: int, seconds: float) -> None:
    """Waits until a counter in the store has reached a number, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while count(store, key) < number and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def count(store: Store, key: str, more: int = 0) -> int:
    """Adds to a counter in the store, and returns what it is then.

    Raises:
        DesyncError: If something else is posted there.
    """
    try:
        return store.add(key, more)
    except RuntimeError:
        # The store hangs up on whoever adds to what is no number; another connection can read it.
        if not is_gone(store) and (again := own_connection(store)).check([key]):
            posts.parse(again.get(key) or b" ", key, _COUNTER)
        raise
