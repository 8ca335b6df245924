"""The random generators of a DataLoader's worker processes, as they were after each batch.

Workers run ahead of training: a worker has made batches that were not trained on yet when a
checkpoint is saved. So each one writes its generators into shared memory after each of its batches,
and the main process takes those of the last batch that it was given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchbearer_ddp.checkpoints import generators, memory
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import wire

#: The most that the generators of a worker may take, after their length in 8 bytes.
_BYTES = 2**15
_LENGTH = 8


class WorkerStates:
    """Stands in for the collate function and the init function of a loader while it is started.

    Args:
        loader: A loader with workers, not started yet.
        restored: For each worker, its generators after the batches that are left out; None for one
            that had made none.
        done: How many batches are left out.
        first: How many come before the first that is made, if the workers need no empty batches.
        saves_itself: The loader saves what its data set remembers.
    """

    def __init__(
        self,
        loader: Any,
        restored: list[torch.Tensor | None],
        done: int = 0,
        first: int | None = None,
        saves_itself: bool = False,
    ) -> None:
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._restored, self._done = restored, done
        self._count: int = loader.num_workers
        self._first = done - done % self._count if first is None else first
        self._saves_itself = saves_itself
        #: Workers that read streams do not take turns once one is at its end.
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        #: Enough for what a worker has made ahead, the last batch given and the next being written.
        self._slots = loader.prefetch_factor + 2
        self._ring = torch.zeros(
            self._count, self._slots, _LENGTH + _BYTES, dtype=torch.uint8, device="cpu"
        )
        self._remembers = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._is_started = torch.zeros(self._count, dtype=torch.uint8, device="cpu")
        for shared in (self._ring, self._remembers, self._is_started):
            shared.share_memory_()  # type: ignore[no-untyped-call]
        for worker, each in enumerate(restored):
            if each is not None:  # for a save before this worker has given a batch
                self._write(worker, self._made_by(worker, done), each)
        # Of a worker: its number, its batches, and what it has.
        self._worker = 0
        self._made = 0
        self._drawn: dict[str, Any] = {}
        self._memory: dict[str, str] = {}
        self._found: list[tuple[str, Any]] = []

    @property
    def remembers(self) -> bool:
        """True if what a worker has drawn cannot be put back, or its data set has a memory."""
        return bool(self._remembers.item())

    def collect(self, done: int) -> list[torch.Tensor | None]:
        """Each worker's generators when so many batches of the epoch were given."""
        if self._is_stream:
            return [None] * self._count
        return [self._read(each, self._made_by(each, done)) for each in range(self._count)]

    def install(self, loader: Any) -> None:
        """Makes the workers that start next report."""
        loader.collate_fn, loader.worker_init_fn = self, self._start

    def uninstall(self, loader: Any) -> None:
        """Gives the loader its own functions back, unless it has others by now."""
        if loader.collate_fn is self:
            loader.collate_fn = self._collate
        if loader.worker_init_fn == self._start:
            loader.worker_init_fn = self._init

    # In a worker.

    def _start(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._worker, self._made = worker, self._made_by(worker, self._first)
        if self._is_started[worker]:  # a callback has started the loader too: both would write
            self._remembers.fill_(1)
        self._is_started[worker] = 1
        try:
            self._memory = self._look()
        except Exception:  # whatever the data set is: a resume reads again
            self._remembers.fill_(1)
        self._restore()
        self._drawn = randomness.process_state()

    def _restore(self) -> None:
        """Puts the generators back when as many batches were made as at the save."""
        saved = self._restored[self._worker]
        if saved is not None and self._made == self._made_by(self._worker, self._done):
            state = wire.decode(saved)
            randomness.set_rng_state(state)
            generators.set_states(self._found, state["loaders"])

    def __call__(self, items: Any) -> Any:
        """Collates a batch; an empty one that is left out only gives the worker its turn."""
        is_left_out = self._made < self._made_by(self._worker, self._done)
        is_turn = is_left_out and isinstance(items, list) and not items
        batch = None if is_turn else self._collate(items)
        self._made += 1
        self._restore()
        if not self.remembers:
            try:
                self._report()
            except Exception:  # whatever kind of generator this is: a resume reads again
                self._remembers.fill_(1)
        return batch

    def _report(self) -> None:
        # To look takes too long for every batch; what changes at all does so early.
        if self._made & (self._made - 1) == 0:
            names = [name for name, _ in self._found]
            if memory.has_changed(self._memory, self._look()) or names != [
                n for n, _ in self._found
            ]:
                self._remembers.fill_(1)
        if self._is_stream:
            if not randomness.equal_states(self._drawn, randomness.process_state()):
                self._remembers.fill_(1)
            return
        held, failed = generators.states_of(self._found)
        state = wire.encode({**randomness.process_state(), "loaders": held})
        if failed or len(state) > _BYTES:
            self._remembers.fill_(1)
        else:
            self._write(self._worker, self._made, state)

    def _look(self) -> dict[str, str]:
        dataset = get_worker_info().dataset  # type: ignore[union-attr]
        self._found = generators.inside(dataset, self._collate)
        return memory.of_parts(None if self._saves_itself else dataset, self._collate)

    # In both.

    def _write(self, worker: int, made: int, state: torch.Tensor) -> None:
        slot = self._ring[worker, made % self._slots]
        slot[:_LENGTH].view(torch.int64).fill_(len(state))
        slot[_LENGTH : _LENGTH + len(state)] = state

    def _read(self, worker: int, made: int) -> torch.Tensor | None:
        if not made:
            return None
        slot = self._ring[worker, made % self._slots]
        return slot[_LENGTH : _LENGTH + int(slot[:_LENGTH].view(torch.int64))].clone()

    def _made_by(self, worker: int, done: int) -> int:
        """How many of the first batches a worker has made: they take turns."""
        return -((worker - done) // self._count)
