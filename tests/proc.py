"""What the kernel knows about processes, read from ``/proc``: the only place that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
#: States of a TCP connection as the kernel writes them.
ESTABLISHED, LISTENING = "01", "0A"


def marked(*variables: str) -> list[int]:
    """The running processes whose environment has all these ``NAME=value`` entries.

    A variable finds every process that descends from the one that set it, also after its parent
    has ended.
    """
    wanted = {variable.encode() for variable in variables}
    return [pid for pid in _pids() if wanted <= _environment(pid) and is_running(pid)]


def is_running(pid: int) -> bool:
    """True if the process exists and has not ended; one that nobody has waited for has ended."""
    fields = _status(pid)
    return bool(fields) and fields[0] != "Z"


def parent(pid: int) -> int:
    """The parent of a running process."""
    return int(_status(pid)[1])


def name(pid: int) -> str:
    """The name of a running process's program."""
    return (_PROC / str(pid) / "comm").read_text().strip()


def command(pid: int) -> str:
    """The command line of a process, empty if it has ended."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def children() -> list[int]:
    """The processes that this thread has started and not yet waited for."""
    return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]


def count_threads() -> int:
    """The number of threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def count_descriptors() -> int:
    """The number of open files of this process, the one that lists them included."""
    return len(list(Path("/proc/self/fd").iterdir()))


def maps(text: str) -> bool:
    """True if this process has mapped a file with this text in its name."""
    return count_maps(text) > 0


def count_maps(text: str) -> int:
    """How often this process has mapped files with this text in their names."""
    return Path("/proc/self/maps").read_text().count(text)


def is_mapped_by_any(name: str) -> bool:
    """True if a running process has mapped a file of this name."""
    return any(name.encode() in _read(pid, "maps") for pid in _pids())


def listening_addresses(pid: int) -> list[str]:
    """The addresses that a process listens on, in hexadecimal."""
    sockets = {f"socket:[{inode}]": local for local, _, inode in _connections(pid, LISTENING)}
    found = []
    for link in (_PROC / str(pid) / "fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # closed in the meantime
        if target in sockets:
            found.append(sockets[target].partition(":")[0])
    return found


def connection_to(pid: int, port: int) -> str | None:
    """The local end of an established connection to a port, in a process's network namespace."""
    for local, remote, _ in _connections(pid, ESTABLISHED):
        if int(remote.partition(":")[2], 16) == port:
            return local
    return None


def _connections(pid: int, state: str) -> Iterator[tuple[str, str, str]]:
    """Local address, remote address and inode of each TCP socket in this state."""
    for table in ("tcp", "tcp6"):
        for row in (_PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == state:
                yield fields[1], fields[2], fields[9]


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.glob("[0-9]*")]


def _environment(pid: int) -> set[bytes]:
    return set(_read(pid, "environ").split(b"\0"))


def _status(pid: int) -> list[str]:
    """The fields after the program's name, which may contain anything: state, parent, ..."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, entry: str) -> bytes:
    """Empty if the process has just ended, or is not ours to look at."""
    try:
        return (_PROC / str(pid) / entry).read_bytes()
    except OSError:
        return b""
