"""Opens files in folders that others may write to: regular files only, and links only on wish.

A pipe would never end, a device never be read to its end, and a link could lead to a file of the
user's that is then emptied.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from torchbearer_ddp.errors import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_to_read(path: Path, *, follow: bool = True) -> BinaryIO:
    """Opens a regular file; ``follow`` allows a symbolic link to one."""
    descriptor = _open(path, os.O_RDONLY, follow=follow)
    return os.fdopen(descriptor, "rb")


def open_lock(path: Path, mode: int) -> int:
    """Opens the file for a lock, or makes it: a regular file with no other name."""
    descriptor = _open(path, os.O_RDWR | os.O_CREAT, mode, follow=False)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise CheckpointError(
            f"{path} is a file that has another name as well, and is not written to. Remove it."
        )
    return descriptor


def _open(path: Path, flags: int, mode: int = 0o600, *, follow: bool) -> int:
    # Without O_NONBLOCK a pipe would wait for a writer.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        raise _explained(path, error, follow=follow) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        kind = _kind(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        raise CheckpointError(f"{path} is {kind}, not a file. Remove it.")
    return descriptor


def _explained(path: Path, error: OSError, *, follow: bool) -> Exception:
    """The error for a file that cannot be opened, which may be so because of what it is."""
    try:
        mode = path.stat().st_mode if follow else path.lstat().st_mode
    except OSError:
        return error
    if stat.S_ISREG(mode):
        return error
    return CheckpointError(f"{path} is {_kind(mode)}, not a file. Remove it.")


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def written_by_others(folder: Path) -> str:
    """Who else can write into a folder, in words that follow its name; empty if nobody can."""
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0):
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""
