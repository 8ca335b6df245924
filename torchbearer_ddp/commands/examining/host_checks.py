"""What the doctor tries on one host: shared memory, ports, names, and a folder's disk."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torchbearer_ddp.commands import facts
from torchbearer_ddp.group import hosts, network, segment
from torchbearer_ddp.group.join import versions

#: How many ports are opened at the same time, as a group of ranks does.
_PORTS = 32
_SEGMENT_BYTES = 64 * 2**20
_FILE_BYTES = 64 * 2**20
_PIECE = os.urandom(2**20)
_WRITE_SECONDS = 3.0
_LISTENING = "0A"


def check(host: str) -> dict[str, Any]:
    """What is found without any other rank, in a run whose rank zero is at this host."""
    gloo = facts.gloo_interface(host)
    found = facts.collect()
    return {
        "host": socket.gethostname(),
        # Containers and network namespaces of one machine have different networks.
        "host id": f"{hosts.host_id()}/{_network_namespace()}",
        "pid": os.getpid(),
        "versions": {
            **versions(),
            "torchbearer": found["versions"].get("torchbearer", "?"),
            "Python": ".".join(map(str, sys.version_info[:2])),
        },
        "processor": found["processor"],
        "memory": found["memory"],
        "gpus": len(found["gpus"]["visible"]),
        "network": found["network"],
        "variables": found["environment"],
        "gloo": gloo,
        "rendezvous": facts.resolve(host),
        "ports": ports(),
        "segment": shared_segment(),
    }


def _network_namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/net").readlink())
    return ""


def addresses(gloo: facts.Facts, host: str) -> tuple[str, dict[str, str]]:
    """The address at which others reach this rank, and the addresses of all interfaces."""
    own = gloo.get("address") or network.loopback(host) or network.route_to(host) or ""
    if gloo.get("interface") and not gloo.get("address"):
        own = ""  # GLOO_SOCKET_IFNAME names an interface that has no address
    every = {each["name"]: each["address"] for each in facts.interfaces() if each["address"]}
    return own, {name: each for name, each in every.items() if network.loopback(each) is None}


def ports() -> dict[str, Any]:
    """How many ports can be open at the same time, of those that the system hands out."""
    opened, problem = [], ""
    try:
        for _ in range(_PORTS):
            opened.append(socket.create_server(("", 0)))
    except OSError as error:
        problem = error.strerror or str(error)
    for each in opened:
        each.close()
    text = ""
    with contextlib.suppress(OSError):
        text = "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return {"wanted": _PORTS, "opened": len(opened), "problem": problem, "range": text}


def shared_segment() -> dict[str, Any]:
    """Whether ranks of this host can share memory, and how fast it is first written."""
    with segment.offered() as (descriptor, problem):
        if problem:
            return {"problem": problem}
        try:
            started = time.perf_counter()
            os.posix_fallocate(descriptor, 0, _SEGMENT_BYTES)
            return {"bytes": _SEGMENT_BYTES, "seconds": time.perf_counter() - started}
        except OSError as error:
            return {"problem": error.strerror or str(error)}


def write_speed(folder: Path, mark: str) -> dict[str, Any]:
    """How fast a file is written and made durable in a folder, as a checkpoint is.

    A file called ``mark`` is left for :func:`sees`; :func:`clean` removes it.
    """
    path = folder / mark
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            written, started = 0, time.perf_counter()
            while written < _FILE_BYTES and time.perf_counter() - started < _WRITE_SECONDS:
                written += file.write(_PIECE)
            file.flush()
            wrote = time.perf_counter()
            os.fsync(file.fileno())
            synced = time.perf_counter()
        path.write_bytes(b"")
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return {"problem": error.strerror or str(error)}
    return {
        "bytes": written,
        "write": written / max(wrote - started, 1e-9),
        "durable": written / max(synced - started, 1e-9),
        "fsync": synced - wrote,
    }


def sees(folder: Path, mark: str) -> bool:
    """True if the file that rank zero has left in the folder is there on this host."""
    with contextlib.suppress(OSError):
        os.listdir(folder)  # noqa: PTH208 - makes network file systems look again
    return (folder / mark).exists()


def clean(folder: Path, mark: str) -> None:
    """Removes the file of :func:`write_speed`."""
    with contextlib.suppress(OSError):
        (folder / mark).unlink(missing_ok=True)


# Why ranks do not meet.


def why_no_rendezvous(host: str, port: int, seconds: float = 3.0) -> tuple[str, str]:
    """What there is at an address where no rendezvous was found, and what to do about it."""
    place = f"{host}:{port}"
    remedy = (
        f"Start rank 0 on {host} with the same --port, and open that port and those of the "
        "system's own range between the hosts."
    )
    known = facts.resolve(host)
    if not known["addresses"]:
        found = f"The name {host} has no address here ({known['problem']})."
        return found, "Give --host a name that every host knows, or the address itself."
    try:
        with socket.create_connection((host, port), seconds):
            found = (
                f"Something accepts connections at {place} but does not answer as a rendezvous: "
                "another program holds that port."
            )
            return found, f"End that program, or give every rank another --port than {port}."
    except TimeoutError:
        found = f"{place} gave no answer within {seconds:g} s: a firewall, or a link that is cut."
    except OSError as error:
        found = f"{place} cannot be reached from here ({(error.strerror or str(error)).lower()})."
        if error.errno == errno.ECONNREFUSED:
            found = f"{host} answers, but nothing listens on port {port}: rank 0 is not there."
    return found, remedy


def holder(port: int) -> str:
    """The process of this host that listens on a port, as far as it can be seen."""
    sockets = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                cells = line.split()
                if cells[3] == _LISTENING and int(cells[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{cells[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                if str(descriptor.readlink()) in sockets:
                    return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return "another program"
