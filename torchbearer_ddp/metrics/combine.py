"""What all ranks' metrics hold, combined to what the metrics of one process would hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from torchbearer_ddp.data.loaders import Share
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.metrics import declared
from torchbearer_ddp.metrics.leaves import Leaf, SortedLeaves
from torchbearer_ddp.metrics.pooling import average, joined, places_of_batches, pool

#: What an EpochLambda gathers.
GATHERED = ("_y_pred", "_y_true")
#: A metric, and the attributes that it has while it computes its final value.
Pooled = tuple[Any, dict[str, Any]]


@dataclass(frozen=True)
class BatchOrder:
    """How the ranks' batches become those of one process.

    Attributes:
        by_step: The batches of one step are parts of one batch; else each is one of its own.
        dealt: The samples of a batch were dealt to the ranks one by one.
    """

    by_step: bool
    dealt: bool

    @classmethod
    def of(cls, share: Share | None, *, training: bool) -> BatchOrder:
        """That of a pass over data with this share."""
        dealt = training if share is None else not share.whole_batches
        return cls(by_step=training or dealt, dealt=dealt)


def check_equal(titles: Sequence[list[str]]) -> None:
    """Raises the same error on every rank if one has a metric that another has not."""
    if all(mine == titles[0] for mine in titles):
        return
    for rank, mine in enumerate(titles):
        for title in mine:
            counts = [each.count(title) for each in titles]
            if min(counts) < max(counts):
                having = [str(r) for r, count in enumerate(counts) if count == max(counts)]
                lacking = counts.index(min(counts))
                raise DesyncError(
                    f"The metric {title} is on rank {', '.join(having)} but not on rank "
                    f"{lacking}, so it cannot be pooled. Give the Trial the same metrics on every "
                    "rank; a callback that adds a metric must run on every rank, without "
                    "RankZeroOnly."
                )
        if mine != titles[0]:
            raise DesyncError(
                f"The metrics are in another order on rank {rank} than on rank 0, so they cannot "
                "be pooled. Give the Trial the same list of metrics on every rank."
            )


def combined(
    found: SortedLeaves,
    everyone: Sequence[dict[str, Any]],
    *,
    order: BatchOrder,
    device: Any,
) -> Iterator[Pooled]:
    """The attributes that each metric would have in one process."""
    yield from _sums(found.summed, everyone, by_step=order.by_step)
    lengths = [each["lengths"] for each in everyone]
    sizes = [each["sizes"] for each in everyone]
    for index, leaf in enumerate([*found.gathered, *found.declaring]):
        held = [each["rows"][index] for each in everyone]
        pooled = {}
        for name in held[0]:
            values = [each[name] for each in held]
            if name in lengths[0][index]:
                ends = [each[index][name] for each in lengths]
                pooled[name] = _rows(values, ends, sizes, dealt=order.dealt)
            else:
                pooled[name] = declared.total(values)
            if torch.is_tensor(pooled[name]):
                is_array = isinstance(getattr(leaf.metric, name), numpy.ndarray | numpy.generic)
                pooled[name] = pooled[name].numpy() if is_array else pooled[name].to(device)
        yield leaf.metric, pooled
    for index, leaf in enumerate(found.averaged):
        value = average([each["values"][index] for each in everyone])
        if value is not None:
            yield leaf.metric, {"process_final": lambda *_, value=value: value}


def _sums(
    found: Sequence[Leaf], everyone: Sequence[dict[str, Any]], *, by_step: bool
) -> Iterator[Pooled]:
    for index, leaf in enumerate(found):
        attributes = pool(
            [each["sums"][index] for each in everyone],
            [each["weights" if leaf.of_loss else "sizes"] for each in everyone],
            by_step=by_step,
            of_loss=leaf.of_loss,
            summed=leaf.of_loss and everyone[0]["loss is a sum"],
        )
        if attributes is not None:
            yield leaf.metric, attributes


def _rows(
    parts: Sequence[Any], ends: Sequence[list[int]], sizes: Sequence[torch.Tensor], *, dealt: bool
) -> Any:
    """The rows of all ranks in the order of one process; ``ends`` are the lengths after batches."""
    counts = [[b - a for a, b in itertools.pairwise([0, *each])] for each in ends]
    known = all(
        min(each, default=0) >= 0 and sum(each) == (0 if part is None else len(part))
        for each, part in zip(counts, parts, strict=True)
    )
    if known:
        return joined(parts, places_of_batches(counts, sizes, dealt=dealt))
    # A metric that has dropped some of its rows: they are left in the order of the ranks.
    lengths = [0 if part is None else len(part) for part in parts]
    return joined(parts, list(torch.split(torch.arange(sum(lengths), device="cpu"), lengths)))
