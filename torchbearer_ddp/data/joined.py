"""The batches of all ranks in one process: step k takes what step k of N ranks takes together.

The samples, their order and what is padded are those of the ranks' shares, so that one process can
be compared with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from torchbearer_ddp.data import loaders
from torchbearer_ddp.data.batch import remade, rows
from torchbearer_ddp.data.sampling import (
    Partition,
    ShardBatches,
    ShardIterable,
    ShardSampler,
    interleave,
)


class Parts:
    """Which rows of a joined batch are whose.

    Attributes:
        sizes: The sizes of the ranks' batches that follow each other in a joined batch, one list
            for each batch that was drawn and not taken yet; None if the ranks take turns, sample by
            sample.
    """

    def __init__(self, world_size: int, sizes: list[list[int]] | None = None) -> None:
        self._world_size = world_size
        self.sizes = sizes

    def take(self, count: int) -> list[torch.Tensor]:
        """The rows of each rank in the batch that was loaded last, which has so many rows."""
        sizes = self.sizes.pop(0) if self.sizes else []
        if sum(sizes) != count:  # they take turns; or a collate function has changed the batch
            return [
                torch.arange(rank, count, self._world_size, device="cpu")
                for rank in range(self._world_size)
            ]
        starts = itertools.accumulate(sizes, initial=0)
        return [
            torch.arange(s, s + size, device="cpu") for s, size in zip(starts, sizes, strict=False)
        ]


class JoinedBatches:
    """Makes one batch of so many that follow each other."""

    def __init__(self, inner: Any, world_size: int, parts: Parts) -> None:
        self.inner = inner
        self._world_size = world_size
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.inner)
        self._parts.sizes = []
        while batches := list(itertools.islice(source, self._world_size)):
            self._parts.sizes.append([rows(each) for each in batches])
            yield concatenate(batches)

    def __len__(self) -> int:
        return -(-len(self.inner) // self._world_size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class _JoinedBatchSampler(Sampler[Any]):
    """Draws the indices of one batch for so many of another batch sampler."""

    def __init__(self, inner: ShardSampler, world_size: int, parts: Parts) -> None:
        self.inner, self._world_size, self._parts = inner, world_size, parts

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of this epoch."""
        self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        source = iter(self.inner)
        self._parts.sizes = []
        while batches := list(itertools.islice(source, self._world_size)):
            self._parts.sizes.append(list(map(len, batches)))
            yield [index for batch in batches for index in batch]

    def __len__(self) -> int:
        return -(-len(self.inner) // self._world_size)


class _AllReplicas(Sampler[Any]):
    """What all replicas of a DistributedSampler draw."""

    def __init__(self, sampler: Any, world_size: int) -> None:
        given = (sampler.shuffle, sampler.seed, sampler.drop_last)
        self._replicas: list[DistributedSampler[Any]] = [
            DistributedSampler(sampler.dataset, world_size, rank, *given)
            for rank in range(world_size)
        ]

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of this epoch."""
        for replica in self._replicas:
            replica.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(interleave([list(replica) for replica in self._replicas]))

    def __len__(self) -> int:
        return sum(map(len, self._replicas))


def take_joined(
    loader: Any, world_size: int, *, seed: int, global_batch: bool = False
) -> tuple[Any, Parts]:
    """A loader whose batches are those that :func:`loaders.take_share` gives so many ranks.

    Raises:
        ValueError: If the loader cannot be sharded.
    """
    loaders.check(loader)
    remainder = loaders.remainder_of(loader)
    turns, follows = Parts(world_size), Parts(world_size, [])
    # One rank whose blocks are those of all ranks: the same rounds, and the same padding.
    whole = Partition(0, 1, remainder, world_size)
    if not isinstance(loader, DataLoader):
        return JoinedBatches(ShardBatches(loader, whole, seed), world_size, follows), follows
    each = loader.batch_size
    if global_batch:
        each = loaders.divided(each, world_size)
    changes: dict[str, Any] = {
        "dataset": loader.dataset,
        "batch_size": each,
        "drop_last": loader.drop_last,
    }
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers:
        inner = loaders.rebuild(loader, changes) if each != loader.batch_size else loader
        return JoinedBatches(ShardBatches(inner, whole, seed), world_size, follows), follows
    if loaders.has_batch_sampler(loader):
        drawn = ShardSampler(loader.batch_sampler, whole, seed)
        sampler = _JoinedBatchSampler(drawn, world_size, follows)
        changes = {"dataset": loader.dataset, "batch_sampler": sampler}
        return loaders.rebuild(loader, changes), follows
    partition = Partition(0, 1, remainder, world_size, each or 1)
    changes["batch_size"] = together = each and each * world_size
    if isinstance(loader.dataset, IterableDataset):
        changes["dataset"] = ShardIterable(loader.dataset, partition, seed, together or world_size)
    else:
        changes["sampler"] = ShardSampler(loader.sampler, partition, seed)
    joined = loaders.rebuild(loader, changes)
    if each is None:  # each item of the data set is a batch
        return JoinedBatches(joined, world_size, follows), follows
    return joined, turns


def join_own(loader: Any, world_size: int) -> tuple[Any, Parts]:
    """A loader with the batches of so many ranks that divide their data themselves.

    What each rank would load is not known, except for a DistributedSampler: one process is taken to
    load the same samples in the same order, in larger batches.
    """
    turns, follows = Parts(world_size), Parts(world_size, [])
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return JoinedBatches(loader, world_size, follows), follows
    changes: dict[str, Any] = {"dataset": loader.dataset, "drop_last": loader.drop_last}
    changes["batch_size"] = loader.batch_size * world_size
    if isinstance(loader.sampler, DistributedSampler):
        changes["sampler"] = _AllReplicas(loader.sampler, world_size)
    elif not isinstance(loader.dataset, IterableDataset):
        changes["sampler"] = loader.sampler
    return loaders.rebuild(loader, changes), turns


def concatenate(batches: Sequence[Any]) -> Any:
    """One batch of several: tensors are joined in nested lists, tuples and dicts.

    Raises:
        ValueError: If the rows of their tensors have different shapes.
    """
    first = batches[0]
    if torch.is_tensor(first):
        try:
            return torch.cat([*batches])
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(each.shape)) for each in batches)
            raise ValueError(
                f"The batches of {len(batches)} ranks cannot be joined into one: they have the "
                f"shapes {shapes}. Pad them to one length, or give the Trial a DataLoader, whose "
                "samples can be collated anew."
            ) from error
    if isinstance(first, dict):
        return {key: concatenate([each[key] for each in batches]) for key in first}
    if isinstance(first, list | tuple):
        return remade(first, [concatenate(each) for each in zip(*batches, strict=True)])
    return first
