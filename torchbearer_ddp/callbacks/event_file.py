"""A file that TensorBoard reads: one record per event, in the kernel's hands as soon as written.

tensorboardX's own writer hands events to a background thread through a bounded queue. Its first
failed write (a full disk) ends that thread, after which the queue fills and training waits for it
for ever; and what is still queued is lost when the process is ended. Records are small, so they are
written here and now instead: an error is an ``OSError`` where it happens, and nothing is pending.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """Makes a new event file; no other run ever writes to the same one.

    Args:
        folder: The folder, which is made where it is missing.

    Raises:
        OSError: If the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files by name, and a run may start again within a second.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        stamp = f"{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"events.out.tfevents.{stamp}"
        self._file = self._path.open("xb", buffering=0)
        self._size = 0
        self.write(Event(file_version="brain.Event:2"))

    def begin_session(self, first_step: int) -> None:
        """Says that a training begins, or goes on, at this step.

        TensorBoard drops what was written into this folder before about this step and later ones: a
        resumed run has one curve, not two.

        Args:
            first_step: The first step that will be written.

        Raises:
            OSError: If it cannot be written.
        """
        self.write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, event: Any) -> None:
        """Appends an event, whole or not at all.

        Args:
            event: A tensorboardX ``Event``; it is stamped with the time of this call.

        Raises:
            OSError: If it cannot be written; the file then ends with the event before.
        """
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join((length, _checksum(length), data, _checksum(data)))
        if self._file.closed:
            self._file = self._path.open("r+b", buffering=0)
            self._file.seek(self._size)
        try:
            written = 0
            while written < len(record):
                written += self._file.write(record[written:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(record)

    def close(self) -> None:
        """Closes the file; every event is in it already. A later one opens it again."""
        self._file.close()


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
