"""The data of one process: the batches of all ranks together, in the ranks' order."""

from __future__ import annotations

from typing import Any

import torchbearer

from torchbearer_ddp.callbacks.callback_order import of_kind
from torchbearer_ddp.callbacks.data import DATA_KEYS, ShardData
from torchbearer_ddp.data import loaders
from torchbearer_ddp.data.joined import JoinedBatches, Parts, join_own, take_joined


class JoinedData:
    """Does in one process what ShardData does on N ranks, for all of them together."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        #: The loaders that were made here, and the one that each was made from.
        self._made: dict[int, tuple[Any, Any]] = {}
        self._parts: dict[int, Parts] = {}

    def replace(self, state: Any) -> None:
        """Replaces the loaders of a Trial, when run, evaluate or predict begins."""
        trial_state = state[torchbearer.SELF].state
        running = state.get(torchbearer.DATA)
        shard = next(iter(of_kind(state, ShardData)), None)
        keys = dict.fromkeys([*DATA_KEYS, *([] if running is None else [running])])
        for key in keys:
            self._replace(trial_state, state, key, shard)
        if running is not None and trial_state.get(running):
            self._use(trial_state, state, running)

    def set_epoch(self, state: Any) -> None:
        """Sets the epoch of every loader, as ShardData does."""
        trial_state = state[torchbearer.SELF].state
        for key in DATA_KEYS:
            loader, _ = trial_state.get(key) or (None, None)
            if isinstance(loader, JoinedBatches):
                loader = loader.inner
            if loader is not None:
                loaders.set_epoch(loader, state[torchbearer.EPOCH])

    def parts(self, state: Any, count: int) -> list[Any]:
        """The rows of each rank in the batch of a step."""
        loader, _ = state[torchbearer.SELF].state.get(torchbearer.TRAIN_DATA) or (None, None)
        parts = self._parts.get(id(loader), Parts(self._world_size))
        return parts.take(count)

    def _replace(self, trial_state: Any, state: Any, key: Any, shard: ShardData | None) -> None:
        loader, given = trial_state.get(key) or (None, None)
        if loader is None or id(loader) in self._made:
            return
        is_all = given is None or given == len(loader)
        shards = shard is not None and shard.wants(key) and loaders.share_of(loader) is None
        seed = loaders.base_seed(loader)
        if key == torchbearer.TRAIN_DATA:
            joined, parts = (
                take_joined(loader, self._world_size, seed=seed, global_batch=shard.global_batch)
                if shard is not None and shards
                else join_own(loader, self._world_size)
            )
            self._parts[id(joined)] = parts
        elif shards:
            joined = loaders.take_share(loader, 0, 1, training=False, seed=seed)
        else:
            return
        self._made[id(joined)] = (joined, loader)
        steps = len(joined) if is_all else given
        for each in (trial_state, state):
            each[key] = (joined, steps)
            if key in DATA_KEYS:
                each[DATA_KEYS[key][0]], each[DATA_KEYS[key][1]] = joined, steps

    def _use(self, trial_state: Any, state: Any, key: Any) -> None:
        """Corrects what evaluate and predict have put into the state before."""
        loader, steps = trial_state[key]
        if key == torchbearer.TRAIN_DATA and id(loader) in self._made:
            # The training data is evaluated, batch by batch as in one process.
            is_all, original = steps == len(loader), self._made[id(loader)][1]
            seed = loaders.base_seed(original)
            loader = loaders.take_share(original, 0, 1, training=False, seed=seed)
            steps = len(loader) if is_all else steps
        state[torchbearer.GENERATOR], state[torchbearer.STEPS] = loader, steps
