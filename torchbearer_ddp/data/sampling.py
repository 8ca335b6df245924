"""Who takes which sample: the order of an epoch, dealt to the ranks like cards.

Everything here is a function of rank and world size, so it can be tested without processes.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler

from torchbearer_ddp.data import randomness

_T = TypeVar("_T")


class Remainder(enum.Enum):
    """What becomes of the last items where they do not go round."""

    #: Every rank gets as many: the first items are dealt again.
    PAD = "pad"
    #: Every rank gets as many: the last items are left out.
    DROP = "drop"
    #: Each item is dealt once: some ranks get fewer, or none.
    KEEP = "keep"


def deal(
    items: Iterable[_T], rank: int, world_size: int, remainder: Remainder, block: int = 1
) -> Iterator[_T]:
    """Deals items to the ranks in turn, and gives those of one rank.

    Args:
        items: What to deal; it is read as it goes, so it may be endless.
        rank: Whose items to give.
        world_size: The number of ranks.
        remainder: What to do where the last round is not complete.
        block: How many items in a row a rank gets in each round.
    """
    source, head = iter(items), None
    mine = slice(rank * block, (rank + 1) * block)
    while group := list(itertools.islice(source, world_size * block)):
        head = head or group
        if len(group) < world_size * block:
            if remainder is Remainder.DROP:
                return
            if remainder is Remainder.PAD:
                group = list(
                    itertools.islice(itertools.chain(group, itertools.cycle(head)), mine.stop)
                )
        yield from group[mine]


def share_length(
    total: int, rank: int, world_size: int, remainder: Remainder, block: int = 1
) -> int:
    """How many of ``total`` items :func:`deal` gives to a rank."""
    rounds, rest = divmod(total, world_size * block)
    if remainder is Remainder.KEEP:
        return rounds * block + min(max(rest - rank * block, 0), block)
    return (rounds + (1 if rest and remainder is Remainder.PAD else 0)) * block


def positions(count: int, rank: int, world_size: int, block: int = 1) -> torch.Tensor:
    """Where the first ``count`` items of a rank's share stood before they were dealt."""
    index = torch.arange(count)
    return (index // block * world_size + rank) * block + index % block


def interleave(shares: Sequence[Sequence[_T]]) -> list[_T]:
    """Puts the shares of all ranks together again, in the order before they were dealt one by one.

    Args:
        shares: The items of each rank, by rank.
    """
    longest = max(map(len, shares), default=0)
    return [share[turn] for turn in range(longest) for share in shares if turn < len(share)]


class ShardSampler(Sampler[Any]):
    """One rank's share of what another sampler draws, indices or whole batches of them.

    Every rank draws the whole order under the same seed and takes its share, so the shares fit
    together without a word between the ranks. The training's own generators are left as they were.

    Args:
        inner: The sampler to share; it must have a length.
        rank: Whose share this is.
        world_size: The number of ranks.
        remainder: What to do where the items do not go round.
        seed: The base seed, the same on every rank.
        block: How many items in a row a rank gets.
    """

    def __init__(
        self,
        inner: Any,
        rank: int,
        world_size: int,
        remainder: Remainder,
        seed: int,
        block: int = 1,
    ) -> None:
        self.inner = inner
        self.seed = seed
        self.epoch = 0
        self._passes = 0
        self._deal = (rank, world_size, remainder, block)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of this epoch.

        Args:
            epoch: The number of the epoch.
        """
        self.epoch = epoch
        self._passes = 0
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        yield from deal(self._draw(), *self._deal)
        # Only a pass that was read to its end counts: torchbearer starts over within an epoch that
        # has more steps than batches, while a look at the first batch must not change the order.
        self._passes += 1

    def __len__(self) -> int:
        return share_length(len(self.inner), *self._deal)

    def _draw(self) -> list[Any]:
        seed = randomness.mix(self.seed, self.epoch, self._passes)
        with randomness.preserved(), contextlib.ExitStack() as stack:
            randomness.seed_all(seed)
            for generator in generators_of(self.inner):
                stack.callback(generator.set_state, generator.get_state())
                generator.manual_seed(seed)
            return list(self.inner)


def generators_of(sampler: Any) -> list[torch.Generator]:
    """The generators a sampler draws from, if it has its own; a batch sampler's sampler counts."""
    found: dict[int, torch.Generator] = {}
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        sampler = getattr(sampler, "sampler", None)
    return list(found.values())


class ShardIterable(IterableDataset[Any]):
    """One rank's share of a data set that can only be iterated.

    Each rank reads the whole stream and keeps its items. In the worker processes of a DataLoader
    the data set inside decides what each worker reads, as without sharding; attributes are read
    from and written to that data set, so a ``worker_init_fn`` works as before.

    Args:
        inner: The data set to share.
        rank: Whose share this is.
        world_size: The number of ranks.
        remainder: What to do where the items do not go round.
        block: How many items in a row a rank gets.
    """

    def __init__(
        self, inner: Any, rank: int, world_size: int, remainder: Remainder, block: int = 1
    ) -> None:
        vars(self).update(_inner=inner, _deal=(rank, world_size, remainder, block))

    def __iter__(self) -> Iterator[Any]:
        return deal(self._inner, *self._deal)

    def __len__(self) -> int:
        return share_length(len(self._inner), *self._deal)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_inner", "_deal"):  # not there yet, while unpickling
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)
