"""What each rank has for itself: its generators, its metrics, its own buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchbearer

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import contents, generators, metric_state
from torchbearer_ddp.group import collectives, layouts, replicas, wire

#: Under this key a file has what each rank has for itself.
PARTS = "ranks"


def collect(state: Any, started: dict[str, Any], place: dict[str, Any] | None) -> torch.Tensor:
    """The generators, metrics and history of this rank, packed into one tensor.

    ``started`` are the generators at the start of the run. Running metrics are each rank's own, and
    are in the history. In mid-epoch, ``place`` is this rank's place in the epoch. Packed, it is one
    record of the file, not one for each batch.
    """
    metrics = metric_state.collect(state[torchbearer.METRIC_LIST], mid_epoch=place is not None)
    return wire.encode(
        {
            "generators": generators.collect(state),
            "started": started,
            "metrics": metrics,
            "history": state[torchbearer.HISTORY],
            "epoch": place,
            "batch_size": train_batch_size(state),
        }
    )


def train_batch_size(state: Any) -> int | None:
    """The batch size of the training data on this rank; ranks may have different ones."""
    loader, _ = state[torchbearer.SELF].state[torchbearer.TRAIN_DATA] or (None, None)
    return getattr(loader, "batch_size", None)


def unpack(part: dict[str, Any], device: Any) -> dict[str, Any]:
    """What a rank collected, with its own buffers, and its own part of what else is trained."""
    own = {"buffers": part["buffers"], "others": part.get("others", {})}
    return {**wire.decode(part["packed"], device), **own}


def sent_by_rank_zero(find: Callable[[], tuple[str, Any]], name: str) -> tuple[str, Any]:
    """The path and the contents of a file that rank zero reads, with this rank's own part alone.

    If the number of ranks has changed, the parts are of no use, and nobody gets one.
    """
    parts: list[Any] = []

    def find_and_split() -> tuple[str, Any, int]:
        path, payload = find()
        if payload is not None:
            section = dict(payload[contents.SECTION])
            parts.extend(section.pop(PARTS, []))
            payload = {**payload, contents.SECTION: section}
        return path, payload, len(parts)

    path, payload, count = collectives.from_rank_zero(find_and_split, name)
    if payload is not None and count == collectives.world_size():
        mine = collectives.scatter(parts, f"each rank's part of {name}")
        payload[contents.SECTION][PARTS] = {collectives.rank(): mine}
    return path, payload


def differing_buffers(
    model: torch.nn.Module, checksums: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """This rank's buffers, by plain name, where the ranks' checksums of them differ.

    Ranks see different data, so the statistics of BatchNorm diverge within an epoch.
    """
    differ = (torch.stack([*checksums]) != checksums[0]).any(0).tolist()
    return {
        contents.plain_name(model, name): buffer.detach().cpu()
        for (name, buffer), differs in zip(model.named_buffers(), differ, strict=True)
        if differs
    }


def averaged_statistics(
    model: torch.nn.Module, buffers: Sequence[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The BatchNorm statistics that differ, averaged over the ranks' :func:`differing_buffers`.

    A model loaded elsewhere gets their average, a run that continues each rank's own. The live
    buffers stay as they are: a save must not change the run.
    """
    averaged = {}
    for name in [contents.plain_name(model, n) for n, _ in replicas.batch_norm_statistics(model)]:
        if name in buffers[0]:
            own = torch.stack([each[name] for each in buffers])
            averaged[name] = own.double().mean(0).to(own.dtype)
    return averaged


def restore_buffers(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Puts back this rank's own buffers."""
    for name, buffer in model.named_buffers():
        if (plain := contents.plain_name(model, name)) in saved:
            layouts.overwrite(buffer, saved[plain])


def check_buffers(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Refuses buffers of another shape than the model's."""
    for name, buffer in model.named_buffers():
        if (plain := contents.plain_name(model, name)) in saved:
            where = f"the shape of this rank's buffer {name}"
            checked.one_of(buffer.shape)(saved[plain].shape, where)
