"""Equal replicas: checksums of a model's tensors, and statistics averaged over the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import numpy.typing
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from torchbearer_ddp.group import collectives, layouts

#: How much a device looks at in one go; words take a few times this memory.
_PIECE_BYTES = 64 * 2**20
_WORD_BYTES = 8
#: Primes, so that the rows of a matrix do not fall into the same columns if they change places. The
#: sums of few columns take little time to check, and those of many little time to add.
_FEW_COLUMNS, _MANY_COLUMNS = 509, 4093
_LARGE_BYTES = 2**22
#: An odd number with bits all over a word.
_MIX = 0x1E3779B97F4A7C15

Named = list[tuple[str, torch.Tensor]]


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """One checksum per tensor, on the host; a GPU computes its own and sends them together."""
    found = [_checksum(tensor) for _, tensor in tensors]
    numbers = [0 if torch.is_tensor(each) else each for each in found]
    on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for index, value in enumerate(found):
        if torch.is_tensor(value):
            by_device.setdefault(value.device, {})[index] = value
    for values in by_device.values():
        on_host[[*values]] = torch.stack([*values.values()]).cpu()
    return on_host


def difference(
    names: Sequence[str], mine: torch.Tensor, digests: Sequence[str]
) -> tuple[str, str] | None:
    """The same for checksums of which all ranks know the digests; collective if these differ."""
    if len(set(digests)) == 1:
        return None
    return first_difference(names, collectives.all_gather(mine, "the checksums of the replicas"))


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


def _checksum(tensor: torch.Tensor) -> int | torch.Tensor:
    """A number, or where the tensor is on a device one that is still there."""
    parts = layouts.sparse_parts(tensor) or [tensor]
    if parts[0].device.type != "cpu":
        return device_checksum(parts)
    crc = 0
    for part in parts:
        crc = _host_checksum(layouts.to_bytes(part).numpy(), crc)
    return crc


def _host_checksum(data: numpy.typing.NDArray[numpy.uint8], crc: int) -> int:
    """A checksum of bytes on the host, in a third of the time that all of them take a CRC.

    Words are added in columns, which is as fast as memory, and the sums go into the CRC.
    """
    count = _MANY_COLUMNS if len(data) >= _LARGE_BYTES else _FEW_COLUMNS
    whole = len(data) - len(data) % (count * _WORD_BYTES)
    if whole:
        rows = data[:whole].view(numpy.int64).reshape(-1, count)
        crc = zlib.crc32(numpy.add.reduce(rows), crc)
    return zlib.crc32(data[whole:], crc)  # type: ignore[arg-type]


@torch.no_grad()
def device_checksum(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """A checksum that the device of the tensors computes, as one number on that device.

    Each word is multiplied by an odd number of its own, so no change of a single word is lost, and
    words that change places are not equal. Integers overflow alike on every device and in any
    order of additions.
    """
    total: Any = 0
    for part in parts:
        for data in torch.split(layouts.to_bytes(part), _PIECE_BYTES):
            words = torch.nn.functional.pad(data, (0, -len(data) % _WORD_BYTES)).view(torch.int64)
            numbers = torch.arange(1, len(words) + 1, device=words.device) * _MIX
            numbers = (numbers ^ (numbers >> 29)) * _MIX | 1
            total = total * _MIX + (words * numbers).sum() + len(data)
    return total  # type: ignore[no-any-return]


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
