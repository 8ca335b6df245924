"""The predictions of all ranks, in the order of the data set."""

from __future__ import annotations

from typing import Any

import torch

from torchbearer_ddp.data.loaders import Share
from torchbearer_ddp.data.sampling import interleave
from torchbearer_ddp.group import collectives, wire
from torchbearer_ddp.metrics.pooling import in_order


def gather(batches: list[Any], share: Share, device: Any) -> Any:
    """What one process would have predicted; collective.

    Args:
        batches: This rank's predictions, batch by batch; none if it had no data.
        share: How the data was shared out.
        device: Where the predictions are to be.

    Returns:
        A tensor, or where the batches cannot be joined to one (a model with several outputs, say)
        the list of them.
    """
    packed, error = torch.empty(0, dtype=torch.uint8), None
    try:
        packed = wire.encode(batches)
    except TypeError as caught:
        error = caught
    collectives.raise_together(error, "preparing the predictions")
    everyone = [wire.decode(each) for each in collectives.all_gather(packed, "the predictions")]
    return _moved(assemble(everyone, share), device)


def assemble(everyone: list[list[Any]], share: Share) -> Any:
    """Puts the predictions of all ranks in order.

    Args:
        everyone: The batches of each rank.
        share: How the data was shared out.
    """
    if not share.whole_batches:
        joined = [_joined(batches) if batches else None for batches in everyone]
        if all(rows is None or torch.is_tensor(rows) for rows in joined):
            rows = in_order(joined, share.block or 1)
            return [] if rows is None else rows[: share.total]
    return _joined(interleave(everyone)[: share.total])


def _joined(batches: list[Any]) -> Any:
    if batches and all(torch.is_tensor(batch) for batch in batches):
        try:
            return torch.cat(batches)
        except RuntimeError:  # their shapes differ
            return batches
    return batches


def _moved(value: Any, device: Any) -> Any:
    """As torchbearer moves batches, but without a change of dtype."""
    if torch.is_tensor(value):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, device) for each in value)
    return value
