"""The predictions of all ranks, in the order of the data set."""

from __future__ import annotations

from typing import Any

import torch

from torchbearer_ddp.data.batch import map_tensors
from torchbearer_ddp.data.loaders import Share
from torchbearer_ddp.data.sampling import interleave
from torchbearer_ddp.group import collectives, wire
from torchbearer_ddp.metrics.pooling import in_order


def gather(batches: list[Any], share: Share, device: Any) -> Any:
    """The predictions that one process would make, on this device; collective.

    The result is one tensor, or the list of batches if these cannot be concatenated (for example if
    the model has several outputs).
    """
    packed = collectives.run_together(lambda: wire.encode(batches), "preparing the predictions")
    everyone = [wire.decode(each) for each in collectives.all_gather(packed, "the predictions")]
    # As torchbearer moves batches, but without a change of dtype.
    return map_tensors(lambda tensor: tensor.to(device), assemble(everyone, share))


def assemble(everyone: list[list[Any]], share: Share) -> Any:
    """Puts the batches of all ranks in order, and concatenates them if possible."""
    if not share.whole_batches:
        joined = [_concatenated(batches) if batches else None for batches in everyone]
        if all(rows is None or torch.is_tensor(rows) for rows in joined):
            rows = in_order(joined, share.block or 1)
            return [] if rows is None else rows[: share.total]
    return _concatenated(interleave(everyone)[: share.total])


def _concatenated(batches: list[Any]) -> Any:
    if batches and all(torch.is_tensor(batch) for batch in batches):
        try:
            return torch.cat(batches)
        except RuntimeError:  # their shapes differ
            return batches
    return batches
