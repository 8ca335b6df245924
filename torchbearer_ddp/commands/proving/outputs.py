"""A run that leaves the user's files as they are: it reads no checkpoint and writes no log.

What the script saves with ``torch.save`` goes to a folder of its own, from which ``torch.load``
reads it back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torchbearer.callbacks import CSVLogger, LiveLossPlot
from torchbearer.callbacks.tensor_board import AbstractTensorBoard

from torchbearer_ddp.callbacks.checkpoint import Checkpoint
from torchbearer_ddp.callbacks.hooks import HOOKS
from torchbearer_ddp.callbacks.tensorboard import TensorBoard
from torchbearer_ddp.commands.proving.replacing import replaced

#: These do nothing at all: a run that is continued, or cut short, would be of no use.
_SILENT = (Checkpoint, TensorBoard, AbstractTensorBoard, CSVLogger, LiveLossPlot)


@contextmanager
def kept_apart(folder: Path) -> Iterator[None]:
    """Keeps what a run would write apart from the user's files."""
    with ExitStack() as stack:
        for kind in _with_subclasses(_SILENT):
            for name in HOOKS:
                # on_init puts the callbacks into their order, and writes nothing.
                if name in vars(kind) and name != "on_init":
                    stack.enter_context(replaced(kind, name, _do_nothing))
        stack.enter_context(replaced(Checkpoint, "save_now", _do_nothing))
        stack.enter_context(replaced(torch, "save", _redirected(torch.save, 1, folder)))
        stack.enter_context(replaced(torch, "load", _redirected(torch.load, 0, folder)))
        yield


def _with_subclasses(kinds: tuple[type, ...]) -> list[type]:
    found: dict[type, None] = dict.fromkeys(kinds)
    for kind in kinds:
        found.update(dict.fromkeys(_with_subclasses(tuple(kind.__subclasses__()))))
    return list(found)


def _do_nothing(self: Any, state: Any) -> None:
    pass


def _redirected(function: Callable[..., Any], position: int, folder: Path) -> Callable[..., Any]:
    """A function whose argument at this position may be the path of a file."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("f")
        if isinstance(given, str | os.PathLike):
            name = hashlib.sha256(os.path.realpath(given).encode()).hexdigest()
            own: Any = folder / f"saved-{name}.pt"
            if position == 1 or own.exists():  # what was not saved in this run is the user's file
                if len(args) > position:
                    args = (*args[:position], own, *args[position + 1 :])
                else:
                    kwargs["f"] = own
        return function(*args, **kwargs)

    return redirected
