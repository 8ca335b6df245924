"""Memory that the ranks of a host share, and that vanishes with the last of them.

The memory never has a name in a file system: it is an anonymous file of one rank, which the others
open through that rank's file descriptor. So nothing is left behind, however the ranks end, and the
size of ``/dev/shm`` (64 MB in many containers) is no limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from typing import TypeVar

import torch

from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.gradients.transports.hosts import Process
from torchbearer_ddp.group import collectives

_S = TypeVar("_S", bound=ctypes.Structure)
#: A directory to take the memory from instead (its free space is then the limit).
DIRECTORY_VARIABLE = "TORCHBEARER_DDP_SHM_DIR"


class SegmentError(DistributedError):
    """The ranks of a host cannot share memory; the same message on every rank of the world."""


class Segment:
    """A mapped piece of shared memory, with one part for each rank of the host.

    Args:
        memory: The mapping.
        part_bytes: The size of each part, a multiple of the page size.
    """

    def __init__(self, memory: mmap.mmap, part_bytes: int) -> None:
        self.memory = memory
        self.part_bytes = part_bytes

    @property
    def address(self) -> int:
        """Where the mapping begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def tensor(self, part: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the memory, which lives as long as the tensor does.

        Args:
            part: Whose part: the index of the rank on this host.
            offset: Bytes from the beginning of the part.
            numel: The number of elements, at least 1.
            dtype: Their type.
        """
        return torch.frombuffer(
            self.memory, dtype=dtype, count=numel, offset=part * self.part_bytes + offset
        )

    def place(self, part: int, offset: int, kind: type[_S]) -> _S:
        """A structure in the memory."""
        return kind.from_buffer(self.memory, part * self.part_bytes + offset)


def share(local: list[Process], part_bytes: int) -> Segment:
    """Makes zeroed memory that the ranks of each host share; collective over the whole world.

    Args:
        local: The processes of this host, in rank order.
        part_bytes: The bytes each rank needs.

    Raises:
        SegmentError: On every rank of the world, if any rank of it could not do its part.
    """
    part_bytes = max(1, -(-part_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    me = [process.rank for process in local].index(collectives.rank())
    fd, problem = -1, None
    with contextlib.ExitStack() as stack:
        if me == 0:
            try:
                fd = _create()
                stack.callback(os.close, fd)
                os.ftruncate(fd, part_bytes * len(local))
            except OSError as error:
                problem = f"cannot make shared memory: {error}"
        offers = _agreed((fd, problem), "the offer of shared memory")
        memory = None
        try:
            memory = _attach(local[0].pid, offers[local[0].rank], me, part_bytes, len(local))
        except OSError as error:
            problem = f"cannot share memory with rank {local[0].rank}: {error}"
        _agreed((0, problem), "the shared memory")  # the maker's descriptor stays open until here
    if memory is None:
        raise SegmentError("unreachable: the problem was agreed on")
    return Segment(memory, part_bytes)


def _create() -> int:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is not None:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    if sys.platform != "linux":
        raise OSError(f"not implemented on {sys.platform}")
    return os.memfd_create("torchbearer_ddp", os.MFD_CLOEXEC)


def _attach(pid: int, fd: int, me: int, part_bytes: int, parts: int) -> mmap.mmap:
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Too little room must be an error here, not a SIGBUS later. Every rank takes its own part,
        # so that on a machine with several memory nodes the part is near to it.
        os.posix_fallocate(opened, me * part_bytes, part_bytes)
        return mmap.mmap(opened, part_bytes * parts, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(opened)


def _agreed(outcome: tuple[int, str | None], what: str) -> list[int]:
    """What each rank found, unless any rank has a problem: then all raise the first one."""
    found = collectives.all_gather(outcome, what)
    for rank, (_, problem) in enumerate(found):
        if problem is not None:
            raise SegmentError(f"rank {rank} {problem}")
    return [value for value, _ in found]
