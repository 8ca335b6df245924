"""A checkpoint as ``inspect`` and ``export`` open it: read only, and nothing in it is run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import contents, file, form
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.errors import CheckpointError


@dataclass(frozen=True)
class Opened:
    """What was found at a path.

    Attributes:
        path: The file; in a folder the newest that is whole.
        payload: Its contents, in the form in which this package saves them.
        label: Which save it is; None for a file of other origin, which has no checksums.
        damaged: What is wrong with newer files of the folder.
    """

    path: Path
    payload: dict[str, Any]
    label: Label | None
    damaged: list[str] = field(default_factory=list)

    @property
    def section(self) -> dict[str, Any]:
        """What this package saves besides the model, the optimizer and the history."""
        found = self.payload.get(contents.SECTION, {})
        return found if isinstance(found, dict) else {}


def open_checkpoint(path: Path) -> Opened:
    """Reads a checkpoint, or the newest whole one of a folder; the folder stays as it is.

    Raises:
        CheckpointError: If the file is damaged or holds more than plain data, or the folder has no
            checkpoint that is whole.
    """
    if not path.is_dir():
        return _open_file(path)
    damaged: list[str] = []
    for each in Folder(path).newest_first():
        try:
            return Opened(each, _read(each), file.read_label(each), damaged)
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"No checkpoint in {path} is whole. {' '.join(damaged)}")
    raise CheckpointError(
        f"There is no checkpoint in {path}: no file is called epoch-N.pt, step-N.pt or "
        "best-METRIC.pt. Give the folder that Checkpoint was given, or a file."
    )


def _open_file(path: Path) -> Opened:
    label = file.read_label(path)
    if label is not None:
        return Opened(path, _read(path), label)
    loaded = file.read_foreign(path)
    if isinstance(loaded, dict) and contents.SECTION in loaded:
        file.read(path)  # raises: this is one of ours whose label is damaged
    with checked.as_error(CheckpointError, after=". It is not a checkpoint."):
        found = contents.from_torchbearer(loaded, str(path))
        form.check_trial(found, str(path))
    return Opened(path, found, None)


def _read(path: Path) -> dict[str, Any]:
    payload: dict[str, Any] = file.read(path)
    with checked.as_error(CheckpointError, after=". It is not a checkpoint."):
        form.check_payload(payload, str(path))
    return payload


def as_json(value: Any) -> str:
    """Plain data as JSON; what JSON does not have is shown as text."""
    return json.dumps(value, indent=1, default=str)
