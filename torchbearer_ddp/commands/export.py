"""``python -m torchbearer_ddp export``: the model of a checkpoint as a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchbearer_ddp.checkpoints import contents, file
from torchbearer_ddp.commands import words
from torchbearer_ddp.commands.opened import open_checkpoint
from torchbearer_ddp.commands.parser import FOUND, GOOD, command_parser
from torchbearer_ddp.errors import CheckpointError

_DESCRIPTION = """\
Writes the model of a checkpoint, or of the newest whole one of a folder, as plain weights:
model.load_state_dict(torch.load('out.pt')) reads them, without this package. A name that ends in
.safetensors is written in that format, if the package safetensors is installed.
"""
_EXAMPLE = "runs/a model.pt\nruns/a/best-val_loss.pt model.safetensors"
_MODE = 0o644
_SAFETENSORS = ".safetensors"


def main(arguments: list[str]) -> None:
    """Writes the model of a checkpoint."""
    codes = {GOOD: "written", FOUND: "the checkpoint cannot be read, or the file not written"}
    parser = command_parser("export", _DESCRIPTION, _EXAMPLE, codes)
    parser.add_argument("checkpoint", type=Path, help="a file, or the folder of a run")
    parser.add_argument("out", type=Path, help="the file to write: .pt or .safetensors")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.force:
        parser.error(f"{options.out} exists. Give another name, or --force to replace it")
    opened = open_checkpoint(options.checkpoint)
    model = opened.payload.get(contents.MODEL)
    if not isinstance(model, dict) or not model:
        raise CheckpointError(f"{opened.path} holds no model, so there is nothing to export.")
    write(options.out, model)
    for problem in opened.damaged:
        print(f"passed over: {problem}")
    size = words.size(options.out.stat().st_size)
    print(f"{options.out}: {len(model)} tensors of {opened.path}, {size}")


def write(path: Path, model: dict[str, Any]) -> None:
    """Writes a state dict; the file gets its name when it is whole."""
    save: Any = _save_safetensors if path.suffix == _SAFETENSORS else torch.save
    try:
        with file.create(path, _MODE) as stream:
            save(model, stream)
    except (OSError, RuntimeError) as error:  # torch's own has no errno
        if isinstance(error, CheckpointError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{path} cannot be written ({reason}).") from error


def _save_safetensors(model: dict[str, Any], stream: BinaryIO) -> None:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise CheckpointError(
            "The package safetensors is not installed here. Install it with pip install "
            "safetensors, or give a name that ends in .pt."
        ) from error
    others = [name for name, value in model.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"The model's state has parts that are not tensors ({', '.join(others)}), which the "
            "format safetensors does not have. Give a name that ends in .pt."
        )
    # Tied weights share their memory, which the format does not have either.
    plain = {name: value.contiguous().clone() for name, value in model.items()}
    stream.write(save(plain, {"format": "pt"}))
