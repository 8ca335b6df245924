"""Whether this process can be forked into ranks, and what must be quiet before.

A forked child has one thread only. What other threads held or waited for stays as it was at that
moment, a context of an accelerator cannot be used, and an open connection is shared with everybody.
Idle threads of OpenMP and OpenBLAS are no obstacle: they are ended, and start again when needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from torchbearer_ddp.group.join import usable_cores

_SELF = Path("/proc/self")
#: Open in a process whose driver is initialised.
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel")
#: What is not shared safely; a file has a position too, but it can be opened again.
_CONNECTIONS = (stat.S_IFIFO, stat.S_IFSOCK, 0)
#: Runtimes of OpenMP, as parts of their files' names.
_OPENMP = ("libgomp", "libomp", "libiomp")
_OPENBLAS = ("openblas",)
#: The names that builds of OpenBLAS give one function.
_SET_OPENBLAS = tuple(
    f"{before}openblas_set_num_threads{after}" for before in ("", "scipy_") for after in ("", "64_")
)
_PAUSE_HARD = 2
_STANDARD = 2
#: The kernel's mark of a thread that is ending.
_EXITING = 0x4
#: How long the threads of a library may take to end.
_THREAD_SECONDS = 0.2
_POLL_SECONDS = 0.002


def obstacle(own: Collection[int] = ()) -> str | None:
    """Why this process cannot be forked into ranks, or None; ``own`` descriptors do not count."""
    if sys.platform != "linux":
        return "not on Linux"
    if threading.active_count() > 1 or threading.current_thread() is not threading.main_thread():
        return "it has several threads"
    if sys.gettrace() or sys.getprofile():
        return "a debugger or a profiler traces it"
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if not _is_standard(getattr(sys, name), getattr(sys, f"__{name}__"), number):
            return f"sys.{name} was replaced"
    if torch.cuda.is_initialized() or torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        return "an accelerator is in use"
    found = _shared_connection(own)
    return found or (None if _ends_idle_threads() else "libraries have threads in it")


def _is_standard(stream: object, original: object, number: int) -> bool:
    if stream is None:  # closed before the start: there is nothing to share
        return original is None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stream is original and stream.fileno() == number  # type: ignore[attr-defined]
    return False


def _shared_connection(own: Collection[int]) -> str | None:
    """An open connection or a device that forked processes cannot share."""
    for descriptor, kind, target in open_descriptors():
        if descriptor in own or descriptor <= _STANDARD:
            continue
        if target.startswith(_ACCELERATORS):
            return f"{target} is open"
        if kind in _CONNECTIONS and is_own(descriptor) and target not in _left_by_stores:
            return f"a connection is open ({target})"
    return None


#: What torch's stores keep open in a process that had one: libuv renews it in a forked child.
_left_by_stores: set[str] = set()


@contextlib.contextmanager
def store_begins() -> Iterator[None]:
    """While a store begins: what it opens is no obstacle later, when the store has ended."""
    before = {target for _, _, target in open_descriptors()}
    yield
    _left_by_stores.update({target for _, _, target in open_descriptors()} - before)


def open_descriptors() -> list[tuple[int, int, str]]:
    """The open descriptors of this process, with their kind and what they refer to."""
    found = []
    for entry in (_SELF / "fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            descriptor = int(entry.name)
            kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
            found.append((descriptor, kind, str(entry.readlink())))
    return found


def is_own(descriptor: int) -> bool:
    """True if this program has opened it; Python passes only what is inherited on to others."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)


def is_connection(kind: int) -> bool:
    """True for the kinds that processes cannot share."""
    return kind in _CONNECTIONS


# Threads.


def _ends_idle_threads() -> bool:
    """Ends the idle threads of libraries; True if there is one thread left."""
    if _count_threads() == 1:
        return True
    for library in _loaded(_OPENMP):
        with contextlib.suppress(AttributeError):  # older than OpenMP 5.0
            library.omp_pause_resource_all(_PAUSE_HARD)
    # OpenBLAS ends its threads in every process that forks.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has threads, which is looked at below
        child = os.fork()
    if not child:
        os._exit(0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + _THREAD_SECONDS
    while _count_threads() > 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return _count_threads() == 1


def _count_threads() -> int:
    """The threads of this process, also those that Python does not know.

    One that was joined is listed for a moment longer, and holds nothing any more.
    """
    flags = []
    for entry in (_SELF / "task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            flags.append(int((entry / "stat").read_text().rpartition(")")[2].split()[6]))
    return sum(not each & _EXITING for each in flags)


def _loaded(names: Collection[str]) -> list[ctypes.CDLL]:
    """The libraries of this process whose files have one of these names."""
    lines = (_SELF / "maps").read_text().splitlines()
    paths = {line.partition("/")[2] for line in lines}
    chosen = [path for path in paths if any(name in path.rpartition("/")[2] for name in names)]
    found = []
    for path in sorted(chosen):
        with contextlib.suppress(OSError):  # replaced on the disk since
            found.append(ctypes.CDLL(f"/{path}"))
    return found


#: At the import; None if the script had chosen a number before.
_default_threads: int | None = torch.get_num_threads()
_plausible = {usable_cores(), usable_cores() // 2, os.cpu_count(), (os.cpu_count() or 1) // 2}
if (
    os.environ.get("OMP_NUM_THREADS") != str(_default_threads)
    and _default_threads not in _plausible
):
    _default_threads = None


def limit_threads(number: int) -> None:
    """Gives this forked process its share of the cores, unless the script has chosen a number.

    Libraries read OMP_NUM_THREADS only when they are loaded.
    """
    if torch.get_num_threads() != _default_threads:
        return
    torch.set_num_threads(number)
    for library in _loaded(_OPENMP):
        library.omp_set_num_threads(number)
    for library in _loaded(_OPENBLAS):
        for name in _SET_OPENBLAS:
            with contextlib.suppress(AttributeError):  # another build
                getattr(library, name)(number)
