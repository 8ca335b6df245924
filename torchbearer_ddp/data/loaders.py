"""One rank's share of a DataLoader: a loader with the same arguments and fewer batches.

In training, samples are divided one by one: step k of all ranks together takes the samples that one
process with N times the batch size would take; batches of the last step may differ by a sample. In
evaluation, whole batches are divided: they are the batches of a single process, so values that are
computed per batch are also equal to its values.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from torchbearer_ddp.data.sampling import (
    Partition,
    Remainder,
    Repeated,
    ShardBatches,
    ShardIterable,
    ShardSampler,
    generators_of,
)
from torchbearer_ddp.log import announce

_MARK = "_torchbearer_ddp_share"
#: The arguments of a DataLoader that a share does not take from its loader's attributes.
_REPLACED = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


@dataclass(frozen=True)
class Share:
    """How a loader was divided between the ranks, so that results can be put in order.

    Attributes:
        original: The loader before it was divided.
        seed: The base seed of its order.
        whole_batches: True if each batch is one that a single process would take.
        block: The number of consecutive samples that each rank has, or None if it is not known.
        total: The number of samples without padding, or None if it is not known.
    """

    original: Any
    seed: int
    whole_batches: bool
    block: int | None = 1
    total: int | None = None


def share_of(loader: Any) -> Share | None:
    """How a loader is divided between the ranks, or None if each rank loads all of it.

    A ``DistributedSampler`` or a data set with ``shards_itself = True`` also divides a loader.
    """
    found = vars(loader).get(_MARK) if hasattr(loader, "__dict__") else None
    if isinstance(found, Share) or not isinstance(loader, DataLoader):
        return found
    sampler: Any = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        total = len(sampler.dataset)  # type: ignore[arg-type]
        return Share(loader, sampler.seed, whole_batches=False, total=total)
    if getattr(loader.dataset, "shards_itself", False):
        return Share(loader, 0, whole_batches=True, block=None)
    return None


def base_seed(loader: Any) -> int:
    """The seed of a loader's order: that of its own generator, or else the process's."""
    for part in (loader, getattr(loader, "batch_sampler", None)):
        for generator in generators_of(part):
            return generator.initial_seed()
    return torch.initial_seed()


def take_share(
    loader: Any,
    rank: int,
    world_size: int,
    *,
    training: bool,
    seed: int,
    global_batch: bool = False,
) -> Any:
    """One rank's share of a loader, which is not changed itself.

    In training the shares have equally many batches; in evaluation no sample is in two shares. With
    ``global_batch`` the batch size in training is divided by the number of ranks.

    Raises:
        ValueError: If the loader cannot be sharded.
    """
    check(loader)
    batch_size = getattr(loader, "batch_size", None)
    if training and global_batch:
        batch_size = divided(batch_size, world_size)
    remainder = remainder_of(loader) if training else Remainder.KEEP
    if not isinstance(loader, DataLoader):
        return _take_batches(loader, loader, Partition(rank, world_size, remainder), seed)
    changes = {"dataset": loader.dataset, "batch_size": batch_size, "drop_last": loader.drop_last}
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers:
        # What each worker reads is not known here, so only whole batches can be divided.
        inner = rebuild(loader, changes) if batch_size != loader.batch_size else loader
        return _take_batches(loader, inner, Partition(rank, world_size, remainder), seed)
    block, batch = (1, batch_size or 1) if training else (batch_size or 1, 1)
    partition = Partition(rank, world_size, remainder, block, batch)
    if isinstance(loader.dataset, IterableDataset):
        changes["dataset"] = ShardIterable(loader.dataset, partition, seed, batch_size or 1)
    elif has_batch_sampler(loader):
        batch_sampler = ShardSampler(loader.batch_sampler, partition, seed)
        changes = {"dataset": loader.dataset, "batch_sampler": batch_sampler}
    else:
        changes["sampler"] = ShardSampler(loader.sampler, partition, seed)
    shared = rebuild(loader, changes)
    share = Share(
        loader,
        seed,
        whole_batches=not training or batch_size is None,
        block=block if loader.batch_size else None,
        total=_total(loader),
    )
    setattr(shared, _MARK, share)
    _announce_repeats(partition, share.total, "batches" if batch_size is None else "samples")
    return shared


def take_repeated(share: Share, rank: int, world_size: int, steps: int) -> Any:
    """One rank's share of more batches than a loader has, for evaluation."""
    partition = Partition(rank, world_size, Remainder.KEEP)
    return _take_batches(share.original, Repeated(share.original, steps), partition, share.seed)


def _take_batches(loader: Any, inner: Any, partition: Partition, seed: int) -> ShardBatches:
    shared = ShardBatches(inner, partition, seed)
    total = len(inner) if hasattr(inner, "__len__") else None
    setattr(shared, _MARK, Share(loader, seed, whole_batches=True, block=None, total=total))
    _announce_repeats(partition, total, "batches")
    if isinstance(loader, DataLoader):
        what = "an IterableDataset with workers"
        remedy = "shards_itself = True on a data set that divides itself avoids that"
    else:
        what = f"a {type(loader).__name__}, not a DataLoader"
        remedy = (
            "A DataLoader avoids that; where each rank has data of its own, use "
            "data_parallel(shard=False)"
        )
    announce(
        f"data: this is {what}, so each rank takes one of every {partition.world_size} "
        f"batches, and makes all of them for that. {remedy}"
    )
    return shared


