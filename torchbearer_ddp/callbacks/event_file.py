"""A file that TensorBoard reads: one record per event, written without a buffer.

tensorboardX's own writer passes events to a background thread through a bounded queue. The first
failed write (a full disk) ends that thread; then the queue fills and training blocks forever.
Queued events are lost when the process is killed. Records are small, so they are written directly
instead: an error is an ``OSError`` of the call that writes, and no event is pending.
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
    """A new event file, to which no other run writes; every method may raise ``OSError``."""

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
        """Records that training begins, or continues, at this step.

        TensorBoard then ignores earlier events of this folder for this step and later ones, so that
        a resumed run has one curve, not two.
        """
        self.write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, event: Any) -> None:
        """Appends an event with the current time; after an error the file has only whole events."""
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
        """Closes the file; the next event opens it again."""
        self._file.close()


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
