"""The form of what is in a checkpoint: which parts there are, and of what type each is.

Checksums tell a damaged file from a whole one; the form tells one that this package wrote from one
that something else made. What has this form can be put back, or refused part by part.
"""

from __future__ import annotations

from typing import Any

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import loader_state
from torchbearer_ddp.checkpoints.contents import HISTORY, MODEL, OPTIMIZER, SECTION
from torchbearer_ddp.checkpoints.rank_state import PARTS
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import layouts, wire

#: The form of what is in a file, and those that can be read; one of another form is refused.
FORMAT = 3
READABLE = (2, 3)

_TENSOR = checked.kind(torch.Tensor, "a tensor")


def _bytes(value: Any, where: str) -> torch.Tensor:
    tensor: torch.Tensor = _TENSOR(value, where)
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not layouts.is_strided(tensor):
        raise checked.Unexpected(f"{where} is {checked.shown(value)}, not a tensor of bytes")
    return tensor


_STATE = checked.table(checked.anything)
#: What can be compared with what there is now.
_PLAIN = checked.kind((bool, int, float, str, list, tuple, dict, type(None)), "a plain value")
_STATES = checked.table(_STATE)
_HISTORY = checked.items(_STATE)
_COUNT = checked.whole(0)
_GENERATORS = checked.record(
    {
        "python": checked.items(checked.anything, 3),
        "numpy": checked.items(checked.anything, 5),
        "torch": _TENSOR,
        "loaders": _STATE,
    },
    devices=checked.table(checked.items(_TENSOR)),
    cuda=checked.items(_TENSOR),
)


def _worker(value: Any, where: str) -> Any:
    """What a worker of a loader wrote, see :mod:`torchbearer_ddp.checkpoints.worker_states`."""
    _GENERATORS(wire.decode(_bytes(value, where)), where)
    return value


_EPOCH = checked.record(
    {
        "start": _GENERATORS,
        "again_at": _COUNT,
        "again": checked.optional(_GENERATORS),
        "values": _STATE,
    },
    remembers=checked.boolean,
    workers=checked.items(checked.optional(_worker)),
    loader=checked.optional(loader_state.check),
)
#: What a rank packs, see :func:`torchbearer_ddp.checkpoints.rank_state.collect`.
_PACKED = checked.record(
    {
        "generators": _GENERATORS,
        "metrics": _STATES,
        "history": _HISTORY,
        "epoch": checked.optional(_EPOCH),
    },
    started=_GENERATORS,
    batch_size=_PLAIN,
)
_PART = checked.record(
    {"packed": _bytes, "buffers": checked.table(_TENSOR)},
    others=_STATES,
)
_RATES = checked.items(checked.kind((int, float, torch.Tensor), "a number or a tensor"))
#: What every scheduler of torch has.
_SCHEDULERS = checked.table(
    checked.record({}, last_epoch=checked.number, base_lrs=_RATES, _last_lr=_RATES)
)
_TRIAL = {MODEL: _STATE}
_OTHERS = {OPTIMIZER: checked.kind(dict, "a dict"), HISTORY: _HISTORY}
_SECTION = checked.record(
    {
        "epochs": _COUNT,
        "batch": _COUNT,
        "global_step": _COUNT,
        "world_size": checked.whole(1),
        "train_steps": _PLAIN,
        "batch_size": _PLAIN,
        "callbacks": _STATE,
        "schedulers": _SCHEDULERS,
    },
    runs=checked.items(checked.items(_COUNT, 3)),
    stopped=checked.optional(checked.text()),
    versions=checked.table(checked.text()),
    others=_STATES,
    criterion=_STATE,
)


def check_trial(payload: Any, where: str) -> None:
    """Checks what a file of any origin has of a trial, and of callbacks.

    Raises:
        Unexpected: If a part has another type.
    """
    checked.record(_TRIAL, **_OTHERS)(payload, where)
    section = checked.kind(dict, "a dict")(payload.get(SECTION, {}), f"{where}[{SECTION!r}]")
    checked.record({}, callbacks=_STATE)(section, f"{where}[{SECTION!r}]")


def check_payload(payload: Any, where: str) -> None:
    """Checks all parts of a checkpoint of this package, those of the ranks as well.

    Raises:
        Unexpected: If a part is missing or has another type.
        CheckpointError: If the file is of another version.
    """
    checked.record({SECTION: checked.record({"format": _COUNT})})(payload, where)
    section = payload[SECTION]
    if section["format"] not in READABLE:
        raise CheckpointError(
            f"{where} has format {section['format']}, but this version of torchbearer_ddp "
            f"reads formats {' and '.join(map(str, READABLE))}. Use the version that wrote it "
            f"({section.get('versions')})."
        )
    checked.record(_TRIAL, **_OTHERS)(payload, where)
    _SECTION(section, f"{where}[{SECTION!r}]")
    if section.get("runs") == [] or (section["format"] > READABLE[0] and "runs" not in section):
        raise checked.Unexpected(f"{where} names no run")
    steps = section["train_steps"]
    if type(steps) is int and 0 <= steps < section["batch"]:
        raise checked.Unexpected(f"{where} is at step {section['batch']} of an epoch of {steps}")
    place = f"{where}[{SECTION!r}][{PARTS!r}]"
    parts = checked.items(_PART, section["world_size"])(section.get(PARTS), place)
    for rank, part in enumerate(parts):
        place = f"the part of rank {rank} in {where}"
        with checked.as_error(checked.Unexpected, f"{place}: "):
            mine = _PACKED(wire.decode(part["packed"]), place)
            if section["batch"] and mine["epoch"] is None:
                raise checked.Unexpected("it has no place in the epoch")
