"""One checkpoint file: written atomically, verified when read, plain data only.

The file is what ``torch.save`` writes, a zip archive. Its comment carries a label (which save this
is) and a SHA-256 over everything before. So the checksum travels with the file, ``torch.load`` does
not mind it, and the label can be read without loading anything. A truncated file has lost its
comment; any other damage shows in the checksum, before a byte of it is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from torchbearer_ddp.checkpoints.follower import Follower
from torchbearer_ddp.errors import CheckpointError

#: Temporary files begin like this, so that those of a killed run can be found and swept.
TEMPORARY_PREFIX = ".tmp-"

_MARK = b"torchbearer_ddp checkpoint "
_END_OF_ARCHIVE = b"PK\x05\x06"
_END_BYTES = 22
_HEX_BYTES = 64
_LONGEST_COMMENT = 512
_READ_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Label:
    """Which save a file is.

    Args:
        serial: Counts the saves into a folder; the newest has the highest.
        epochs: The number of epochs done.
        step: The number of training steps done, over all epochs.
    """

    serial: int
    epochs: int
    step: int


def write(path: Path, payload: Any, label: Label, mode: int = 0o600) -> None:
    """Writes a file under a temporary name, makes it durable, and only then gives it its name.

    Args:
        path: The file; one that stands there already is replaced in one step.
        payload: Plain data and tensors.
        label: Which save this is.
        mode: The file's permissions.

    Raises:
        OSError: If it cannot be written; what stood at the path still does.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        with open_private(temporary, mode) as file:
            _write_archive(file, payload, label)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def open_private(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A new file, never readable by more than the mode says, whatever the umask is."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        os.fchmod(descriptor, mode)
        yield file


def sync_folder(folder: Path) -> None:
    """Makes new, replaced and removed names durable: a file's own fsync does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_archive(file: BinaryIO, payload: Any, label: Label) -> None:
    with Follower(file.fileno()) as follower:
        stream = _Stream(file, follower)
        torch.save(payload, cast(BinaryIO, stream))
        stream.finish()
    prefix = _MARK + json.dumps(asdict(label)).encode()
    follower.digest.update(prefix)
    comment = prefix + follower.digest.hexdigest().encode()
    file.seek(-2, os.SEEK_END)  # the length of the comment, 0 so far, ends the archive
    _write_all(file, memoryview(struct.pack("<H", len(comment)) + comment))


class _Stream:
    """What torch writes to; an error is kept for later, as torch's writer cannot pass one on."""

    def __init__(self, file: BinaryIO, follower: Follower) -> None:
        self._file = file
        self._follower = follower
        self._written = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                _write_all(self._file, view)
            except OSError as error:
                self._error = error
            else:
                self._written += len(view)
                self._follower.follow(self._written)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here, but torch asks."""

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        self._follower.follow(self._written, to_the_end=True)


def _write_all(file: BinaryIO, view: memoryview) -> None:
    """Writes the whole of it: an unbuffered file may take less at a time."""
    while view:
        view = view[file.write(view) :]


def read_label(path: Path) -> Label | None:
    """Which save a file is, or None where the label is gone: truncated, or not one of ours.

    Args:
        path: The file.
    """
    try:
        with path.open("rb") as file:
            found = _read_comment(file)
    except OSError:
        return None
    return found[0] if found else None


def read(path: Path) -> Any:
    """The contents of a file, verified.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it is missing, damaged, or not one of ours.
    """
    try:
        with path.open("rb") as file:
            found = _read_comment(file)
            if found is None:
                raise CheckpointError(
                    f"{path} has no checksum at its end: it is truncated, or not written by "
                    "Checkpoint. Checkpoint.load(trial, path) reads files of other origin."
                )
            _, comment, length = found
            if _digest(file, length, comment) != comment[-_HEX_BYTES:].decode():
                raise CheckpointError(
                    f"{path} is damaged: its SHA-256 is not the one that was written. Use an older "
                    "checkpoint, and have the disk or the copy checked."
                )
            file.seek(0)
            return load(file, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error


def load(file: BinaryIO, path: Path, *, trust: bool = False) -> Any:
    """What ``torch.load`` finds, refusing whatever is not plain data.

    Args:
        file: The open file.
        path: Its name, for messages.
        trust: Do not refuse it, but let it run what it holds.

    Raises:
        CheckpointError: If it holds anything that could run code, or is not a whole file.
    """
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            if not trust:
                raise
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than plain data, or is not a checkpoint at all; nothing in it was "
            "run. torchbearer's own checkpoints are like that: if you trust whoever wrote it, "
            "Checkpoint.load(trial, path, trust=True) loads it."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is not a whole file of torch.save ({reason}). Use another one."
        ) from error


def _read_comment(file: BinaryIO) -> tuple[Label, bytes, int] | None:
    """The label, the comment it is from, and the number of bytes before the comment."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_BYTES - _LONGEST_COMMENT))
    tail = file.read()
    at = tail.rfind(_END_OF_ARCHIVE)
    if at < 0 or len(tail) - at < _END_BYTES:
        return None
    comment = tail[at + _END_BYTES :]
    (length,) = struct.unpack("<H", tail[at + _END_BYTES - 2 : at + _END_BYTES])
    if length != len(comment) or not comment.startswith(_MARK):
        return None
    try:
        label = Label(**json.loads(comment[len(_MARK) : -_HEX_BYTES]))
    except (ValueError, TypeError):
        return None
    return label, comment, size - len(comment)


def _digest(file: BinaryIO, length: int, comment: bytes) -> str:
    """The SHA-256 of the archive as torch wrote it, with no comment yet, and of the label."""
    digest = hashlib.sha256()
    file.seek(0)
    left = length - 2
    while left and (piece := file.read(min(left, _READ_BYTES))):
        digest.update(piece)
        left -= len(piece)
    digest.update(b"\0\0")
    digest.update(comment[:-_HEX_BYTES])
    return digest.hexdigest()
