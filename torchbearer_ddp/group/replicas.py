"""Equal replicas: checksums of a model's tensors, and statistics averaged over the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from torchbearer_ddp.group import collectives, layouts

Named = list[tuple[str, torch.Tensor]]


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """One checksum per tensor."""
    return torch.tensor([_checksum(tensor) for _, tensor in tensors], dtype=torch.int64)


def first_difference(
    names: Sequence[str], fingerprints: Sequence[torch.Tensor]
) -> tuple[str, str] | None:
    """The first tensor that differs between ranks, and the ranks where it is not rank zero's."""
    for index, name in enumerate(names):
        values = [int(each[index]) for each in fingerprints]
        others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if others:
            return name, ", ".join(others)
    return None


def _checksum(tensor: torch.Tensor) -> int:
    crc = 0
    for part in layouts.sparse_parts(tensor) or [tensor]:
        data: Any = layouts.to_bytes(part).cpu().numpy()
        crc = zlib.crc32(data, crc)
    return crc


def batch_norm_statistics(model: torch.nn.Module) -> Named:
    """The running statistics of every BatchNorm layer, by name."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]


@torch.no_grad()
def averaged_statistics(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """BatchNorm statistics averaged over all ranks; the model's own are not changed.

    Every rank estimates the same mean and variance from its own data, so the average is the better
    estimate.
    """
    named = batch_norm_statistics(model)
    # Sums in double precision leave statistics that are equal on all ranks bitwise unchanged.
    sums = [buffer.detach().to(torch.float64, copy=True) for _, buffer in named]
    collectives.all_reduce(sums, "the BatchNorm statistics")
    world = collectives.world_size()
    return {
        name: (total / world).to(buffer.dtype)
        for (name, buffer), total in zip(named, sums, strict=True)
    }


@torch.no_grad()
def align_buffers(model: torch.nn.Module, local: Iterable[torch.Tensor] = ()) -> None:
    """Makes buffers equal on all ranks: averaged BatchNorm statistics, else rank zero's values.

    Those in ``local`` are left to each rank.
    """
    averaged = averaged_statistics(model)
    kept = set(map(id, local))
    buffers = {n: buffer for n, buffer in model.named_buffers() if id(buffer) not in kept}
    for name in averaged.keys() & buffers:
        buffers.pop(name).copy_(averaged[name])
    collectives.broadcast_tensors(list(buffers.values()), "the buffers")
