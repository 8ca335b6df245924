"""Sparse gradients: gathered, because summing them densely would cost the whole table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchbearer_ddp.group import collectives

#: A gradient of one rank: its indices and values, or all of it where it is dense, or None.
Part = tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None


def reduce(parameters: Sequence[torch.nn.Parameter], factor: float) -> None:
    """Replaces each gradient by the sum over all ranks, this rank's multiplied by a factor.

    A factor of zero leaves this rank out.

    The sum is sparse where it would be in one process: if no rank's gradient is dense.
    """
    mine = [_part(parameter.grad, factor) for parameter in parameters]
    everyone = collectives.all_gather(mine, "the sparse gradients")
    for parameter, *parts in zip(parameters, *everyone, strict=True):
        present = [part for part in parts if part is not None]
        parameter.grad = _combine(present, parameter) if present else None


def _part(gradient: torch.Tensor | None, factor: float) -> Part:
    if gradient is None or not factor:
        return None
    if not gradient.is_sparse:
        return gradient.detach() * factor
    held = gradient.detach().coalesce()
    return held.indices(), held.values() * factor


def _combine(parts: list[Part], parameter: torch.Tensor) -> torch.Tensor:
    dense = [part for part in parts if isinstance(part, torch.Tensor)]
    pairs = [part for part in parts if isinstance(part, tuple)]
    total = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    if pairs:
        indices = torch.cat([i for i, _ in pairs], dim=1).to(parameter.device)
        values = torch.cat([v for _, v in pairs]).to(parameter.device)
        total = torch.sparse_coo_tensor(
            indices, values, parameter.shape, check_invariants=False
        ).coalesce()
    if dense:
        total = total.to_dense() if pairs else total
        for each in dense:
            total = total + each.to(parameter.device)
    return total


def layouts(
    parameters: Sequence[torch.nn.Parameter],
    views: Sequence[torch.Tensor | None],
    used: Sequence[bool],
) -> tuple[list[int], list[int]]:
    """Which new gradients of parameters that have a place in a bucket are sparse, which dense."""
    new = [i for i, view in enumerate(views) if used[i] and view is not None]
    found = [i for i in new if (g := parameters[i].grad) is not None and g.is_sparse]
    return found, [i for i in new if i not in found]


def restore_layouts(
    parameters: Sequence[torch.nn.Parameter], mine: tuple[list[int], list[int]]
) -> None:
    """Gives a sum of sparse gradients alone the layout that it has in one process; collective."""
    everyone = collectives.all_gather(mine, "the layouts of the gradients")
    dense = {index for _, indices in everyone for index in indices}
    for index in {index for indices, _ in everyone for index in indices} - dense:
        if (gradient := parameters[index].grad) is not None:
            parameters[index].grad = gradient.to_sparse(1)
