"""Each rank takes its share of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torchbearer
from torch.utils.data import DataLoader

from torchbearer_ddp.callbacks.callback_order import FIRST, OrderedCallback
from torchbearer_ddp.data import loaders
from torchbearer_ddp.group import collectives

_PARTS = {
    torchbearer.TRAIN_DATA: (torchbearer.TRAIN_GENERATOR, torchbearer.TRAIN_STEPS),
    torchbearer.VALIDATION_DATA: (torchbearer.VALIDATION_GENERATOR, torchbearer.VALIDATION_STEPS),
    torchbearer.TEST_DATA: (torchbearer.TEST_GENERATOR, torchbearer.TEST_STEPS),
}


def shard(loader: DataLoader[Any], training: bool = True) -> DataLoader[Any]:
    """Gives this rank's share of a DataLoader, for those who want it explicit.

    Call it on every rank. :class:`ShardData` leaves such a loader as it is, and tells it the epoch;
    in a loop of your own call ``loader.sampler.set_epoch(epoch)``. Without a process group the
    loader itself comes back.

    Example: ::

        >>> from torch.utils.data import DataLoader
        >>> from torchbearer_ddp import shard
        >>> loader = shard(DataLoader(range(10), batch_size=2, shuffle=True))

    Args:
        loader: The loader to share; it is not changed.
        training: True for shares of equal length (the first samples are dealt twice where they do
            not go round, or the last ones dropped with ``drop_last``); False for whole batches
            without duplicates, where a rank may get fewer or none.

    Raises:
        ValueError: If the loader cannot be shared (on every rank).
    """
    if collectives.world_size() == 1 or loaders.share_of(loader) is not None:
        return loader
    seed = collectives.broadcast(loaders.base_seed(loader), "the seed of a loader")
    error: ValueError | None = None
    try:
        loader = loaders.take_share(
            loader, collectives.rank(), collectives.world_size(), training=training, seed=seed
        )
    except ValueError as caught:
        error = caught
    collectives.raise_together(error, "sharding a loader")
    return loader


class ShardData(OrderedCallback):
    """Turns the plain DataLoaders of a Trial into this rank's share of them.

    In training, every rank gets as many samples: step k of all N ranks takes what step k of one
    process with N times the batch size would. The order is drawn alike on every rank and anew each
    epoch; a resumed run draws the same order for the same epoch. A sampler of your own must draw
    from python's, numpy's or torch's generator, or from its own attribute ``generator``.

    In evaluation and prediction the ranks take turns at the batches that one process would take:
    no sample counts twice, and a rank may get fewer batches, or none.

    A loader with a ``batch_sampler`` is shared batch by batch. Of an ``IterableDataset`` each rank
    takes every N-th item (in evaluation every N-th batch of items); with several workers its length
    is an estimate, as it is in torch: then give the Trial the steps. A data set that shares itself
    out says so with an attribute ``shards_itself = True``; it, a loader with torch's
    ``DistributedSampler``, and one made by :func:`shard` are left as they are.

    Steps that were given to the Trial are kept; in evaluation a rank stops at the end of its share.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import ShardData
        >>> trial = Trial(None, callbacks=[ShardData(global_batch=True)])

    Args:
        train: Share the training data.
        validation: Share the validation data.
        test: Share the test data, and data of other keys.
        global_batch: The batch size of the training data is that of all ranks together, to be
            divided by their number; without it, it is each rank's.

    State Requirements:
        - :attr:`torchbearer.state.SELF`: The Trial, whose data is replaced
        - :attr:`torchbearer.state.EPOCH`: The current epoch
    """

    # First, so that every other callback sees the loaders and steps of the run.
    order: ClassVar[Mapping[str, int]] = {"on_start": FIRST - 1, "on_start_epoch": FIRST}

    def __init__(
        self,
        train: bool = True,
        validation: bool = True,
        test: bool = True,
        *,
        global_batch: bool = False,
    ) -> None:
        super().__init__()
        self._wanted = {
            torchbearer.TRAIN_DATA: train,
            torchbearer.VALIDATION_DATA: validation,
            torchbearer.TEST_DATA: test,
        }
        self._global_batch = global_batch

    def on_start(self, state: Any) -> None:
        """At the start of run, evaluate and predict: only now are the loaders known."""
        if collectives.world_size() == 1:
            return
        trial = state[torchbearer.SELF]
        keys = [*_PARTS]
        running = state.get(torchbearer.DATA)
        if running is not None and running not in _PARTS:
            keys.append(running)
        mine = [loaders.base_seed(_loader(trial.state, key)) for key in keys]
        seeds = collectives.broadcast(mine, "the seeds of the loaders")
        error: ValueError | None = None
        try:
            for key, seed in zip(keys, seeds, strict=True):
                self._share(trial.state, state, key, seed)
        except ValueError as caught:
            error = caught
        collectives.raise_together(error, "sharding the data")
        if running is not None:
            self._use_share(trial.state, state, running)

    def on_start_epoch(self, state: Any) -> None:
        """Before the epoch's first batch is drawn."""
        if collectives.world_size() == 1:
            return
        trial = state[torchbearer.SELF]
        using = [_loader(trial.state, key) for key in _PARTS] + [state.get(torchbearer.GENERATOR)]
        for loader in {id(each): each for each in using if each is not None}.values():
            loaders.set_epoch(loader, state[torchbearer.EPOCH])

    def _share(self, trial_state: Any, state: Any, key: Any, seed: int) -> None:
        loader = _loader(trial_state, key)
        wanted = self._wanted.get(key, self._wanted[torchbearer.TEST_DATA])
        if loader is None or not wanted:
            return
        training = key == torchbearer.TRAIN_DATA
        share = loaders.share_of(loader)
        if share is None:
            whole, shared = loader, self._take(loader, seed, training=training)
        elif share.original is loader or training:
            return  # somebody else shares it
        else:  # shared before, but the steps may have been given since
            whole, shared = share.original, loader
        steps = loaders.steps_of_share(
            trial_state[key][1], len(whole), len(shared), training=training
        )
        # torchbearer refreshes the run's state from the Trial's before each pass.
        for each in (trial_state, state):
            each[key] = (shared, steps)
            if key in _PARTS:
                each[_PARTS[key][0]], each[_PARTS[key][1]] = shared, steps

    def _use_share(self, trial_state: Any, state: Any, key: Any) -> None:
        """Corrects what evaluate and predict have put into the run's state before on_start."""
        if trial_state[key] is None or trial_state[key][0] is None:
            return
        loader, steps = trial_state[key]
        share = loaders.share_of(loader)
        if key == torchbearer.TRAIN_DATA and share is not None and share.original is not loader:
            # The training data is evaluated: no sample may count twice.
            whole = self._take(share.original, share.seed, training=False)
            steps = loaders.steps_of_share(steps, len(loader), len(whole), training=False)
            loader = whole
        state[torchbearer.GENERATOR], state[torchbearer.STEPS] = loader, steps

    def _take(self, loader: Any, seed: int, *, training: bool) -> DataLoader[Any]:
        return loaders.take_share(
            loader,
            collectives.rank(),
            collectives.world_size(),
            training=training,
            seed=seed,
            global_batch=self._global_batch,
        )


def _loader(state: Any, key: Any) -> Any:
    data = state.get(key)
    return None if data is None else data[0]
