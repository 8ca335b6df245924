"""torchdata's StatefulDataLoader continues in the middle of an epoch by its own state.

It does so where the batches are then those of the run that was not interrupted: its data set saves
itself, or remembers nothing, and its sampler saves itself, or draws the whole order when it is
first used. Otherwise it is replayed, and a line in the log says why. torchdata is not imported.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from typing import Any

import numpy
import torch
import torchbearer
from torch.utils import data
from torch.utils.data.dataloader import _InfiniteConstantSampler

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import generators, kinds
from torchbearer_ddp.data.sampling import ShardIterable, ShardSampler
from torchbearer_ddp.group.plain_data import type_name
from torchbearer_ddp.log import announce

_announce_once = functools.cache(announce)
#: A data set that must be read from the start has this attribute, and it is True.
REPLAYS = "resumes_by_replay"
_METHODS = ("__iter__", "_get_iterator", "state_dict", "load_state_dict")
#: Samplers that draw nothing, or the whole order when they are first used.
_SAMPLERS = (
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    data.DistributedSampler,
    ShardSampler,
    _InfiniteConstantSampler,
)
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, numpy.ndarray)
_COUNT = checked.whole(0)
_OPTIONAL_STATE = checked.optional(checked.kind(dict, "a dict"))
#: Both kinds of its iterators save this of the sampler, and of each data set.
_SAMPLER = {
    "_sampler_iter_yielded": _COUNT,
    "_sampler_iter_state": _OPTIONAL_STATE,
    "_index_sampler_state": _OPTIONAL_STATE,
    "_IterableDataset_len_called": checked.optional(_COUNT),
    "_shared_seed": checked.optional(checked.whole()),
}
_DATA = {
    "dataset_state": _OPTIONAL_STATE,
    "fetcher_state": checked.optional(
        checked.record({"dataset_iter_state": _OPTIONAL_STATE, "fetcher_ended": checked.boolean})
    ),
}
_FINISHED = {"_iterator_finished": checked.boolean}
_SINGLE = checked.record({"_num_yielded": _COUNT, **_SAMPLER, **_DATA, **_FINISHED})
_SNAPSHOT = checked.record(
    {
        "_snapshot_step": _COUNT,
        "_last_yielded_worker_id": _COUNT,
        "_main_snapshot": checked.record(
            {"_num_workers": checked.whole(1), "_base_seed": checked.whole(), **_SAMPLER}
        ),
        "_worker_snapshots": checked.table(checked.record({"worker_id": _COUNT, **_DATA})),
    }
)
_WORKERS = checked.record({"_snapshot": _SNAPSHOT, "_steps_since_snapshot": _COUNT, **_FINISHED})


def find(state: Any) -> Any:
    """The training data if it is a StatefulDataLoader, or None."""
    loader, _ = state[torchbearer.SELF].state[torchbearer.TRAIN_DATA] or (None, None)
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    return loader if torchdata and isinstance(loader, torchdata.StatefulDataLoader) else None


def saves_itself(thing: Any) -> bool:
    """Whether torchdata takes the state of this data set or sampler from the thing itself."""
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader.stateful")
    return torchdata is not None and isinstance(thing, torchdata.Stateful)


def obstacle(state: Any, loader: Any) -> str | None:
    """Why a StatefulDataLoader does not continue exactly by its state; None if it does."""
    trial, dataset = state[torchbearer.SELF].state, loader.dataset
    own: Any = sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader
    if trial[torchbearer.LOADER] is not None or trial[torchbearer.INF_TRAIN_LOADING]:
        return "its batches are not read one by one from its start"
    if any(getattr(type(loader), each) is not getattr(own, each) for each in _METHODS):
        return f"{type_name(loader)} has methods of its own"
    if loader.persistent_workers or not loader.in_order:
        return "its workers are persistent, or give their batches in any order"
    if getattr(dataset, REPLAYS, False):
        return f"its data set has {REPLAYS} = True"
    if isinstance(dataset, ShardIterable):
        return (
            "its stream is divided between the ranks; shards_itself = True on a data set that "
            "divides itself avoids that"
        )
    if isinstance(dataset, data.IterDataPipe | data.MapDataPipe):
        return "its data set is a pipe"
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if not (saves_itself(sampler) or _draws_at_once(sampler)):
        return f"a {type_name(_innermost(sampler))} has no state_dict, and may draw at any time"
    return None


def _draws_at_once(sampler: Any) -> bool:
    """Whether a sampler that does not save itself has the same order if its start is skipped."""
    torchdata: Any = sys.modules["torchdata.stateful_dataloader.sampler"]
    if type(sampler) is torchdata.BatchSampler:
        return saves_itself(sampler.sampler) or _draws_at_once(sampler.sampler)
    if type(sampler) is data.BatchSampler:
        return _draws_at_once(sampler.sampler)
    if type(sampler) is data.RandomSampler:
        draws_again = sampler.replacement or sampler.num_samples > len(sampler.data_source)
        return sampler.generator is None or not draws_again
    return type(sampler) in (*_SAMPLERS, torchdata.RandomSampler)


def _innermost(sampler: Any) -> Any:
    return _innermost(sampler.sampler) if isinstance(sampler, data.BatchSampler) else sampler


def collect(state: Any, loader: Any, done: int) -> dict[str, Any] | None:
    """The state of the loader after so many batches: plain data, not copied.

    None if it was started over within the epoch, is not what the run reads, or does not say where
    its data set is.
    """
    iterator = state[torchbearer.ITERATOR]
    if state[torchbearer.GENERATOR] is not loader or _batches_of(iterator) != done:
        return None
    found: dict[str, Any] = iterator.state_dict()
    parts = _of_data(found)
    is_stream = isinstance(loader.dataset, data.IterableDataset)
    if is_stream and not all(part["dataset_state"] or _of_iterator(part) for part in parts):
        return None
    # The batches since the snapshot are made again, with other random numbers, and dropped.
    if found.get("_steps_since_snapshot") and any(part["dataset_state"] for part in parts):
        return None
    if (other := _first_not_plain(found)) is not None:
        _announce_once(
            f"data: the state of the StatefulDataLoader holds a {other}, which a checkpoint cannot "
            "hold, so a resume in the middle of an epoch loads the batches before it again"
        )
        return None
    return found


def check(saved: Any, where: str) -> Any:
    """Checks the form of what :func:`collect` gave.

    Raises:
        Unexpected: If a part is missing or has another type.
    """
    is_of_workers = isinstance(saved, dict) and "_snapshot" in saved
    return (_WORKERS if is_of_workers else _SINGLE)(saved, where)


def rehearse(state: Any, saved: dict[str, Any] | None, done: int) -> None:
    """Finds what could not be put back later, while there is still an older file to be used.

    Raises:
        Unexpected: If the state is not that after so many batches, or does not fit the data set.
    """
    if saved is None:
        return
    where = "the state of the StatefulDataLoader"
    checked.one_of(done)(_batches(saved), f"the number of batches in {where}")
    inner = (_of_sampler(saved)["_sampler_iter_state"] or {}).get("sampler_iter_state")
    if isinstance(inner, dict) and isinstance(inner.get("generator"), torch.Tensor):
        torch.Generator().set_state(inner["generator"])
    dataset: Any = getattr(find(state), "dataset", None)
    if saves_itself(dataset):
        live = None
        with contextlib.suppress(Exception):  # one that has to be read from first
            live = dataset.state_dict()
        for part in _of_data(saved) if live else []:
            kinds.check(live, part["dataset_state"], f"{where} of its data set", owner=dataset)


class Place:
    """Brings a StatefulDataLoader to its place; to be made before the loader is started.

    Workers read ahead as soon as they start, so a loader that has some gets its state before. One
    without gets it when all hooks at the start of the epoch have drawn their random numbers.

    Args:
        state: The state of the run.
        loader: The training data.
        saved: What :func:`collect` gave.
        start: The generators at the start of the epoch.
    """

    def __init__(
        self, state: Any, loader: Any, saved: dict[str, Any], start: dict[str, Any]
    ) -> None:
        self._state, self._loader, self._saved, self._start = state, loader, saved, start
        self._done = _batches(saved)
        if loader.num_workers:
            loader.load_state_dict(saved)

    @property
    def first(self) -> int:
        """How many batches come before the first one that is made."""
        return self._done - int(self._saved.get("_steps_since_snapshot", 0))

    def finish(self) -> bool:
        """Leaves out the batches that were done, the loader having been started.

        Returns:
            False if something else has started the loader, or is read; it is then at its start.
        """
        state, loader = self._state, self._loader
        found = _batches_of(state[torchbearer.ITERATOR])
        if state[torchbearer.GENERATOR] is not loader or found is None:
            return False
        if loader.num_workers and found != self._done:  # what else has started it got the state
            generators.restore(state, self._start)
            state[torchbearer.ITERATOR] = iter(loader)
        if loader.num_workers or found:
            return found == self._done
        own, loader.generator = loader.generator, torch.Generator()
        try:  # a loader draws a seed for its workers, and has done so
            loader.load_state_dict(self._saved)
            state[torchbearer.ITERATOR] = iterator = iter(loader)
        finally:
            loader.generator = own
        # torchdata's own samplers are at their place; others draw when they are first used.
        source = iterator._sampler_iter
        if isinstance(source, itertools.islice):
            iterator._sampler_iter = itertools.chain(list(itertools.islice(source, 1)), source)
        return True


def forget(loader: Any) -> None:
    """Takes the state back from a loader that was not started."""
    loader.next_iter_state = None


def _batches_of(iterator: Any) -> int | None:
    """How many batches an iterator of a StatefulDataLoader has given; None for any other."""
    torchdata: Any = sys.modules["torchdata.stateful_dataloader.stateful_dataloader"]
    is_one = isinstance(iterator, torchdata._StatefulBaseDataLoaderIter)
    return _batches(iterator.state_dict()) if is_one else None


def _batches(saved: dict[str, Any]) -> int:
    if "_snapshot" in saved:
        return int(saved["_snapshot"]["_snapshot_step"] + saved["_steps_since_snapshot"])
    return int(saved["_num_yielded"])


def _of_sampler(saved: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = saved.get("_snapshot", {}).get("_main_snapshot", saved)
    return found


def _of_data(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of the data set, one for each worker."""
    return (
        list(saved["_snapshot"]["_worker_snapshots"].values()) if "_snapshot" in saved else [saved]
    )


def _of_iterator(part: dict[str, Any]) -> Any:
    return (part["fetcher_state"] or {}).get("dataset_iter_state")


def _first_not_plain(value: Any) -> str | None:
    """The type of what would not be the same after it was saved."""
    if type(value) in _PLAIN:
        return None
    if type(value) not in (list, tuple, set, dict):
        return type_name(value)
    parts = itertools.chain(value, value.values()) if isinstance(value, dict) else value
    return next((found for each in parts if (found := _first_not_plain(each))), None)
