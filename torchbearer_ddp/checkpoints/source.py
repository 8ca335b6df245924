"""Which checkpoint a run continues from, and files of any origin; on rank zero only."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import contents, file, form, rank_state
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.errors import CheckpointError


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
        with checked.as_error(CheckpointError, after=". It is not a checkpoint of a run."):
            form.check_payload(payload, str(path))
    return str(path), payload


def _newest(folder: Folder, resume: bool | str) -> tuple[Path | None, Any]:
    if resume is False:
        if old := folder.newest_first():
            raise CheckpointError(
                f"resume=False starts a run afresh, but {folder.path} holds checkpoints already "
                f"(the newest is {old[0].name}). Give another folder, or remove them."
            )
        return None, None
    path, payload, problems = folder.read_newest(form.check_payload)
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
    with checked.as_error(CheckpointError, after=". It is not a checkpoint."):
        if file.read_label(path) is not None:
            found = file.read(path)
            form.check_payload(found, str(path))
            found[SECTION].pop(rank_state.PARTS)
            return contents.as_plain_data(found)
        found = contents.from_torchbearer(file.read_foreign(path, trust=trust), str(path))
        form.check_trial(found, str(path))
    if SECTION in found and rank_state.PARTS in found[SECTION]:
        file.verify_records(path)  # one of ours whose label is damaged: what else is?
    found.get(SECTION, {}).pop(rank_state.PARTS, None)
    return found
