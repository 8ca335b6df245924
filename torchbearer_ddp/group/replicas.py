"""Equal replicas: fingerprints of a model's tensors, and statistics that agree between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from torchbearer_ddp.group import collectives

Named = list[tuple[str, torch.Tensor]]


def trained_tensors(model: torch.nn.Module, optimizer: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Every parameter once: the model's, and what else the optimizer trains (a learned loss, say).

    Args:
        model: The model; a parameter that several modules share has its first name.
        optimizer: The optimizer.
    """
    found = list(model.named_parameters())
    seen = {id(parameter) for _, parameter in found}
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"optimizer.param_groups[{g}]['params'][{p}]", parameter))
    return found


def replicated_tensors(model: torch.nn.Module, optimizer: Any) -> Named:
    """Parameters and buffers: what must be the same on every rank."""
    return [*trained_tensors(model, optimizer), *model.named_buffers()]


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """One checksum per tensor.

    Args:
        tensors: Names and tensors.
    """
    return torch.tensor([_checksum(tensor) for _, tensor in tensors], dtype=torch.int64)


def first_difference(tensors: Named, name: str) -> tuple[str, list[int]] | None:
    """The first tensor that is not the same everywhere, and the ranks that differ from rank zero.

    Args:
        tensors: Names and tensors, the same names on every rank.
        name: What is compared, the same on every rank.
    """
    everyone = collectives.all_gather(fingerprint(tensors), name)
    for index, (tensor_name, _) in enumerate(tensors):
        values = [int(each[index]) for each in everyone]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            return tensor_name, others
    return None


def _checksum(tensor: torch.Tensor) -> int:
    plain = tensor.detach().cpu().contiguous()
    if not plain.numel():
        return 0
    data: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)


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
    """BatchNorm statistics averaged over all ranks; the model's own are left as they are.

    Each rank has seen its own share of the data, and each estimates the same mean and variance;
    the average is the better estimate, and the same everywhere.

    Args:
        model: The model, the same layers on every rank.
    """
    named = batch_norm_statistics(model)
    # In double precision, so that equal statistics stay bitwise what they are.
    sums = [buffer.detach().double() for _, buffer in named]
    sums = [s.clone() if s is b else s for s, (_, b) in zip(sums, named, strict=True)]
    collectives.all_reduce(sums, "the BatchNorm statistics")
    world = collectives.world_size()
    return {
        name: (total / world).to(buffer.dtype)
        for (name, buffer), total in zip(named, sums, strict=True)
    }


@torch.no_grad()
def align_buffers(model: torch.nn.Module) -> None:
    """Makes the buffers agree: BatchNorm statistics are averaged, all others are rank zero's.

    Args:
        model: The model, the same layers on every rank.
    """
    averaged = averaged_statistics(model)
    rest = []
    for name, buffer in model.named_buffers():
        if name in averaged:
            buffer.copy_(averaged[name])
        else:
            rest.append(buffer)
    collectives.broadcast_tensors(rest, "the buffers")