def _announce_repeats(partition: Partition, total: int | None, items: str) -> None:
    """Says it where an epoch cannot be that of one process: every rank needs a batch in a step."""
    if total is not None and (repeats := partition.repeats(total)):
        announce(
            f"data: {total} {items} are too few for the last step of {partition.world_size} ranks, "
            f"so {repeats} of them are used twice in an epoch; drop_last=True leaves the last out"
        )


def set_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` of every part of a loader that has it."""
    if isinstance(loader, ShardBatches):
        loader.set_epoch(epoch)
    if isinstance(loader, ShardBatches | Repeated):
        set_epoch(loader.inner, epoch)
        return
    batches = getattr(loader, "batch_sampler", None)
    parts: list[Any] = [loader, batches, getattr(batches, "sampler", None)]
    parts += [getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
    for part in {id(p): p for p in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def evaluation_steps(steps: int, rank: int, world_size: int) -> int:
    """How many of the batches that are to be evaluated in all belong to a rank."""
    return steps if steps < 0 else Partition(rank, world_size, Remainder.KEEP).length(steps)


def remainder_of(loader: Any) -> Remainder:
    """What happens in training to what cannot be divided evenly."""
    batches = loader
    if getattr(loader, "batch_size", None) is None:
        batches = getattr(loader, "batch_sampler", None) or loader
    return Remainder.DROP if getattr(batches, "drop_last", False) else Remainder.PAD


def has_batch_sampler(loader: Any) -> bool:
    """True if the user chose a batch sampler; a loader with a batch size makes its own."""
    return loader.batch_size is None and loader.batch_sampler is not None


def check(loader: Any) -> None:
    """Raises if a loader cannot be sharded."""
    if not isinstance(loader, DataLoader):
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise ValueError(
                f"A {type(loader).__name__} cannot be sharded: it cannot be iterated. Give a "
                "DataLoader, or something with __iter__ and __len__ that gives batches."
            )
        return
    if isinstance(loader.dataset, IterDataPipe):
        raise ValueError(
            "An IterDataPipe cannot be sharded: it has a sharding_filter of its own. Switch "
            "sharding off with ShardData(train=False) or set shards_itself = True on it."
        )
    if isinstance(loader.dataset, IterableDataset):
        return
    name = "batch_sampler" if has_batch_sampler(loader) else "sampler"
    if not hasattr(getattr(loader, name), "__len__"):
        raise ValueError(
            f"The loader's {name} ({type(getattr(loader, name)).__name__}) has no length, so it "
            "cannot be sharded evenly. Give it a __len__, or shard the data yourself and "
            "switch sharding off with ShardData(train=False)."
        )


def divided(batch_size: int | None, world_size: int) -> int:
    """A rank's part of a batch size that is that of all ranks together."""
    if batch_size is None or batch_size % world_size:
        found = "no batch size of its own" if batch_size is None else f"batch size {batch_size}"
        raise ValueError(
            f"global_batch=True divides the batch size between {world_size} ranks, but a loader "
            f"has {found}. Choose a multiple of {world_size}, or leave global_batch out: then "
            "the batch size is each rank's."
        )
    return batch_size // world_size


def _total(loader: Any) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    return len(loader.batch_sampler if has_batch_sampler(loader) else loader.sampler)


def rebuild(loader: Any, changes: dict[str, Any]) -> DataLoader[Any]:
    """The same kind of loader with changed arguments; a subclass gets those of its constructor."""
    kind = type(loader)
    names = {n for each in (DataLoader, kind) for n in inspect.signature(each.__init__).parameters}
    kept = {n: getattr(loader, n) for n in names - _REPLACED if hasattr(loader, n)}
    arguments = {**kept, **changes}
    try:
        shared: DataLoader[Any] = kind(**arguments)
    except TypeError as error:
        raise ValueError(_not_rebuilt(kind, str(error))) from error
    for name, value in arguments.items():
        found = getattr(shared, name, value)
        if found is not value and found != value:
            raise ValueError(_not_rebuilt(kind, f"it changes {name}"))
    for name, value in vars(loader).items():
        if name != "tb_iter" and name not in vars(shared):  # torchbearer's iterator of this loader
            setattr(shared, name, value)
    return shared


def _not_rebuilt(kind: type, why: str) -> str:
    return (
        f"A {kind.__name__} cannot be sharded, because it cannot be created again from the "
        f"arguments of a DataLoader ({why}). Accept these arguments unchanged, or shard the data "
        "yourself (for example with a DistributedSampler) and switch sharding off with "
        "ShardData(train=False)."
    )
