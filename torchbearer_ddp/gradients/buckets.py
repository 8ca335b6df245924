"""Which gradient lies where: flat buckets of one dtype and device each, the header in the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchbearer_ddp.gradients.header import Header
from torchbearer_ddp.gradients.transports.interface import Transport

#: A header is exact in these: a step number and a batch size do not fit half precision.
_HEADER_DTYPES = (torch.float32, torch.float64)


@dataclass
class Bucket:
    """One flat tensor and the gradients in it.

    Args:
        dtype: The dtype of every element.
        device: Where it lives.
        indices: The parameters in it, by their place in the list of parameters.
        numel: The number of elements, without the header.
        flat: The memory, once it is allocated.
        views: The gradients in it, each in the shape and strides of its parameter.
    """

    dtype: torch.dtype
    device: torch.device
    indices: list[int] = field(default_factory=list)
    numel: int = 0
    flat: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    views: list[torch.Tensor] = field(default_factory=list)


def plan(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> list[Bucket]:
    """Deals the parameters out to buckets.

    Args:
        parameters: What is to be exchanged, in the order in which the gradients appear.
        bucket_bytes: A bucket is closed once it holds this much.

    Returns:
        The buckets; the last one has a dtype that can carry a header.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket = open_buckets.get(kind)
        if bucket is None:
            bucket = open_buckets[kind] = Bucket(*kind)
            buckets.append(bucket)
        bucket.indices.append(index)
        bucket.numel += parameter.numel()
        if bucket.numel * parameter.element_size() >= bucket_bytes:
            del open_buckets[kind]
    fit = [b for b in buckets if b.dtype in _HEADER_DTYPES]
    carrier = fit[-1] if fit else Bucket(torch.float32, device_of(parameters))
    return [b for b in buckets if b is not carrier] + [carrier]


def allocate(
    buckets: list[Bucket], parameters: Sequence[torch.Tensor], transport: Transport, header: int
) -> None:
    """Gives every bucket its memory, and every parameter its view into it.

    Args:
        buckets: What :func:`plan` made.
        parameters: The same parameters.
        transport: Says where a bucket must live.
        header: The size of the header at the end of the last bucket.
    """
    for bucket in buckets:
        extra = header if bucket is buckets[-1] else 0
        bucket.flat = transport.allocate(bucket.numel + extra, bucket.dtype, bucket.device, extra)
        offset = 0
        for index in bucket.indices:
            parameter = parameters[index]
            bucket.views.append(_view(bucket.flat, offset, parameter))
            offset += parameter.numel()


def header_of(buckets: list[Bucket], rank: int, world_size: int) -> Header:
    """The header at the end of the last bucket."""
    last = buckets[-1]
    return Header(last.flat[last.numel :], rank, world_size)


def views(buckets: list[Bucket], count: int) -> list[torch.Tensor]:
    """The parameters' places, by parameter."""
    found = {i: v for b in buckets for i, v in zip(b.indices, b.views, strict=True)}
    return [found[index] for index in range(count)]


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's place, with its strides: a channels_last gradient is copied as it lies."""
    part = flat[offset : offset + parameter.numel()]
    if _is_dense(parameter):
        return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(
        (s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Where a header lives: with the gradients, or on the CPU where there are none."""
    return parameters[0].device if parameters else torch.device("cpu")
