"""Which gradient lies where: flat buckets of one dtype and device each, the header in the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchbearer_ddp.gradients.transports.interface import Bucket

#: A header is exact in these: a step number and a batch size do not fit half precision.
_HEADER_DTYPES = (torch.float32, torch.float64)
_MIB = 2**20


@dataclass
class GradientBucket(Bucket):
    """A bucket and the gradients in it.

    Attributes:
        indices: The parameters in it, by their index in the list of parameters.
        views: The gradients in it, each in the shape and strides of its parameter.
    """

    indices: list[int] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)


def plan(
    parameters: dict[int, torch.nn.Parameter],
    groups: Sequence[int],
    bucket_bytes: int | None,
    header: int,
) -> list[GradientBucket]:
    """Distributes parameters, by index, over buckets in the order in which their gradients appear.

    A bucket is closed once it holds ``bucket_bytes``. The last one carries the header, and has a
    dtype that can. Where the header must come first it carries nothing else, see :func:`is_alone`.
    """
    buckets: list[GradientBucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device, int], GradientBucket] = {}
    for index, parameter in parameters.items():
        kind = (parameter.dtype, parameter.device, groups[index])
        bucket = open_buckets.get(kind)
        if bucket is None:
            bucket = GradientBucket(parameter.dtype, parameter.device, group=groups[index])
            open_buckets[kind] = bucket
            buckets.append(bucket)
        bucket.indices.append(index)
        bucket.parameters.append(parameter)
        bucket.numel += parameter.numel()
        limit = bucket_bytes or _default_bytes(parameter.device)
        if bucket.numel * parameter.element_size() >= limit:
            del open_buckets[kind]
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    alone = is_alone(groups, [parameter.dtype for parameter in parameters.values()])
    fit = [b for b in buckets if b.dtype in _HEADER_DTYPES and not alone]
    carrier = fit[-1] if fit else GradientBucket(torch.float32, device)
    carrier.header = header
    return [b for b in buckets if b is not carrier] + [carrier]


def is_alone(groups: Sequence[int], dtypes: Sequence[torch.dtype]) -> bool:
    """True if the header must be exchanged before any gradient.

    With several groups it tells which of them travel. A gradient in fp16 must not be multiplied by
    anything but its final weight, which only the header tells: another one may leave the range.
    """
    return any(groups) or torch.float16 in dtypes


def _default_bytes(device: torch.device) -> int:
    """25 MiB on a GPU, where starting a sum is expensive; else 4 MiB.

    With gloo less is left to wait for after backward; in shared memory one bucket is summed while
    the next is filled, and both fit the cache.
    """
    return (4 if device.type == "cpu" else 25) * _MIB


def place(
    buckets: list[GradientBucket],
    tensors: Sequence[torch.Tensor],
    parameters: dict[int, torch.nn.Parameter],
) -> dict[int, torch.Tensor]:
    """Gives every parameter its view into the tensor of its bucket; returns the views by index."""
    views: dict[int, torch.Tensor] = {}
    for bucket, tensor in zip(buckets, tensors, strict=True):
        sizes = [parameters[index].numel() for index in bucket.indices]
        parts = torch.split(tensor[: bucket.numel], sizes)
        for index, part in zip(bucket.indices, parts, strict=True):
            views[index] = _view(part, parameters[index])
            bucket.views.append(views[index])
    return views


@torch.no_grad()
def fill(
    bucket: GradientBucket, parameters: Sequence[torch.nn.Parameter], factor: float, empty: bool
) -> None:
    """Copies gradients to their places in a bucket; a missing one, or all if empty, is zero."""
    sources: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    missing: list[torch.Tensor] = []
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        gradient = parameters[index].grad
        if factor == 1.0 and gradient is view and not empty:
            continue
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient is None or empty:
            missing.append(view)
        elif factor != 1.0:
            torch.mul(gradient, factor, out=view)
        else:
            sources.append(gradient)
            places.append(view)
    # One kernel for all of them on a GPU.
    if places:
        torch._foreach_copy_(places, sources)
    if missing:
        torch._foreach_zero_(missing)


def _view(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's place, with its strides: a channels_last gradient is copied as it lies."""
    # A parameter with gaps or overlaps has no such strides: empty_like closes the gaps.
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.size(), strides, part.storage_offset())
