"""One checkpoint file: written atomically, verified when read, plain data only.

The file is what ``torch.save`` writes: a zip archive with a CRC-32 for each record, which
``torch.load`` ignores and :func:`read` checks before a byte is unpickled. The archive's comment is
a label that says which save this is; it can be read without reading the rest. It also holds a
CRC-32 of the list of records: a flipped bit there can make torch skip a record, and return a tensor
of whatever its memory held before.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import bounds
from torchbearer_ddp.checkpoints.opening import open_to_read
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group.failures import TEMPORARY_PREFIX

_MARK = b"torchbearer_ddp checkpoint "
_LONGEST_COMMENT = 4096
#: So many file names of 255 characters fit into it.
MOST_NAMES = 8
_COUNT = checked.whole(0)
_LABEL = checked.record(
    {"serial": _COUNT, "epochs": _COUNT, "step": _COUNT, "records": _COUNT},
    names=checked.items(checked.text()),
)
#: What torch reads of each entry in the list of records.
_LISTED = ("filename", "CRC", "file_size", "compress_size", "header_offset", "external_attr")


@dataclass(frozen=True)
class Label:
    """Which save a file is.

    Attributes:
        serial: Counts the saves into a folder; the newest has the highest.
        epochs: The number of epochs done.
        step: The number of training steps done, over all epochs.
        records: The CRC-32 of the archive's list of records; set when the file is written.
        names: The other names of the same save, if it has several.
    """

    serial: int
    epochs: int
    step: int
    records: int = field(default=0, compare=False)
    names: Sequence[str] = field(default=(), compare=False)

    def comment(self) -> bytes:
        """The comment of an archive with this label; it has a CRC-32 of its own."""
        entries = {name: each for name, each in asdict(self).items() if name != "names" or each}
        text = json.dumps(entries).encode()
        return _MARK + text + b" %08x" % zlib.crc32(text)


def write(path: Path, payload: Any, label: Label, mode: int = 0o600) -> None:
    """Writes a file of plain data; it replaces the one at the path only when it is durable."""
    require_checksums()
    with create(path, mode) as file:
        stream = _Stream(file)
        torch.save(payload, cast(BinaryIO, stream))
        if stream.error is not None:
            raise stream.error
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = replace(label, records=_records_crc(archive)).comment()


def require_checksums() -> None:
    """Refuses to go on where ``torch.save`` was told to leave out the checksums."""
    if not torch.serialization.get_crc32_options():
        raise CheckpointError(
            "torch.serialization.set_crc32_options(False) is in force, but a checkpoint needs the "
            "CRC-32 of its records to be verified. Remove that call, or set it to True."
        )


@contextlib.contextmanager
def create(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A new file that gets its name at the end of the block, when it is durable."""
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w+b") as file:
            os.fchmod(descriptor, mode)  # whatever the umask is
            yield file
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """The name under which a file is made before it gets its own; nothing is there."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    temporary.unlink(missing_ok=True)
    return temporary


def sync_folder(folder: Path) -> None:
    """Makes new, replaced and removed names durable: a file's own fsync does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Stream:
    """What torch writes to; it keeps an error, since torch would raise one without errno."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Called by torch."""


def read_label(path: Path, *, follow: bool = True) -> Label | None:
    """Which save a file is, or None where the label is gone: truncated, or not one of ours."""
    try:
        with open_to_read(path, follow=follow) as file:
            return _label_of(file)
    except (OSError, CheckpointError):
        return None


def _label_of(file: BinaryIO) -> Label | None:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_COMMENT))
    comment = b"".join(file.read(_LONGEST_COMMENT).rpartition(_MARK)[1:])
    try:
        text = comment[len(_MARK) :].rpartition(b" ")[0]
        label = Label(**checked.from_json(text, _LABEL, "the label", _LONGEST_COMMENT))
    except (checked.Unexpected, TypeError):
        return None
    return label if label.comment() == comment else None


def read(path: Path, *, follow: bool = True) -> Any:
    """The contents of a checkpoint, verified: its checksums, and that it holds plain data only.

    Whatever is wrong with the file raises CheckpointError, so that an older one can be used.
    ``follow`` allows a symbolic link.
    """
    return _read(path, follow=follow, verify=_verify, weights_only=True)


def read_foreign(path: Path, *, trust: bool = False) -> Any:
    """The contents of a file of other origin; what is not plain data only if it is trusted.

    Whatever is wrong with the file raises CheckpointError.
    """
    return _read(path, follow=True, verify=_require_plain_archive, weights_only=not trust)


def verify_records(path: Path) -> None:
    """Verifies the checksums of the records of a file without a label."""
    with open_to_read(path) as file:
        if zipfile.is_zipfile(file):  # ours are; others may hold anything
            with zipfile.ZipFile(file) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise _damaged(path, damaged)


def _read(
    path: Path, *, follow: bool, verify: Callable[[BinaryIO, Path], None], weights_only: bool
) -> Any:
    try:
        with open_to_read(path, follow=follow) as file:
            verify(file, path)
            if weights_only:
                bounds.check_pickles(file, str(path))
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=weights_only)
            if weights_only:
                bounds.Census(os.fstat(file.fileno()).st_size).take(loaded, str(path))
            return loaded
    except CheckpointError:
        raise
    except checked.Unexpected as error:
        raise CheckpointError(f"{error}. Use another one.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than plain data, or is not a checkpoint at all; nothing in it was "
            "run. torchbearer's own checkpoints are like that: if you trust whoever wrote it, "
            "Checkpoint.load(trial, path, trust=True) loads it."
        ) from error
    except Exception as error:  # torch raises errors of many kinds, and so does what it loads
        raise CheckpointError(
            f"{path} is not a whole file of torch.save ({checked.first_line(error)}). Use another "
            "one."
        ) from error


def _verify(file: BinaryIO, path: Path) -> None:
    label = _label_of(file)
    if label is None:
        raise CheckpointError(
            f"{path} has no label at its end: it is truncated, or not written by Checkpoint. "
            "Checkpoint.load(trial, path) reads files of other origin."
        )
    try:
        with zipfile.ZipFile(file) as archive:
            _require_plain(archive, file, path)
            damaged = archive.testzip()
            if damaged is None and _records_crc(archive) != label.records:
                damaged = "list of records"
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises errors of many kinds
        damaged = f"list of records ({checked.first_line(error)})"
    if damaged is not None:
        raise _damaged(path, damaged)


def _damaged(path: Path, record: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: the CRC-32 of its {record} is not the one that was written. Use an "
        "older checkpoint, and have the disk or the copy checked."
    )


def _require_plain_archive(file: BinaryIO, path: Path) -> None:
    """Refuses an archive that is larger than its file; torch has formats without one, too."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            _require_plain(archive, file, path)


def _require_plain(archive: zipfile.ZipFile, file: BinaryIO, path: Path) -> None:
    records = archive.infolist()
    size = sum(record.file_size for record in records)
    compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
    if compressed or size > os.fstat(file.fileno()).st_size:
        raise CheckpointError(
            f"{path} is an archive whose records are compressed or overlap, which torch.save does "
            "not write. Use another one."
        )


def _records_crc(archive: zipfile.ZipFile) -> int:
    listed = [[getattr(record, name) for name in _LISTED] for record in archive.infolist()]
    return zlib.crc32(repr(listed).encode())
