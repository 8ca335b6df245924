"""Memory that the ranks of a host share, and that vanishes with the last of them.

The memory never has a name in a file system: it is an anonymous file of one rank, which the others
open through that rank's file descriptor. So nothing is left behind, however the ranks end, and the
size of ``/dev/shm`` (64 MB in many containers) is no limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator

import torch

from torchbearer_ddp.group.hosts import Process, file_id

#: What ranks write at the same time lies on cache lines of its own.
LINE_BYTES = 64
#: A flag of memfd_create: the file is closed in a program that this process becomes.
_CLOSE_ON_EXEC = 1
#: An advice of madvise that Python does not name: the pages are made now, to be written.
_POPULATE_WRITE = 23
#: A directory to take the memory from instead (its free space is then the limit).
DIRECTORY_VARIABLE = "TORCHBEARER_DDP_SHM_DIR"


@contextlib.contextmanager
def offered() -> Iterator[tuple[int, str]]:
    """The descriptor of memory without a size yet, or -1 and the reason why there is none."""
    directory, fd, problem = os.environ.get(DIRECTORY_VARIABLE), -1, ""
    try:
        if directory is not None:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
        elif sys.platform == "linux":
            fd = _memory_file("torchbearer_ddp")
        else:
            problem = f"cannot make shared memory on {sys.platform}"
    except OSError as error:
        problem = f"cannot make shared memory: {error}"
    try:
        yield fd, problem
    finally:
        if fd >= 0:
            os.close(fd)


def _memory_file(name: str) -> int:
    """The descriptor of an anonymous file in memory.

    Some Pythons (of uv, of conda) are built for a C library older than this function, and lack it.

    Raises:
        OSError: If the system makes none.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if (fd := library.memfd_create(name.encode(), _CLOSE_ON_EXEC)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(fd)


class Segment:
    """Zeroed memory, with one part for each rank of this host.

    Every rank of the host maps what the first one offers, and reserves its own part.

    Args:
        owner: The process that offers the memory.
        me: The index of this rank on this host.
        parts: The number of ranks on this host.
        part_bytes: What each rank needs, the same on all of them.

    Raises:
        OSError: If this rank may not open the memory, or there is too little of it.
    """

    def __init__(self, owner: Process, me: int, parts: int, part_bytes: int) -> None:
        self.part_bytes = -(-part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.open(f"/proc/{owner.pid}/fd/{owner.memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if file_id(fd) != owner.file:
                raise OSError(f"process {owner.pid} does not offer this memory any more")
            os.ftruncate(fd, parts * self.part_bytes)  # every rank sets the same size
            # Too little room must be an error here, not a SIGBUS later. Every rank reserves its own
            # part, so that on a machine with several memory nodes the part is near to it.
            os.posix_fallocate(fd, me * self.part_bytes, self.part_bytes)
            self._memory = mmap.mmap(fd, parts * self.part_bytes, flags=mmap.MAP_SHARED)
            # All ranks clear their parts at the same time, where each page would else be cleared
            # when it is first used. (Not each of them all parts: they would wait for each other.)
            with contextlib.suppress(OSError):  # Linux before 5.14
                self._memory.madvise(_POPULATE_WRITE, me * self.part_bytes, self.part_bytes)
        finally:
            os.close(fd)

    @property
    def address(self) -> int:
        """Where the mapping begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def tensors(self, offset: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """A tensor in the part of each rank; the memory lives as long as one of them.

        Each has a storage of its own, so that copying or saving one never copies another.
        """
        begins = range(offset, len(self._memory), self.part_bytes)
        with torch.inference_mode(False):  # made in that mode, they could not be written without it
            return [
                torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=begin)
                for begin in begins
            ]
