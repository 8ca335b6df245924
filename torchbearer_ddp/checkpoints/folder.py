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
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import file, form, opening
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group.failures import TEMPORARY_PREFIX

LATEST = "latest"
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
#: What :func:`best_name` returns.
_BEST = re.compile(r"best-[A-Za-z0-9_.-]*\.pt")
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
        #: Those that are whole, but could not be put back.
        self._passed_over: set[str] = set()
        #: False where others could have put a link into the folder.
        self._follow = True

    def open(self) -> None:
        """Makes the folder, claims it for this run, and removes what a killed run left."""
        file.require_checksums()
        failure = f"The checkpoint folder {self.path} cannot be used"
        with _explained(failure, "Give one that this user may write."):
            self.path.mkdir(mode=self._folder_mode, parents=True, exist_ok=True)
            self._find_others()
            self._claim()
            self._require_latest()
            for left in self.path.glob(f"{TEMPORARY_PREFIX}*"):
                if not left.is_dir():
                    left.unlink(missing_ok=True)

    def _find_others(self) -> None:
        """Says so if others can write here, unless that is wished; their links are not followed."""
        others = opening.written_by_others(self.path)
        self._follow = not others
        if others and not self._folder_mode & (stat.S_IWGRP | stat.S_IWOTH):
            warnings.warn(
                f"The checkpoint folder {self.path} {others}, who could replace or remove the "
                f"checkpoints in it. Run chmod 700 {self.path}, or name a folder of your own.",
                stacklevel=2,
            )

    def _require_latest(self) -> None:
        latest = self.path / LATEST
        if latest.is_dir() and not latest.is_symlink():
            raise CheckpointError(
                f"{latest} is a folder, but a link of that name is to point to the newest "
                "checkpoint. Remove it, or give another folder."
            )

    def close(self) -> None:
        """Lets another run use the folder."""
        descriptor = _locks.pop(self.path.resolve(), None)
        if descriptor is not None:
            os.close(descriptor)

    def newest_first(self) -> list[Path]:
        """Every checkpoint, the last one written first; those without a label before all others."""
        return [path for path, _ in self._labelled()]

    def _labelled(self) -> list[tuple[Path, Label | None]]:
        def age(found: tuple[Path, Label | None]) -> tuple[float, bool, str]:
            path, label = found
            serial = label.serial if label else math.inf
            # The same save may have two names: the numbered one first.
            return -serial, not _NUMBERED.fullmatch(path.name), path.name

        paths = [path for path in self.path.iterdir() if _OURS.fullmatch(path.name)]
        return sorted([(p, file.read_label(p, follow=self._follow)) for p in paths], key=age)

    def read_newest(
        self, check: checked.Form = checked.anything
    ) -> tuple[Path | None, Any, list[str]]:
        """The newest whole checkpoint, its contents, and what is wrong with those after it.

        One whose contents do not pass the check is not whole. ``latest`` points to it from now on:
        not to a damaged file, and not to the one before where a kill came between the two. It gets
        its other names too where a kill came before those.
        """
        problems: list[str] = []
        for path, label in [e for e in self._labelled() if e[0].name not in self._passed_over]:
            problem, payload = self._read(path, check)
            if problem:
                problems.append(problem)
                self._damaged.add(path.name)
                continue
            with contextlib.suppress(OSError):  # if nothing can be written, the first save fails
                self._point_latest(path.name)
                for name in self._missing_names(label):
                    self._link(path.name, name)
            return path, payload, problems
        if problems:
            raise CheckpointError(
                f"No checkpoint in {self.path} is whole. {' '.join(problems)} To start afresh, "
                "remove them or give another folder."
            )
        return None, None, []

    def _missing_names(self, label: Label | None) -> list[str]:
        """The other names of a save under which there is an older one, or none."""
        if label is None or not label.names:
            return []
        found = {path.name: each for path, each in self._labelled()}
        missing = []
        for name in filter(_BEST.fullmatch, label.names):
            there = found.get(name)
            # What is there may be newer, and passed over for some reason; or no file of ours.
            if name not in found or (there is not None and there.serial < label.serial):
                missing.append(name)
        return missing

    def pass_over(self, path: Path) -> None:
        """Uses an older checkpoint than this one, which could not be put back."""
        self._passed_over.add(path.name)
        self._damaged.add(path.name)

    def _read(self, path: Path, check: checked.Form) -> tuple[str, Any]:
        """What is wrong with a file, or nothing and its contents."""
        try:
            payload = file.read(path, follow=self._follow)
        except CheckpointError as error:
            return str(error), None
        try:
            check(payload, str(path))
        except checked.Unexpected as error:
            return f"{error}: it is not a checkpoint of a run.", None
        return "", payload

    def next_serial(self) -> int:
        """The number of the next save."""
        return 1 + max((label.serial for _, label in self._labelled() if label), default=0)

    def put(self, payload: Any, names: Sequence[str], label: Label) -> None:
        """Writes a checkpoint; it is durable under all of its names when this returns.

        All names but the first are links to the same file where the file system has links.
        """
        first, *others = names
        failure = f"The checkpoint {self.path / first} could not be written"
        with _explained(failure, self._what_is_left):
            label = replace(label, names=others[: file.MOST_NAMES])
            file.write(self.path / first, payload, label, self._file_mode)
            for name in others:
                self._link(first, name)
        failure = f"{self.path / first} is written, but {LATEST} could not be made to point to it"
        with _explained(failure, self._what_is_left):
            if _NUMBERED.fullmatch(first):
                self._point_latest(first)
            file.sync_folder(self.path)
            self._damaged.difference_update(names)
            self._passed_over.difference_update(names)

    def _what_is_left(self) -> str:
        """What a user who reads that a save has failed wants to know."""
        if not self.path.is_dir():
            return (
                "The folder is gone, and the earlier checkpoints with it. Find out what has "
                "removed it, and start again."
            )
        left = len(self.newest_first())
        if not left:
            return f"There is no other checkpoint in the folder. {_START_AGAIN}"
        return f"The folder still holds {left} checkpoint{'s' * (left > 1)}. {_START_AGAIN}"

    def find_end_of_run(self, number: int, epochs: int, step: int) -> tuple[str, Any]:
        """The checkpoint at the end of an earlier ``run()``; None as contents if it is gone."""
        for path, label in self._labelled():
            if label is not None and (label.epochs, label.step) == (epochs, step):
                with contextlib.suppress(CheckpointError):  # of another version
                    problem, payload = self._read(path, form.check_payload)
                    if not problem and len(payload[SECTION].get("runs", [])) == number:
                        return str(path), payload
        return "", None

    def remove_old(self, runs: Sequence[Sequence[int]] = ()) -> None:
        """Removes what need not be kept; not in :meth:`put`, as freeing a large file takes time.

        What the last of the earlier ``runs`` ended with (epochs asked for, epochs, steps) stays.
        """
        if self._keep is None:
            return
        # Damaged files, and what is none of ours, do not count: they must not push a whole one out.
        numbered = [
            path
            for path, label in self._labelled()
            if label and _NUMBERED.fullmatch(path.name) and path.name not in self._damaged
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
        descriptor = opening.open_lock(key / _LOCK, self._file_mode | 0o600)
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
                opening.open_to_read(self.path / name, follow=False) as source,
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
def _explained(failure: str, remedy: str | Callable[[], str]) -> Iterator[None]:
    """Raises what the operating system refuses as a CheckpointError."""
    try:
        yield
    except OSError as error:
        remedy = remedy if isinstance(remedy, str) else remedy()
        raise CheckpointError(f"{failure} ({error.strerror or error}). {remedy}") from error
