"""The standard list of callbacks for data-parallel training."""

from __future__ import annotations

from typing import Any

from torchbearer_ddp.callbacks.callback_order import OrderedCallback
from torchbearer_ddp.callbacks.data import ShardData
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.metrics import SyncMetrics
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.group import membership


def data_parallel(*, shard: bool = True, **options: Any) -> list[OrderedCallback]:
    """The callbacks that make a Trial data-parallel.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import data_parallel
        >>> trial = Trial(None, callbacks=[*data_parallel(weighted=True)])

    Args:
        shard: False if the loaders already load only this rank's share.
        options: Passed on to :class:`SyncGradients`.
    """
    membership.ensure_joined()
    sharding = [ShardData()] if shard else []
    return [SyncModel(), *sharding, SyncGradients(**options), SyncMetrics()]
