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

    #: Ranks that would have a batch less than others get an item from the beginning again.
    PAD = "pad"
    #: The last items are left out.
    DROP = "drop"
    #: Every item is used once; some ranks have fewer items, or none.
    KEEP = "keep"


@dataclass(frozen=True)
class Partition:
    """Divides items between ranks, block by block: rank zero has the first block, and so on.

    Attributes:
        rank: The rank whose items these are.
        world_size: The number of ranks.
        remainder: What to do if the last round of blocks is incomplete.
        block: The number of consecutive items in a block.
        batch: How many blocks make a batch. Ranks with an incomplete batch need no padding.
    """

    rank: int
    world_size: int
    remainder: Remainder
    block: int = 1
    batch: int = 1

    def items(self, items: Iterable[_T]) -> Iterator[_T]:
        """This rank's items; they are read one round at a time, so there may be no end."""
        source, first = iter(items), None
        mine = slice(self.rank * self.block, (self.rank + 1) * self.block)
        size = self.world_size * self.block
        for rounds in itertools.count():
            round_ = list(itertools.islice(source, size))
            first = first or round_
            if len(round_) < size:
                if not round_ or self.remainder is Remainder.DROP:
                    return
                if self._pads(rounds):
                    padded = itertools.chain(round_, itertools.cycle(first))
                    round_ = list(itertools.islice(padded, size))
            yield from round_[mine]

    def length(self, total: int) -> int:
        """How many of ``total`` items this rank has."""
        rounds, rest = divmod(total, self.world_size * self.block)
        if not rest or self.remainder is Remainder.DROP:
            return rounds * self.block
        if self._pads(rounds):
            return (rounds + 1) * self.block
        return rounds * self.block + min(max(rest - self.rank * self.block, 0), self.block)

    def repeats(self, total: int) -> int:
        """How many of ``total`` items are used a second time, by all ranks together."""
        rounds, rest = divmod(total, self.world_size * self.block)
        return self.world_size * self.block - rest if rest and self._pads(rounds) else 0

    def _pads(self, rounds: int) -> bool:
        return self.remainder is Remainder.PAD and rounds % self.batch == 0


def positions(count: int, rank: int, world_size: int, block: int = 1) -> torch.Tensor:
    """The positions, before a partition, of the first ``count`` items of a rank."""
    index = torch.arange(count, device="cpu")
    return (index // block * world_size + rank) * block + index % block


def interleave(shares: Sequence[Sequence[_T]]) -> list[_T]:
    """Joins the ranks' items in the order before a partition with blocks of one item."""
    longest = max(map(len, shares), default=0)
    return [share[index] for index in range(longest) for share in shares if index < len(share)]


@dataclass
class OrderSeed:
    """The seed of the order of an epoch, the same on every rank.

    Attributes:
        base: The seed of the loader.
        passes: How many complete passes the epoch has had. torchbearer begins a second one in an
            epoch that has more steps than batches, but reading only the first batch must not change
            the order.
    """

    base: int
    epoch: int = 0
    passes: int = 0

    def value(self) -> int:
        """The seed of the next pass."""
        return randomness.mix(self.base, self.epoch, self.passes)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass the first one of this epoch."""
        self.epoch, self.passes = epoch, 0


class ShardSampler(Sampler[Any]):
    """One rank's part of what another sampler draws: indices, or whole batches of them.

    Every rank draws the whole order from the same seed and takes its part, so the parts fit
    together without communication. The training's own generators are not changed.
    """

    def __init__(self, inner: Any, partition: Partition, seed: int) -> None:
        self.inner = inner
        self.order = OrderSeed(seed)
        self._partition = partition

    @property
    def epoch(self) -> int:
        """The epoch whose order is drawn next."""
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of this epoch."""
        self.order.set_epoch(epoch)
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        yield from self._partition.items(self._draw())
        self.order.passes += 1

    def __len__(self) -> int:
        return self._partition.length(len(self.inner))

    def _draw(self) -> list[Any]:
        seed = self.order.value()
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


def drawn_alike(items: Iterable[_T], seed: int, at_once: int) -> Iterator[_T]:
    """The items of something that draws random numbers, which are the same on every rank.

    So many items are read at once: after that the generators of training are put back.
    """
    state: Any = None
    source: Iterator[_T] | None = None
    while True:
        with randomness.preserved():
            if source is None:
                randomness.seed_all(seed)
                source = iter(items)
            else:
                randomness.set_rng_state(state)
            read = list(itertools.islice(source, at_once))
            state = randomness.rng_state()
        if not read:
            return
        yield from read


class ShardIterable(IterableDataset[Any]):
    """One rank's part of a data set that can only be iterated.

    Each rank reads the whole stream, as many items at once as make a batch of all ranks, and keeps
    its items. Attributes are read from and written to the inner data set.
    """

    def __init__(self, inner: Any, partition: Partition, seed: int, batch_size: int = 1) -> None:
        at_once = batch_size * partition.world_size
        vars(self).update(
            _inner=inner, _partition=partition, _order=OrderSeed(seed), _at_once=at_once
        )

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of this epoch."""
        self._order.set_epoch(epoch)
        if hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        items = drawn_alike(self._inner, self._order.value(), self._at_once)
        yield from self._partition.items(items)
        self._order.passes += 1

    def __len__(self) -> int:
        return self._partition.length(len(self._inner))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        # While this object is unpickled, its own attributes do not exist yet.
        if name.startswith("__") or name in ("_inner", "_partition", "_order", "_at_once"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


class ShardBatches:
    """One rank's part of the batches of any loader: every N-th.

    Each rank makes all of the batches, which are the same on every rank, and drops the others.
    Attributes are read from the loader.
    """

    def __init__(self, inner: Any, partition: Partition, seed: int) -> None:
        self.inner = inner
        self.order = OrderSeed(seed)
        self._partition = partition

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass draw the order of this epoch."""
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        batches = drawn_alike(self.inner, self.order.value(), self._partition.world_size)
        yield from self._partition.items(batches)
        self.order.passes += 1

    def __len__(self) -> int:
        return self._partition.length(len(self.inner))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Repeated:
    """A loader that starts over until it has given so many batches, as torchbearer does.

    A pass without a batch is the last one.
    """

    def __init__(self, inner: Any, steps: int) -> None:
        self.inner = inner
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        left, before = self._steps, -1
        while left not in (0, before):
            before = left
            for batch in itertools.islice(self.inner, left):
                left -= 1
                yield batch

    def __len__(self) -> int:
        return self._steps
