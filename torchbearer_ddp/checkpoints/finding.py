"""Which checkpoint a run continues from, and reading files of any origin; on rank zero only."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torchbearer_ddp.checkpoints import contents, file
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.errors import CheckpointError

#: The form of what is in a file; one of another form is refused.
FORMAT = 1


def find(folder: Folder, resume: bool | str | os.PathLike[str]) -> tuple[str, Any]:
    """The checkpoint that a run is to continue from: its path and contents, or None as contents.

    Args:
        folder: The folder of the run.
        resume: What the user wants, as :class:`~torchbearer_ddp.Checkpoint` takes it.

    Raises:
        CheckpointError: If that is not to be had.
    """
    if resume is False:
        if old := folder.newest_first():
            raise CheckpointError(
                f"resume=False starts a run afresh, but {folder.path} holds checkpoints already "
                f"(the newest is {old[0].name}). Give another folder, or remove them."
            )
        return "", None
    path, payload = _newest(folder, resume) if resume in (True, "auto") else _given(resume)
    if payload is not None:
        section = payload.get(SECTION, {}) if isinstance(payload, dict) else {}
        if section.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {section.get('format')}, but this version of torchbearer_ddp "
                f"reads format {FORMAT}. Use the version that wrote it ({section.get('versions')})."
            )
    return str(path), payload


def _newest(folder: Folder, resume: Any) -> tuple[Path | None, Any]:
    path, payload, problems = folder.read_newest()
    for problem in problems:
        warnings.warn(f"{problem} Instead, {path} is used.", stacklevel=2)
    if path is None and resume is True:
        raise CheckpointError(
            f"resume=True, but there is no checkpoint in {folder.path}. Give the folder of the run "
            "to continue, or resume='auto' to start afresh where there is none."
        )
    return path, payload


def _given(resume: Any) -> tuple[Path, Any]:
    path = Path(resume)
    return path, file.read(path)


def read_any(path: Path, *, trust: bool) -> dict[str, Any]:
    """The contents of a file, in our form: one of ours, verified, or one of other origin.

    Args:
        path: The file.
        trust: Also load what can run code when it is loaded.

    Raises:
        CheckpointError: If it cannot be read, or needs ``trust``.
    """
    if file.read_label(path) is not None:
        return contents.from_torchbearer(file.read(path))
    try:
        with path.open("rb") as opened:
            return contents.from_torchbearer(file.load(opened, path, trust=trust))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
