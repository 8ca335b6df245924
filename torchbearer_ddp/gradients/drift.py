"""Parameters that differ between ranks: by rounding, or because they appeared during the run."""

from __future__ import annotations

import torch

from torchbearer_ddp.group import collectives, replicas, trained
from torchbearer_ddp.log import announce

#: Rounding alone moves the replicas apart by no more than this part of the largest parameter.
_TOLERANCE = 1e-4


@torch.no_grad()
def align(named: trained.Named) -> None:
    """Gives every rank rank zero's parameters where they differ by rounding alone; collective.

    What differs by more is left, for the comparison of the replicas to find.
    """
    checksums = collectives.all_gather(
        replicas.fingerprint(named), "the replicas that a hook may let drift"
    )
    if replicas.first_difference([name for name, _ in named], checksums) is None:
        return
    received = [parameter.detach().clone() for _, parameter in named]
    collectives.broadcast_tensors(received, "the parameters of rank zero")
    for (_, parameter), value in zip(named, received, strict=True):
        if value.numel() and (parameter - value).abs().max() <= _TOLERANCE * value.abs().max():
            parameter.copy_(value)


def align_strangers(named: trained.Named, checksums: list[torch.Tensor]) -> None:
    """Gives every rank rank zero's values of parameters that appeared during the run."""
    if difference := replicas.first_difference([name for name, _ in named], checksums):
        announce(
            f"{difference[0]} on rank {difference[1]} differed from rank 0 at its first step; "
            "every rank now has rank 0's. Make it before run(), where random numbers are equal "
            "on all ranks"
        )
        tensors = [tensor.data for _, tensor in named]
        collectives.broadcast_tensors(tensors, "parameters that appeared during the run")
