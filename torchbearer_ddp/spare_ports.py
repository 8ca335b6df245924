"""A rendezvous whose port may be taken: rank zero takes the next free one, the others find it.

In a Slurm job nobody can tell the ranks a port: each derives the same list from the job's id. A
port of the list may belong to another program or to another run's store, so a rank only takes a
store in which rank zero has left this run's mark.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import TCPStore

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.rendezvous import connect, run_store, serve_store

_MARK = "served"
_POLL_SECONDS = 0.05
_PROBE_SECONDS = 1.0


def serve_first_free(host: str, ports: Sequence[int], prefix: str, timeout: float) -> TCPStore:
    """Holds the store on the first port of the list that is free.

    Args:
        host: The address to listen on.
        ports: The ports to try.
        prefix: Names the run whose ranks look for the store.
        timeout: Seconds any request to the store may take.
    """
    for port in ports:
        try:
            store = serve_store(host, port, timeout)
        except LaunchError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
            continue
        run_store(store, prefix).set(_MARK, "1")
        return store
    raise LaunchError(
        f"Every port that this job may use on {host} is taken ({', '.join(map(str, ports))}). "
        "Give all ranks a free one with --port."
    )


def find(host: str, ports: Sequence[int], prefix: str, timeout: float) -> TCPStore:
    """Connects to the run's store, on whichever port of the list rank zero holds it.

    Args:
        host: The address of the store.
        ports: The ports it may be on.
        prefix: Names the run.
        timeout: Seconds until this has failed.
    """
    deadline = time.monotonic() + timeout
    found: queue.SimpleQueue[TCPStore] = queue.SimpleQueue()
    asked: set[int] = set()
    over = threading.Event()

    def ask(port: int) -> None:
        """Looks for the mark; in a thread, since something mute may hold the port."""
        with contextlib.suppress(RuntimeError):  # it was another run's, which has ended
            store = connect(host, port, timeout)
            while not over.wait(_POLL_SECONDS):
                if run_store(store, prefix).check([_MARK]):
                    found.put(store)
                    return
        asked.discard(port)

    try:
        while time.monotonic() < deadline:
            for port in ports:
                if port not in asked and _listens(host, port):
                    asked.add(port)
                    threading.Thread(target=ask, args=(port,), daemon=True).start()
            with contextlib.suppress(queue.Empty):
                return found.get(timeout=_POLL_SECONDS)
    finally:
        over.set()
    raise LaunchError(
        f"No rendezvous of this run on {host} within {timeout:g} s, on any of the ports "
        f"{', '.join(map(str, ports))}: rank 0 has not started there, or its host cannot be "
        "reached. Look at rank 0's output, or give more time with --timeout."
    )


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _PROBE_SECONDS):
        return True
    return False
