"""Which rank loads which sample: the order of an epoch, divided between the ranks.

Everything here is a function of rank and world size, so it can be tested without processes.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler

from torchbearer_ddp.data import randomness

_T = TypeVar("_T")


class Remainder(enum.Enum):
    """What happens to the last items if they cannot be divided evenly."""

    #: Ranks that would have too few get items from the beginning again.
    PAD = "pad"
    #: The last items are left out.
    DROP = "drop"
    #: Every item is used once; some ranks have fewer items, or none.
    KEEP = "keep"


@dataclass(frozen=True)
class Partition:
    """Divides items between ranks, block by block: rank zero has the first block, and so on.

    Attributes:
        remainder: What to do if the last round of blocks is incomplete.
        block: The number of consecutive items in a block.
    """

    rank: int
    world_size: int
    remainder: Remainder
    block: int = 1

    def items(self, items: Iterable[_T]) -> Iterator[_T]:
        """This rank's items; they are read one round at a time, so there may be no end."""
        source, first = iter(items), None
        mine = slice(self.rank * self.block, (self.rank + 1) * self.block)
        size = self.world_size * self.block
        while round_ := list(itertools.islice(source, size)):
            first = first or round_
            if len(round_) < size:
                if self.remainder is Remainder.DROP:
                    return
                if self.remainder is Remainder.PAD:
                    padded = itertools.chain(round_, itertools.cycle(first))
                    round_ = list(itertools.islice(padded, size))
            yield from round_[mine]

    def length(self, total: int) -> int:
        """How many of ``total`` items this rank has."""
        rounds, rest = divmod(total, self.world_size * self.block)
        if self.remainder is Remainder.KEEP:
            mine = min(max(rest - self.rank * self.block, 0), self.block)
        else:
            mine = self.block if rest and self.remainder is Remainder.PAD else 0
        return rounds * self.block + mine


def positions(count: int, rank: int, world_size: int, block: int = 1) -> torch.Tensor:
    """The positions, before a partition, of the first ``count`` items of a rank."""
    index = torch.arange(count)
    return (index // block * world_size + rank) * block + index % block


def interleave(shares: Sequence[Sequence[_T]]) -> list[_T]:
    """Joins the ranks' items in the order before a partition with blocks of one item."""
    longest = max(map(len, shares), default=0)
    return [share[index] for index in range(longest) for share in shares if index < len(share)]


class ShardSampler(Sampler[Any]):
    """One rank's part of what another sampler draws: indices, or whole batches of them.

    Every rank draws the whole order from the same seed and takes its part, so the parts fit
    together without communication. The training's own generators are not changed.
    """

    def __init__(self, inner: Any, partition: Partition, seed: int) -> None:
        self.inner = inner
        self.seed = seed
        self.epoch = 0
        self._passes = 0
        self._partition = partition

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of this epoch."""
        self.epoch = epoch
        self._passes = 0
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        yield from self._partition.items(self._draw())
        # Only a complete pass counts: torchbearer begins a second pass in an epoch that has more
        # steps than batches, but reading only the first batch must not change the order.
        self._passes += 1

    def __len__(self) -> int:
        return self._partition.length(len(self.inner))

    def _draw(self) -> list[Any]:
        seed = randomness.mix(self.seed, self.epoch, self._passes)
        with randomness.preserved(), contextlib.ExitStack() as stack:
            randomness.seed_all(seed)
            for generator in generators_of(self.inner):
                stack.callback(generator.set_state, generator.get_state())
                generator.manual_seed(seed)
            return list(self.inner)


def generators_of(sampler: Any) -> list[torch.Generator]:
    """The generators that a sampler, and the samplers inside it, draw from."""
    found: dict[int, torch.Generator] = {}
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        sampler = getattr(sampler, "sampler", None)
    return list(found.values())


class ShardIterable(IterableDataset[Any]):
    """One rank's part of a data set that can only be iterated.

    Each rank reads the whole stream and keeps its items. In the worker processes of a DataLoader
    the inner data set decides what each worker reads, as without sharding. Attributes are read from
    and written to the inner data set, so a ``worker_init_fn`` works as before.
    """

    def __init__(self, inner: Any, partition: Partition) -> None:
        vars(self).update(_inner=inner, _partition=partition)

    def __iter__(self) -> Iterator[Any]:
        return self._partition.items(self._inner)  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self._partition.length(len(self._inner))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        # While this object is unpickled, its own attributes do not exist yet.
        if name.startswith("__") or name in ("_inner", "_partition"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)
