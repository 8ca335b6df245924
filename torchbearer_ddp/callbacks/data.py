"""Shard the data: each rank loads its own share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torchbearer

from torchbearer_ddp.callbacks.callback_order import FIRST, OrderedCallback
from torchbearer_ddp.data import loaders
from torchbearer_ddp.group import collectives

#: The data of a Trial, and where its loader and its steps are as well.
DATA_KEYS = {
    torchbearer.TRAIN_DATA: (torchbearer.TRAIN_GENERATOR, torchbearer.TRAIN_STEPS),
    torchbearer.VALIDATION_DATA: (torchbearer.VALIDATION_GENERATOR, torchbearer.VALIDATION_STEPS),
    torchbearer.TEST_DATA: (torchbearer.TEST_GENERATOR, torchbearer.TEST_STEPS),
}


def shard(loader: Any, training: bool = True) -> Any:
    """Returns this rank's share of a loader, for use without :class:`ShardData`.

    Call it on every rank. :class:`ShardData` does not shard such a loader again, and sets its
    epoch; in a loop of your own call ``loader.sampler.set_epoch(epoch)``, or that of the
    ``batch_sampler`` if you gave one. Without a process group the loader itself is returned, and
    there is nothing to call.

    Example: ::

        >>> from torch.utils.data import DataLoader
        >>> from torchbearer_ddp import shard
        >>> loader = shard(DataLoader(range(10), batch_size=2, shuffle=True))

    Args:
        loader: The loader to shard; it is not changed.
        training: True for shares with equally many batches, the last of which may differ by a
            sample. If the last step has fewer samples than there are ranks, the first ones are used
            twice, or with ``drop_last`` the last ones are dropped. False for whole batches without
            duplicates, of which a rank may have fewer than others, or none.

    Raises:
        ValueError: If the loader cannot be sharded (on every rank).
    """
    if collectives.world_size() == 1 or loaders.share_of(loader) is not None:
        return loader
    seed = collectives.broadcast(loaders.base_seed(loader), "the seed of a loader")
    return collectives.run_together(lambda: _take(loader, seed, training), "sharding a loader")


class ShardData(OrderedCallback):
    """Replaces the DataLoaders of a Trial by this rank's shares of them.

    In training, every rank has the same number of batches: step k of all N ranks takes the samples
    that step k of one process with N times the batch size would take. The order is the same on
    every rank and changes each epoch; a resumed run has the same order in the same epoch. A sampler
    of your own must draw from python's, numpy's or torch's generator, or from its own attribute
    ``generator``.

    In evaluation and prediction the batches of one process are divided between the ranks: no sample
    is used twice, and a rank may have fewer batches than others, or none.

    A loader with a ``batch_sampler`` is sharded batch by batch. Of an ``IterableDataset`` each rank
    takes every N-th item (in evaluation every N-th batch of items). If it has workers, and of a
    loader that is not a DataLoader, each rank makes all batches and takes every N-th one. A data
    set with the attribute ``shards_itself = True``, a loader with torch's ``DistributedSampler``,
    and a loader that :func:`shard` returned are not sharded again.

    Training steps that were given to the Trial are those of each rank. Evaluation steps are the
    number of batches in all, which the ranks divide between them.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import ShardData
        >>> trial = Trial(None, callbacks=[ShardData(global_batch=True)])

    Args:
        train: True to shard the training data.
        validation: True to shard the validation data.
        test: True to shard the test data, and data of other keys.
        global_batch: True if the batch size of the training data is that of all ranks together, so
            that it is divided by their number; False if it is the batch size of each rank.

    State Requirements:
        - :attr:`torchbearer.state.SELF`: The Trial, whose data is replaced
        - :attr:`torchbearer.state.EPOCH`: The current epoch
    """

    only_once: ClassVar[bool] = True
    # First, so that every other callback reads the sharded loaders and their steps.
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
        self.global_batch = global_batch
        #: The data of the Trial as it was written there, by key.
        self._entries: dict[Any, Any] = {}
        #: By key of validation and test data the batches of all ranks together.
        self._totals: dict[Any, int | None] = {}
        #: The state of the call in progress; evaluations inside a run have states of their own.
        self._outermost: Any = None

    def wants(self, key: Any) -> bool:
        """True if the data under a key of the state is to be sharded.

        Args:
            key: ``TRAIN_DATA``, ``VALIDATION_DATA`` or another one.
        """
        return self._wanted.get(key, self._wanted[torchbearer.TEST_DATA])

    def on_start(self, state: Any) -> None:
        """At the start of run, evaluate and predict: the loaders are not known earlier."""
        if collectives.world_size() == 1:
            return
        if self._outermost is None:
            self._outermost = state
        trial = state[torchbearer.SELF]
        keys = [*DATA_KEYS]
        running = state.get(torchbearer.DATA)
        if running is not None and running not in DATA_KEYS:
            keys.append(running)
        mine = [loaders.base_seed(_loader(trial.state, key)) for key in keys]
        is_new = any(self._is_new(trial.state, key) for key in keys)
        name = "the seeds of the loaders"
        everyone = collectives.all_gather((mine, is_new), name, collectives.SHORT_BYTES)
        seeds, _ = everyone[0]

        def share_all() -> None:
            for key, seed in zip(keys, seeds, strict=True):
                self._share(trial.state, state, key, seed)

        if any(is_new for _, is_new in everyone):
            collectives.run_together(share_all, "sharding the data")
        else:  # as in every run but the first: nothing that could fail
            share_all()
        if running is not None:
            self._use_share(trial.state, state, running)

    def on_start_epoch(self, state: Any) -> None:
        """Sets the epoch before its first batch is drawn.

        An evaluation inside a run is in epoch 0, but what it reads may be the run's data.
        """
        if collectives.world_size() == 1:
            return
        using = [state.get(torchbearer.GENERATOR)]
        if state is self._outermost:
            using += [_loader(state[torchbearer.SELF].state, key) for key in DATA_KEYS]
        for loader in {id(each): each for each in using if each is not None}.values():
            loaders.set_epoch(loader, self._outermost[torchbearer.EPOCH])

    def leave(self) -> None:
        """After an exception too: the next call is not inside this one."""
        self._outermost = None

    def _is_new(self, trial_state: Any, key: Any) -> bool:
        """True unless the data under a key is what an earlier run has put there."""
        entry: tuple[Any, Any] = trial_state.get(key) or (None, None)
        return entry[0] is not None and self.wants(key) and self._entries.get(key) is not entry

    def _share(self, trial_state: Any, state: Any, key: Any, seed: int) -> None:
        entry: tuple[Any, Any] = trial_state.get(key) or (None, None)
        loader, given = entry
        if loader is None or not self.wants(key):
            return
        training = key == torchbearer.TRAIN_DATA
        share = loaders.share_of(loader)
        if share is None:
            shared = _take(loader, seed, training, self.global_batch)
            is_all = given is None or given == len(loader)
            steps = len(shared) if is_all else given
            if not training and not is_all:
                shared, steps = _of_steps(shared, given)
        elif training or share.original is loader:
            return  # divided in an earlier run, or by the user's own sampler or data set
        elif self._entries.get(key) is entry:
            self._write(key, trial_state, state)
            return
        else:  # the steps were given after an earlier run, or shard() was called by the user
            is_all = key not in self._entries and given == len(loader)
            shared, steps = (loader, given) if is_all else _of_steps(loader, given)
        self._entries[key] = (shared, steps)
        if key in DATA_KEYS and not training:
            self._totals[key] = given
        self._write(key, trial_state, state)

    def _write(self, key: Any, trial_state: Any, state: Any) -> None:
        """Writes a share into the Trial's state, which torchbearer copies into the run's own."""
        for each in (trial_state, state):
            each[key] = self._entries[key]
            if key in DATA_KEYS:
                each[DATA_KEYS[key][0]], each[DATA_KEYS[key][1]] = self._entries[key]
        if key in self._totals:  # torchbearer takes them for those of the next loader it is given
            trial_state[DATA_KEYS[key][1]] = self._totals[key]

    def _use_share(self, trial_state: Any, state: Any, key: Any) -> None:
        """Corrects the loader and steps that evaluate and predict put into the state before."""
        if trial_state[key] is None or trial_state[key][0] is None:
            return
        loader, steps = trial_state[key]
        share = loaders.share_of(loader)
        if key == torchbearer.TRAIN_DATA and share is not None and share.original is not loader:
            # The training data is evaluated, where no sample may be used twice.
            is_all, loader = steps == len(loader), _take(share.original, share.seed, training=False)
            loader, steps = (loader, len(loader)) if is_all else _of_steps(loader, steps)
        state[torchbearer.GENERATOR], state[torchbearer.STEPS] = loader, steps


def _of_steps(shared: Any, steps: int) -> tuple[Any, int]:
    """A rank's share of so many batches that are evaluated in all, and its steps."""
    rank, world_size = collectives.rank(), collectives.world_size()
    share = loaders.share_of(shared)
    if share is not None and steps > len(share.original):
        shared = loaders.take_repeated(share, rank, world_size, steps)
    return shared, loaders.evaluation_steps(steps, rank, world_size)


def _take(loader: Any, seed: int, training: bool, global_batch: bool = False) -> Any:
    rank, world_size = collectives.rank(), collectives.world_size()
    return loaders.take_share(
        loader, rank, world_size, training=training, seed=seed, global_batch=global_batch
    )


def _loader(state: Any, key: Any) -> Any:
    data = state.get(key)
    return None if data is None else data[0]
