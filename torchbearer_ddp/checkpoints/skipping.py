"""A DataLoader that starts in the middle of an epoch without loading what comes before.

Its sampler draws the indices of the batches that were trained on already, and they are dropped
before the data set sees them. The generators are then put back to where the save found them, so the
batches that follow are those of the run that was not interrupted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torchbearer
from torch.utils.data import DataLoader, IterableDataset

from torchbearer_ddp.checkpoints import generators
from torchbearer_ddp.checkpoints.loader_state import REPLAYS
from torchbearer_ddp.data import randomness

_END = object()


def skippable(state: Any) -> Any:
    """The training data if a batch of it is a function of its indices and of generators, or None.

    A loader, a batch function or an iterator of the user's own may do anything with the batches.
    """
    trial = state[torchbearer.SELF].state
    loader, _ = trial[torchbearer.TRAIN_DATA] or (None, None)
    can_skip = (
        trial[torchbearer.LOADER] is None
        and not trial[torchbearer.INF_TRAIN_LOADING]
        and isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
        and not loader.persistent_workers
        and loader.in_order
        and not isinstance(loader.dataset, IterableDataset)
        and not getattr(loader.dataset, REPLAYS, False)
    )
    return loader if can_skip else None


class _Place:
    """An iterator over a sampler that leaves out its first items, when it is told to.

    After that it gives ``empty`` batches without an item. If it is read ``ahead``, as by workers,
    it leaves them out when it is first used. Otherwise whoever uses it before is not the training,
    and gets what the sampler gives.
    """

    def __init__(
        self, sampler: Any, count: int, empty: int, ahead: bool, note: Callable[[], None]
    ) -> None:
        self._sampler = sampler
        self._source = iter(sampler)
        self._left = count
        self._empty = empty
        self._ahead = ahead
        self._note = note
        #: How many items were left out.
        self.skipped = 0

    def __iter__(self) -> _Place:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            self.skip()
        if self._empty:
            self._empty -= 1
            return []
        return next(self._source)

    def skip(self) -> None:
        """Leaves out now what is to be left out."""
        left, self._left = self._left, 0
        if left:
            self.skipped += next(self._source, _END) is not _END
            self._note()
            self.skipped += sum(1 for _ in itertools.islice(self._source, left - 1))

    def end(self) -> bool:
        """Lets the sampler end its pass, as the loader does; False if it has items left."""
        return next(self._source, _END) is _END

    def start_over(self, count: int) -> bool:
        """Ends this pass and leaves out as many items of the next; False if there are others."""
        ended, self._source = self.end(), iter(self._sampler)
        return ended and sum(1 for _ in itertools.islice(self._source, count)) == count


class _Skipping:
    """A sampler that leaves out its first items; attributes are the inner sampler's.

    Attributes:
        inner: The sampler, or batch sampler.
        place: The iterator that was made last.
        count: How many items are left out.
    """

    def __init__(
        self, inner: Any, how: tuple[int, int, bool], start: Callable[[], None], note: Any
    ) -> None:
        self.inner = inner
        self.place: _Place | None = None
        self.count = how[0]
        self._how = how
        self._start = start
        self._note = note

    def __iter__(self) -> _Place:
        # Nothing is drawn here: a DataLoader draws the seed of its workers first.
        self._start()
        self.place = _Place(self.inner, *self._how, self._note)
        return self.place

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Skip:
    """Brings the training data of a run to its place; to be made before its loader is started.

    Args:
        state: The state of the run.
        saved: What :meth:`EpochTrace.collect` gave.
        wanted: The generators at the save.
        done: The steps that were done.
    """

    def __init__(
        self, state: Any, saved: dict[str, Any], wanted: dict[str, Any], done: int
    ) -> None:
        self._state = state
        self._loader = state[torchbearer.SELF].state[torchbearer.TRAIN_DATA][0]
        self._found = generators.find(state)
        self._again, self._wanted = saved["again"], wanted
        #: How many batches are left out before the loader was last started over, and after it.
        self._before = 0 if self._again is None else saved["again_at"]
        self._after = done - self._before
        #: The generators when the loader was started, and when its sampler had drawn once.
        self._started: dict[str, Any] | None = None
        self._drawn: dict[str, Any] | None = None
        #: Each worker has its turn: these batches are dropped when they come.
        self._dropped = done % max(1, self._loader.num_workers)
        self._sampler = self._install(len(self._loader) if self._before else done)

    def finish(self) -> bool:
        """Leaves out the batches that were done, the loader having been started.

        Returns:
            False if that is not exact; the loader is then at its start.
        """
        state, loader = self._state, self._loader
        last = self._uninstall()
        first = getattr(state[torchbearer.ITERATOR], "_sampler_iter", None)
        if state[torchbearer.GENERATOR] is not loader or not isinstance(first, _Place):
            return False  # a callback has chosen other data
        start = generators.collect(state)
        if (first is last or not loader.num_workers) and self._leave_out(first):
            return True
        if loader.num_workers and self._started is not None:
            generators.restore(state, self._started)
        state[torchbearer.ITERATOR] = iter(loader)
        if not loader.num_workers:
            generators.restore(state, start)
        return False

    def _leave_out(self, first: _Place) -> bool:
        first.skip()
        for _ in range(self._dropped):
            next(self._state[torchbearer.ITERATOR])
        exact = first.skipped == self._sampler.count
        if self._before:
            exact = exact and self._continue_pass(first)
        return exact and self._draws_are_right()

    def _continue_pass(self, first: _Place) -> bool:
        """Goes through the passes that are over, and into the one in which the save was."""
        state, loader = self._state, self._loader
        for _ in range(self._before // len(loader) - 1):
            if not first.start_over(len(loader)):
                return False
        self._drawn = None
        if not self._after:  # torchbearer starts the next one
            return True
        generators.restore(state, self._again)
        if not first.end():
            return False
        self._sampler = self._install(self._after)
        state[torchbearer.ITERATOR] = iter(loader)
        last = self._uninstall()
        if last is None:
            return False
        last.skip()
        return last.skipped == self._after

    def _draws_are_right(self) -> bool:
        """Whether a sampler that draws during the epoch shares its generators with nothing.

        Otherwise what else drew from them in between is missing here.
        """
        if self._drawn is None:
            return True
        first, last, wanted = map(_by_name, (self._drawn, self._collect(), self._wanted))
        return all(
            _same(first.get(name), each) or _same(each, wanted.get(name))
            for name, each in last.items()
        )

    def _install(self, count: int) -> _Skipping:
        key, loader = _key(self._loader), self._loader
        # A data set that reads a batch at once may not like one without items.
        is_plain = key == "batch_sampler" and not hasattr(loader.dataset, "__getitems__")
        empty = self._dropped if is_plain else 0
        how = (count - self._dropped + empty, empty, loader.num_workers > 0)
        found = _Skipping(vars(loader)[key], how, self._note_start, self._note_draw)
        # A DataLoader refuses to have its sampler set: until it is started it has a stand-in.
        vars(loader)[key] = found
        return found

    def _uninstall(self) -> _Place | None:
        remove_stand_in(self._loader)
        return self._sampler.place

    def _note_start(self) -> None:
        # Asked for twice where there are workers; the seed is drawn after the first time.
        self._started = self._started or self._collect()

    def _note_draw(self) -> None:
        self._drawn = self._collect()

    def _collect(self) -> dict[str, Any]:
        """As :func:`generators.collect`, under the names from before the stand-in."""
        return {**randomness.rng_state(), "loaders": generators.states_of(self._found)[0]}


def _by_name(collected: dict[str, Any]) -> dict[str, Any]:
    """The states of the generators of the process, and of those that something owns."""
    return {**collected, **collected["loaders"], "loaders": None}


def _same(one: Any, other: Any) -> bool:
    return randomness.equal_states({"state": one}, {"state": other})


def remove_stand_in(loader: Any) -> None:
    """Gives a loader its own sampler back, if a run failed in its start."""
    sampler = vars(loader)[_key(loader)]
    if isinstance(sampler, _Skipping):
        vars(loader)[_key(loader)] = sampler.inner


def _key(loader: Any) -> str:
    """Where a loader has the sampler whose items it loads one after the other."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"
