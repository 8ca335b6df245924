"""One rank's share of a DataLoader: the same loader in every argument, with less to load.

In training the ranks share out the samples one by one, so that step k of all ranks together takes
the samples that one process with the N-fold batch size would take. In evaluation they share out
whole batches, the very ones a single process would take, so that every number, also one that is
computed per batch, is the one that process reports.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from torchbearer_ddp.data.sampling import Remainder, ShardIterable, ShardSampler, generators_of

_MARK = "_torchbearer_ddp_share"
#: The arguments that a share has in common with its loader, and that are readable from it.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


@dataclass(frozen=True)
class Share:
    """How a loader was shared out, so that results can be put in order again.

    Args:
        original: The loader that was shared out.
        world_size: The number of ranks it was shared between.
        seed: The base seed of its order.
        whole_batches: True if each batch is one that a single process would take.
        block: The samples in a row that each rank got in turn, if that is known.
        total: The number of samples there are, where some ranks got the first ones twice.
    """

    original: Any
    world_size: int
    seed: int
    whole_batches: bool
    block: int | None = 1
    total: int | None = None


def share_of(loader: Any) -> Share | None:
    """How a loader is shared out between the ranks, or None if each rank gets all of it.

    A loader with a ``DistributedSampler``, or whose data set says ``shards_itself = True``, counts.

    Args:
        loader: Any generator of batches.
    """
    found = vars(loader).get(_MARK) if hasattr(loader, "__dict__") else None
    if isinstance(found, Share) or not isinstance(loader, DataLoader):
        return found
    sampler: Any = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        total = len(sampler.dataset)  # type: ignore[arg-type]
        return Share(loader, sampler.num_replicas, sampler.seed, False, total=total)
    if getattr(loader.dataset, "shards_itself", False):
        return Share(loader, 0, 0, True, block=None)
    return None


def base_seed(loader: Any) -> int:
    """The seed of a loader's order: its own generator's, or else the process's.

    Args:
        loader: Any generator of batches.
    """
    own = [
        generator
        for part in (
            loader,
            getattr(loader, "sampler", None),
            getattr(loader, "batch_sampler", None),
        )
        for generator in generators_of(part)
    ]
    return own[0].initial_seed() if own else torch.initial_seed()


def take_share(
    loader: Any,
    rank: int,
    world_size: int,
    *,
    training: bool,
    seed: int,
    global_batch: bool = False,
) -> DataLoader[Any]:
    """One rank's share of a loader.

    Args:
        loader: The loader to share; it is not changed.
        rank: Whose share to take.
        world_size: The number of ranks.
        training: True for shares of equal length; False for shares without duplicates.
        seed: The base seed of the order, the same on every rank.
        global_batch: Divide the batch size by the number of ranks (in training: evaluation takes
            the batches of a single process as they are).

    Raises:
        ValueError: If the loader cannot be shared.
    """
    _check(loader)
    batch_size = loader.batch_size
    if training and global_batch:
        batch_size = _divided(loader, world_size)
    remainder = Remainder.KEEP
    if training:
        batches = loader.batch_sampler if batch_size is None else loader
        remainder = Remainder.DROP if getattr(batches, "drop_last", False) else Remainder.PAD
    block = 1 if training else batch_size or 1
    dealt = (rank, world_size, remainder)
    batching = {"batch_size": batch_size, "drop_last": loader.drop_last}
    changes: dict[str, Any]
    if isinstance(loader.dataset, IterableDataset):
        stream = ShardIterable(loader.dataset, *dealt, block)
        changes = {"dataset": stream, **batching}
    elif batch_size is None and loader.batch_sampler is not None:
        batch_sampler = ShardSampler(loader.batch_sampler, *dealt, seed)
        changes = {"dataset": loader.dataset, "batch_sampler": batch_sampler}
    else:
        sampler = ShardSampler(loader.sampler, *dealt, seed, block)
        changes = {"dataset": loader.dataset, "sampler": sampler, **batching}
    shared = _rebuild(loader, changes)
    whole = not training or batch_size is None
    share = Share(
        loader, world_size, seed, whole, block if loader.batch_size else None, _total(loader)
    )
    setattr(shared, _MARK, share)
    return shared


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells whatever in a loader wants to know which epoch begins.

    Args:
        loader: Any generator of batches.
        epoch: The number of the epoch.
    """
    batches = getattr(loader, "batch_sampler", None)
    parts: list[Any] = [batches, getattr(batches, "sampler", None)]
    parts += [getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
    for part in {id(p): p for p in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def steps_of_share(steps: int | None, whole: int, share: int, *, training: bool) -> int | None:
    """The number of steps a rank takes.

    Args:
        steps: The steps of the Trial.
        whole: The length of the loader before it was shared.
        share: The length of this rank's share.
        training: True to keep steps that the user chose whatever the share: it starts over. In
            evaluation a rank takes no more than its share, so that nothing counts twice.
    """
    if steps is None or steps == whole:
        return share
    if training or steps < 0 or (steps > whole and share):
        return steps
    return min(steps, share)


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"A {type(loader).__name__} cannot be shared out: only a torch DataLoader can. Give a "
            "DataLoader, or give each rank its own data and switch sharding off for it with "
            "ShardData(train=False), ShardData(validation=False) or ShardData(test=False)."
        )
    if isinstance(loader.dataset, IterDataPipe):
        raise ValueError(
            "An IterDataPipe cannot be shared out: its sharding_filter shares it already. Switch "
            "sharding off with ShardData(train=False) or set shards_itself = True on it."
        )
    if isinstance(loader.dataset, IterableDataset):
        return
    name = "sampler" if loader.batch_size or not loader.batch_sampler else "batch_sampler"
    if not hasattr(getattr(loader, name), "__len__"):
        raise ValueError(
            f"The loader's {name} ({type(getattr(loader, name)).__name__}) has no length, so it "
            "cannot be shared out evenly. Give it a __len__, or share the data yourself and "
            "switch sharding off with ShardData(train=False)."
        )


def _divided(loader: Any, world_size: int) -> int:
    size = loader.batch_size
    if size is None or size % world_size:
        found = "no batch size of its own" if size is None else f"batch size {size}"
        raise ValueError(
            f"global_batch=True divides the batch size between {world_size} ranks, but a loader "
            f"has {found}. Choose a multiple of {world_size}, or leave global_batch out: then "
            "the batch size is each rank's."
        )
    return int(size) // world_size


def _total(loader: Any) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    if loader.batch_size is None and loader.batch_sampler is not None:
        return len(loader.batch_sampler)
    return len(loader.sampler)


def _rebuild(loader: Any, changes: dict[str, Any]) -> DataLoader[Any]:
    """The same loader with other data; a subclass is made with what its constructor asks for."""
    kind = type(loader)
    arguments = {name: getattr(loader, name) for name in _KEPT}
    if kind is not DataLoader:
        known = inspect.signature(DataLoader.__init__).parameters
        extra = [name for name in inspect.signature(kind.__init__).parameters if name not in known]
        arguments.update({name: getattr(loader, name) for name in extra if hasattr(loader, name)})
    arguments.update(changes)
    try:
        shared: DataLoader[Any] = kind(**arguments)
    except TypeError as error:
        raise ValueError(_not_rebuilt(kind, str(error))) from error
    for name, value in arguments.items():
        found = getattr(shared, name, value)
        if found is not value and found != value:
            raise ValueError(_not_rebuilt(kind, f"it changes {name}"))
    for name, value in vars(loader).items():
        if name != "tb_iter" and name not in vars(shared):  # an iterator belongs to its loader
            setattr(shared, name, value)
    return shared


def _not_rebuilt(kind: type, why: str) -> str:
    return (
        f"A {kind.__name__} cannot be shared out, because it cannot be made again from the "
        f"arguments of a DataLoader ({why}). Accept and keep those, or share the data yourself "
        "(with a DistributedSampler, say) and switch sharding off with ShardData(train=False)."
    )
