"""The folder of a run: names, the newest file, ``latest``, what is kept, and one run only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchbearer_ddp.checkpoints import contents, file, rank_state
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group.failures import TEMPORARY_PREFIX

LATEST = "latest"
#: The form of what is in a file, and those that can be read; one of another form is refused.
FORMAT = 3
_READABLE = (2, 3)
_LOCK = ".lock"
#: How long a run that was killed may take to release the lock.
_RELEASE_SECONDS = 2.0
_POLL_SECONDS = 0.05
_START_AGAIN = (
    "Make room or repair the folder, then start again: the run continues from the newest one."
)
_HELD = (errno.EACCES, errno.EAGAIN)
#: From a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NUMBERED = re.compile(r"(epoch|step)-\d+\.pt")
_OURS = re.compile(rf"{_NUMBERED.pattern}|best-.+\.pt")
#: The locks this process holds. They belong to the process, so a second Trial in it may go on.
_locks: dict[Path, int] = {}


def epoch_name(epochs: int) -> str:
    """The name of the checkpoint after so many epochs."""
    return f"epoch-{epochs:04d}.pt"


def step_name(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{step:07d}.pt"


def best_name(monitor: str) -> str:
    """The name of the best checkpoint by a metric, which cannot lead out of the folder."""
    return f"best-{re.sub(r'[^A-Za-z0-9_.-]', '_', monitor)}.pt"


class Folder:
    """A run's checkpoints on disk; only rank zero has one.

    Args:
        path: The folder.
        keep: How many numbered checkpoints stay; None for all.
        file_mode: The permissions of its files.
        folder_mode: The permissions of the folder, if it is made here.
    """

    def __init__(
        self, path: Path, keep: int | None = None, file_mode: int = 0o600, folder_mode: int = 0o700
    ) -> None:
        self.path = path
        self._keep = keep
        self._file_mode = file_mode
        self._folder_mode = folder_mode
        self._damaged: set[str] = set()

    def open(self) -> None:
        """Makes the folder, claims it for this run, and removes what a killed run left."""
        file.require_checksums()
        failure = f"The checkpoint folder {self.path} cannot be used"
        with _explained(failure, "Give one that this user may write."):
            self.path.mkdir(mode=self._folder_mode, parents=True, exist_ok=True)
            self._claim()
            for left in self.path.glob(f"{TEMPORARY_PREFIX}*"):
                left.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets another run use the folder."""
        descriptor = _locks.pop(self.path.resolve(), None)
        if descriptor is not None:
            os.close(descriptor)

    def newest_first(self) -> list[Path]:
        """Every checkpoint, the last one written first; those without a label before all others."""

        def age(path: Path) -> tuple[float, bool, str]:
            label = file.read_label(path)
            serial = label.serial if label else math.inf
            # The same save may have two names: the numbered one first.
            return -serial, not _NUMBERED.fullmatch(path.name), path.name

        return sorted((p for p in self.path.iterdir() if _OURS.fullmatch(p.name)), key=age)

    def read_newest(self) -> tuple[Path | None, Any, list[str]]:
        """The newest whole checkpoint, its contents, and what is wrong with those after it.

        ``latest`` points to it from now on: not to a damaged file, and not to the one before where
        a kill came between the two.
        """
        problems: list[str] = []
        for path in self.newest_first():
            try:
                payload = file.read(path)
            except CheckpointError as error:
                problems.append(str(error))
                self._damaged.add(path.name)
                continue
            with contextlib.suppress(OSError):  # if nothing can be written, the first save fails
                self._point_latest(path.name)
            return path, payload, problems
        if problems:
            raise CheckpointError(
                f"No checkpoint in {self.path} is whole. {' '.join(problems)} To start afresh, "
                "remove them or give another folder."
            )
        return None, None, []

    def next_serial(self) -> int:
        """The number of the next save."""
        labels = (file.read_label(path) for path in self.newest_first())
        return 1 + max((label.serial for label in labels if label), default=0)

    def put(self, payload: Any, names: Sequence[str], label: Label) -> None:
        """Writes a checkpoint; it is durable under all of its names when this returns.

        All names but the first are links to the same file where the file system has links.
        """
        first, *others = names
        failure = f"The checkpoint {self.path / first} could not be written"
        with _explained(failure, f"The earlier checkpoints are as they were. {_START_AGAIN}"):
            file.write(self.path / first, payload, label, self._file_mode)
            for name in others:
                self._link(first, name)
            if _NUMBERED.fullmatch(first):
                self._point_latest(first)
            file.sync_folder(self.path)
            self._damaged.difference_update(names)

    def find_end_of_run(self, number: int, epochs: int, step: int) -> tuple[str, Any]:
        """The checkpoint at the end of an earlier ``run()``; None as contents if it is gone."""
        for path in self.newest_first():
            label = file.read_label(path)
            if label is not None and (label.epochs, label.step) == (epochs, step):
                with contextlib.suppress(CheckpointError):  # damaged
                    payload = file.read(path)
                    if len(payload[SECTION].get("runs", [])) == number:
                        return str(path), payload
        return "", None

    def remove_old(self, runs: Sequence[Sequence[int]] = ()) -> None:
        """Removes what need not be kept; not in :meth:`put`, as freeing a large file takes time.

        What the last of the earlier ``runs`` ended with (epochs asked for, epochs, steps) stays.
        """
        if self._keep is None:
            return
        # Damaged files do not count: they must not push a whole one out.
        numbered = [
            path
            for path in self.newest_first()
            if _NUMBERED.fullmatch(path.name) and path.name not in self._damaged
        ]
        ends = {epoch_name(epochs) for _, epochs, _ in runs[-self._keep :]}
        ends |= {step_name(step) for _, _, step in runs[-self._keep :]}
        for path in [each for each in numbered[self._keep :] if each.name not in ends]:
            with _explained(f"The old checkpoint {path} could not be removed", _START_AGAIN):
                path.unlink(missing_ok=True)

    def _claim(self) -> None:
        """Takes the lock. It is the process's own: the kernel frees it, however the process ends.

        Unlike flock it is not inherited by DataLoader workers, which may outlive a killed rank.
        """
        key = self.path.resolve()
        if key in _locks:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(key / _LOCK, flags, self._file_mode | 0o600)
        try:
            _lock(descriptor)
        except OSError as error:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            if error.errno in _HELD:
                raise CheckpointError(
                    f"Another run ({holder or 'unknown'}) is writing checkpoints into {self.path}. "
                    "Wait for it to end, or give this run a folder of its own."
                ) from error
            if error.errno not in _NO_LOCKS:
                raise
            return
        _locks[key] = descriptor
        os.ftruncate(descriptor, 0)
        mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.write(descriptor, mine.encode())

    def _link(self, name: str, other: str) -> None:
        try:
            temporary = file.temporary_name(self.path / other)
            os.link(self.path / name, temporary)
            temporary.replace(self.path / other)
        except OSError:  # not every file system has hard links
            with (
                (self.path / name).open("rb") as source,
                file.create(self.path / other, self._file_mode) as target,
            ):
                shutil.copyfileobj(source, target)

    def _point_latest(self, name: str) -> None:
        try:
            temporary = file.temporary_name(self.path / LATEST)
            temporary.symlink_to(name)
            temporary.replace(self.path / LATEST)
        except (OSError, NotImplementedError):  # no symbolic links here: a text file has the name
            with file.create(self.path / LATEST, self._file_mode) as target:
                target.write(f"{name}\n".encode())


