"""Tensors in few numbers, such that the distance of two tensors can be told from them.

A small tensor is kept as it is. Of a large one there is a count sketch: each element is added, with
a random sign, to one of a fixed number of sums. The distance of two sketches is that of the tensors
up to a few percent, whatever the difference looks like.
"""

from __future__ import annotations

import functools

import torch

_SUMS = 1024
#: How many elements are added at once, which bounds the memory; and how far their signs move.
_BLOCK, _ROLL = 2**20, 7919
#: Tensors with up to so many elements are kept whole.
WHOLE = 2048


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that stand for a tensor, in double precision if they are sums."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    flat = dense.cpu().flatten()
    if flat.numel() <= WHOLE:
        return flat.clone()
    total = torch.zeros(_SUMS, dtype=torch.float64, device="cpu")
    for number, block in enumerate(flat.split(_BLOCK)):  # type: ignore[no-untyped-call]
        values = block.double() * _signs().roll(number * _ROLL)[: block.numel()]
        padded = torch.nn.functional.pad(values, (0, -block.numel() % _SUMS))
        total += padded.view(-1, _SUMS).sum(0)
    return total


def norm(values: torch.Tensor) -> float:
    """The length of what a sketch stands for."""
    return float(values.double().norm())


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far the tensors of two sketches are apart; infinite if they cannot be compared."""
    if one.shape != other.shape:
        return float("inf")
    found = float((one.double() - other.double()).norm())
    if found == found:
        return found
    same = torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    return 0.0 if same else float("inf")  # both became infinite, or only one of them


@functools.cache
def _signs() -> torch.Tensor:
    """The signs of one block, the same in every process; each block takes them from elsewhere."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(0, 2, (_BLOCK,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
    )
