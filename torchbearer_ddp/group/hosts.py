"""Which ranks share a host, and so can share memory; and whether their processes are alive."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

#: Set on some ranks of a test to let one machine act as several hosts.
HOST_ID_VARIABLE = "TORCHBEARER_DDP_HOST_ID"


@dataclass(frozen=True)
class Process:
    """One rank's process, as the other ranks see it.

    Attributes:
        host: The :func:`host_id` there.
        started: When it started, in the kernel's ticks: a recycled process id has another.
        machine: The architecture and byte order.
        memory: The file descriptor of the memory that it offers to its host, or -1.
        file: Which file that is: another process, or another file, may have its number by now.
        problem: Why it could not offer memory, or empty.
    """

    rank: int
    host: str
    pid: int
    started: int
    machine: str
    memory: int = -1
    file: str = ""
    problem: str = ""

    @classmethod
    def current(cls, rank: int, memory: int = -1, problem: str = "") -> Process:
        """This process."""
        machine = f"{platform.machine()}, {sys.byteorder} endian"
        started = start_time(os.getpid()) or 0
        file = file_id(memory) if memory >= 0 else ""
        return cls(rank, host_id(), os.getpid(), started, machine, memory, file, problem)

    def alive(self) -> bool:
        """False once the process has ended (also if its parent has not noticed yet)."""
        return self.started == start_time(self.pid)


#: The processes of each host, in rank order; the hosts in the order of their first rank.
Hosts = list[list[Process]]


def host_id() -> str:
    """The same for two processes that can open each other's memory, else different.

    Containers on one machine share its boot id but not its processes: each counts as a host.
    """
    if HOST_ID_VARIABLE in os.environ:
        return os.environ[HOST_ID_VARIABLE]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux: where shared memory is not used, only the count of hosts matters
        return platform.node()


def file_id(descriptor: int) -> str:
    """The same for two descriptors of one file of this host, else different."""
    found = os.fstat(descriptor)
    return f"{found.st_dev}:{found.st_ino}"


def start_time(pid: int) -> int | None:
    """When a process of this host started, in ticks since boot; None if it has ended."""
    try:
        # The name, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in (b"Z", b"X") else int(started)


def by_host(processes: list[Process]) -> Hosts:
    """The processes of all ranks, given in rank order, by their host."""
    hosts: dict[str, list[Process]] = {}
    for process in processes:
        hosts.setdefault(process.host, []).append(process)
    return list(hosts.values())