def _lock(descriptor: int) -> None:
    """Takes the lock, now or within the time that a run which is being ended may need to free it.

    After a SIGKILL to the launcher the kernel ends the ranks, but one that waits for the disk ends
    only after that: a new run may start before.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _HELD or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _explained(failure: str, remedy: str) -> Iterator[None]:
    """Raises what the operating system refuses as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{failure} ({error.strerror or error}). {remedy}") from error


# Which checkpoint a run continues from, and files of any origin; on rank zero only.


def find(folder: Folder, resume: bool | str | os.PathLike[str]) -> tuple[str, Any]:
    """The path and the contents of the checkpoint to continue from; without one, None as contents.

    ``resume`` is what :class:`~torchbearer_ddp.Checkpoint` was given.
    """
    if isinstance(resume, bool) or resume == "auto":
        path, payload = _newest(folder, resume)
        if path is None:
            return "", None
    else:
        path = Path(resume)
        payload = file.read(path)
    section = payload.get(SECTION, {}) if isinstance(payload, dict) else {}
    if section.get("format") not in _READABLE:
        raise CheckpointError(
            f"{path} has format {section.get('format')}, but this version of torchbearer_ddp "
            f"reads formats {' and '.join(map(str, _READABLE))}. Use the version that wrote it "
            f"({section.get('versions')})."
        )
    return str(path), payload


def _newest(folder: Folder, resume: bool | str) -> tuple[Path | None, Any]:
    if resume is False:
        if old := folder.newest_first():
            raise CheckpointError(
                f"resume=False starts a run afresh, but {folder.path} holds checkpoints already "
                f"(the newest is {old[0].name}). Give another folder, or remove them."
            )
        return None, None
    path, payload, problems = folder.read_newest()
    for problem in problems:
        warnings.warn(f"{problem} Instead, {path} is used.", stacklevel=2)
    if path is None and resume is True:
        raise CheckpointError(
            f"resume=True, but there is no checkpoint in {folder.path}. Give the folder of the run "
            "to continue, or resume='auto' to start afresh where there is none."
        )
    return path, payload


def read_any(path: Path, *, trust: bool) -> dict[str, Any]:
    """The contents of a file in our form: one of ours, verified, or one of other origin.

    Without what each rank had for itself, which only a run that continues can use.
    """
    foreign = file.read_label(path) is None
    found = contents.from_torchbearer(file.read(path, foreign=foreign, trust=trust and foreign))
    found.get(SECTION, {}).pop(rank_state.PARTS, None)
    return found
