"""The standard list of callbacks for data-parallel training."""

from __future__ import annotations

from typing import Any

from torchbearer_ddp.callbacks.callback_order import OrderedCallback
from torchbearer_ddp.callbacks.data import ShardData
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.metrics import SyncMetrics
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.group import membership


class _Callbacks(list[OrderedCallback]):
    """A list that says what is wrong if it is put into a list of callbacks as it is."""

    def on_init(self, state: Any) -> None:
        """The first hook that torchbearer calls, because it takes the list for a callback."""
        raise ValueError(
            "data_parallel() is a list of callbacks, which was put into the list of callbacks as "
            "one item. Write a star before it: callbacks=[*data_parallel(), ...]."
        )


def data_parallel(
    *, shard: bool = True, global_batch: bool = False, **options: Any
) -> list[OrderedCallback]:
    """The callbacks that make a Trial data-parallel.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import data_parallel
        >>> trial = Trial(None, callbacks=[*data_parallel(global_batch=True)])

    Args:
        shard: False if the loaders already load only this rank's share.
        global_batch: Passed on to :class:`ShardData`: True if the batch size of the training data
            is that of all ranks together, so that a Trial keeps its batch size, its learning rate
            and its numbers; False if it is the batch size of each rank.
        options: Passed on to :class:`SyncGradients`.

    Raises:
        ValueError: If ``global_batch`` is used without ``shard``.
    """
    if global_batch and not shard:
        raise ValueError(
            "global_batch=True divides the batch size of the loaders, but shard=False leaves them "
            "as they are. Use one of them."
        )
    membership.ensure_joined()
    sharding = [ShardData(global_batch=global_batch)] if shard else []
    return _Callbacks([SyncModel(), *sharding, SyncGradients(**options), SyncMetrics()])
