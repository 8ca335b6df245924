"""The folder of a run: names, the newest, ``latest``, what is kept, and one run only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchbearer_ddp.checkpoints import file
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.errors import CheckpointError

LATEST = "latest"
_LOCK = ".lock"
#: How long a run that was killed may take to let go of the lock.
_LET_GO_SECONDS = 2.0
_POLL_SECONDS = 0.05
_HELD = (errno.EACCES, errno.EAGAIN)
_NUMBERED = re.compile(r"(epoch|step)-\d+\.pt")
_BEST = re.compile(r"best-.+\.pt")
#: The locks this process holds. They belong to the process, so a second Trial in it may go on.
_locks: dict[Path, int] = {}


def epoch_name(epochs: int) -> str:
    """The name of the checkpoint after so many epochs."""
    return f"epoch-{epochs:04d}.pt"


def step_name(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{step:07d}.pt"


def best_name(monitor: str) -> str:
    """The name of the best checkpoint by a metric, which cannot lead out of the folder.

    Args:
        monitor: The metric's name.
    """
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
        self,
        path: Path,
        keep: int | None = None,
        *,
        file_mode: int = 0o600,
        folder_mode: int = 0o700,
    ) -> None:
        self.path = path
        self._keep = keep
        self._file_mode = file_mode
        self._folder_mode = folder_mode
        self._damaged: set[str] = set()

    def open(self) -> None:
        """Makes the folder, claims it for this run, and sweeps what a killed run left.

        Raises:
            CheckpointError: If it cannot be written, or another run is using it.
        """
        try:
            self.path.mkdir(mode=self._folder_mode, parents=True, exist_ok=True)
            self._claim()
            for left in self.path.glob(f"{file.TEMPORARY_PREFIX}*"):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint folder {self.path} cannot be used ({_reason(error)}). Give one "
                "that this user may write."
            ) from error

    def close(self) -> None:
        """Lets another run use the folder."""
        descriptor = _locks.pop(self.path.resolve(), None)
        if descriptor is not None:
            os.close(descriptor)

    def newest_first(self) -> list[Path]:
        """Every checkpoint, the last one written first; those without a label before all others."""

        def age(path: Path) -> tuple[float, bool, str]:
            label = file.read_label(path)
            # The same save may stand under two names: the numbered one first.
            return (
                -label.serial if label else -float("inf"),
                not _NUMBERED.fullmatch(path.name),
                path.name,
            )

        names = (p for p in self.path.iterdir() if p.suffix == ".pt")
        return sorted(
            (p for p in names if _NUMBERED.fullmatch(p.name) or _BEST.fullmatch(p.name)), key=age
        )

    def read_newest(self) -> tuple[Path | None, Any, list[str]]:
        """The newest whole checkpoint, its contents, and what is wrong with those after it.

        ``latest`` points to it from now on: not to a damaged file, and not to the one before where
        a kill came between the two.

        Raises:
            CheckpointError: If there are checkpoints, and all are damaged.
        """
        problems: list[str] = []
        for path in self.newest_first():
            try:
                payload = file.read(path)
            except CheckpointError as error:
                problems.append(str(error))
                self._damaged.add(path.name)
                continue
            with contextlib.suppress(OSError):  # if nothing can be written, the first save says so
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
        """Writes a checkpoint under one or more names; it stands when this returns.

        Args:
            payload: Plain data and tensors.
            names: The names; all but the first are links to the same file where that is possible.
            label: Which save this is.

        Raises:
            CheckpointError: If it cannot be written; the older ones are as they were.
        """
        first, *others = names
        try:
            file.write(self.path / first, payload, label, self._file_mode)
            for name in others:
                self._link(first, name)
            if _NUMBERED.fullmatch(first):
                self._point_latest(first)
            file.sync_folder(self.path)
            self._damaged.difference_update(names)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {self.path / first} could not be written ({_reason(error)}). The "
                "earlier checkpoints are as they were. Make room or repair the folder, then start "
                "again: the run continues from the newest one."
            ) from error

    def remove_old(self) -> None:
        """Removes what need not be kept, apart from :meth:`put`: freeing a large file takes time.

        Raises:
            CheckpointError: If one cannot be removed.
        """
        if self._keep is None:
            return
        # A damaged file keeps nothing alive, and must not push a whole one out.
        numbered = [
            path
            for path in self.newest_first()
            if _NUMBERED.fullmatch(path.name) and path.name not in self._damaged
        ]
        for path in numbered[self._keep :]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"The old checkpoint {path} could not be removed ({_reason(error)}). Repair "
                    "the folder, then start again: the run continues from the newest one."
                ) from error

    def _claim(self) -> None:
        """Takes the lock. It is the process's own: the kernel frees it, however the process ends.

        Unlike flock it is not inherited by DataLoader workers, which may outlive a killed rank.
        """
        key = self.path.resolve()
        if key in _locks:
            return
        descriptor = os.open(
            key / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._file_mode | 0o600
        )
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
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return  # a file system without locks: nothing to be had
        os.ftruncate(descriptor, 0)
        os.write(
            descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        )
        _locks[key] = descriptor

    def _link(self, name: str, other: str) -> None:
        temporary = self.path / f"{file.TEMPORARY_PREFIX}{os.getpid()}-{other}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(self.path / name, temporary)
        except OSError:  # not every file system has hard links
            with (
                (self.path / name).open("rb") as source,
                file.open_private(temporary, self._file_mode) as target,
            ):
                shutil.copyfileobj(source, target)
                os.fsync(target.fileno())
        temporary.replace(self.path / other)

    def _point_latest(self, name: str) -> None:
        temporary = self.path / f"{file.TEMPORARY_PREFIX}{os.getpid()}-{LATEST}"
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(name)
        except (OSError, NotImplementedError):  # no symbolic links here: a text file says the name
            with file.open_private(temporary, self._file_mode) as target:
                target.write(f"{name}\n".encode())
                os.fsync(target.fileno())
        temporary.replace(self.path / LATEST)


def _lock(descriptor: int) -> None:
    """Takes the lock, now or when a run that is on its way out has let go of it.

    After a SIGKILL to the launcher the kernel ends the ranks, but who starts again at once may come
    before that: a process that waits for the disk ends only then.
    """
    deadline = time.monotonic() + _LET_GO_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _HELD or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
