"""A file that TensorBoard reads: one record per event, written without a buffer.

tensorboardX's own writer passes events to a background thread through a bounded queue. The first
failed write (a full disk) ends that thread; then the queue fills and training blocks forever.
Queued events are lost when the process is killed. Records are small, so they are written directly
instead: a failed write is known at once, and no event is pending.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import warnings
from io import FileIO
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """An event file, created for its first event, to which no other run writes.

    If the file cannot be written, there is one warning and later events are ignored.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = self._path = folder
        self._file: FileIO | None = None
        self._size = 0
        self._failed = False
        #: True once training was announced with :meth:`begin_session`.
        self.in_session = False

    @property
    def has_events(self) -> bool:
        """True once an event was written."""
        return self._size > 0

    def begin_session(self, first_step: int) -> None:
        """Records that training begins, or continues, at this step.

        TensorBoard then ignores earlier events of this folder for this step and later ones, so that
        a resumed run has one curve, not two.
        """
        self.in_session = True
        self.write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, event: Any) -> None:
        """Appends an event with the current time."""
        if self._failed:
            return
        try:
            if not self._size:
                self._create()
            self._append(event)
        except OSError as error:
            self._failed = True
            self.close()
            warnings.warn(
                f"TensorBoard cannot write to {self._folder}: {error}. Training continues without "
                "it. Free disk space or give another log_dir.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _create(self) -> None:
        # TensorBoard reads files in the order of their names, and a run may start again within a
        # second.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        stamp = f"{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"events.out.tfevents.{stamp}"
        self._append(Event(file_version="brain.Event:2"))

    def _append(self, event: Any) -> None:
        """Writes a record; after an error the file still ends with the record before."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join((length, _checksum(length), data, _checksum(data)))
        if self._file is None:
            self._file = FileIO(self._path, "ab" if self._size else "xb")
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
        if self._file is not None:
            self._file.close()
            self._file = None


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
