"""Hashing a file, and sending it to the disk, while it is still being written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from queue import SimpleQueue

_PIECE_BYTES = 2**20


class Follower:
    """Follows the writer of a file in a thread of its own.

    Writing, hashing and the disk each take about as long, so one after the other would hold
    training up three times as long. The file is read back, as a rule from memory: what torch gives
    to be written is gone once it is.

    Example: ::

        >>> from torchbearer_ddp.checkpoints.follower import Follower
        >>> with open('/dev/null', 'rb') as file, Follower(file.fileno()) as follower:
        ...     follower.follow(0, to_the_end=True)
        >>> follower.digest.hexdigest()[:8]
        'e3b0c442'

    Args:
        descriptor: The file, open for reading too.

    Attributes:
        digest: The SHA-256, of the whole file once the ``with`` block is left.
    """

    def __init__(self, descriptor: int) -> None:
        self.digest = hashlib.sha256()
        self._descriptor = descriptor
        self._told = 0
        self._ends: SimpleQueue[int | None] = SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="torchbearer_ddp-follower")

    def __enter__(self) -> Follower:
        with contextlib.suppress(RuntimeError):  # python may start no more threads when it exits
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ends.put(None)
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def follow(self, written: int, *, to_the_end: bool = False) -> None:
        """Tells how far the file is written; the thread is woken for whole pieces only.

        Args:
            written: The number of bytes from the beginning.
            to_the_end: True if there will be no more.
        """
        if to_the_end or written - self._told >= _PIECE_BYTES:
            self._told = written
            self._ends.put(written)

    def _run(self) -> None:
        piece = memoryview(bytearray(_PIECE_BYTES))
        done = 0
        try:
            while (end := self._ends.get()) is not None:
                begin = done
                while done < end:
                    count = os.preadv(self._descriptor, [piece[: end - done]], done)
                    if not count:
                        raise OSError(errno.EIO, "it became shorter while it was being written")
                    self.digest.update(piece[:count])
                    done += count
                self._start_writeback(begin, done - begin)
        except OSError as error:
            self._error = error

    def _start_writeback(self, begin: int, length: int) -> None:
        """Lets the disk begin, so that little is left to wait for in the end."""
        if length and hasattr(os, "posix_fadvise"):  # only a hint, and not known everywhere
            os.posix_fadvise(self._descriptor, begin, length, os.POSIX_FADV_DONTNEED)
