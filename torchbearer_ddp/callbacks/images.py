"""torchbearer's callbacks that show images: the first images of all ranks, in one process's order.

These callbacks cache images of one batch after the other until they have ``num_images``. On several
ranks each rank keeps its first images of a pass, and at the end of the pass, a hook that every rank
calls whether it had batches or not, they are gathered and handed to the callback as one batch.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torchbearer
from torchbearer.callbacks import TensorBoardImages
from torchbearer.callbacks.imaging import ClassAppearanceModel, ImagingCallback, MakeGrid

from torchbearer_ddp.callbacks.hooks import StandIn
from torchbearer_ddp.data.loaders import Share, share_of
from torchbearer_ddp.group import collectives, local_work
from torchbearer_ddp.log import announce
from torchbearer_ddp.metrics import predictions

_STARTS = ("on_start_training", "on_start_validation")
_ENDS = ("on_end_training", "on_end_validation")


class FirstImages:
    """The first rows of a pass over all ranks' data.

    Args:
        number: How many rows are needed.
        everywhere: True if every rank needs them, False if rank zero does.
    """

    def __init__(self, number: int, *, everywhere: bool = False) -> None:
        self._number = number
        self._everywhere = everywhere
        self.clear()

    def clear(self) -> None:
        """Forgets what a pass that was not completed has left."""
        self._batches: list[list[torch.Tensor]] = []
        self._rows = 0

    def add(self, tensors: Sequence[torch.Tensor], share: Share) -> None:
        """Keeps a batch, given as tensors with a row for each sample, unless there are enough."""
        # Batches of a known size alternate between the ranks, so each has its part of the first.
        ranks = collectives.world_size() if share.block is not None else 1
        if self._rows * ranks < self._number:
            self._batches.append([tensor.detach().cpu() for tensor in tensors])
            self._rows += len(tensors[0])

    def gather(self, share: Share | None, device: Any) -> list[torch.Tensor]:
        """The rows in the order of one process, where they are needed; collective."""
        batches = self._batches
        self.clear()
        if share is None:
            return []
        collect = collectives.all_gather if self._everywhere else collectives.gather_to
        everyone = collect(batches, "the images of a callback")
        columns = max((len(batch) for mine in everyone for batch in mine), default=0)
        gathered = [
            predictions.assemble([[batch[column] for batch in mine] for mine in everyone], share)
            for column in range(columns)
        ]
        return [rows[: self._number].to(device) for rows in gathered]


class GatheredTensorBoardImages(StandIn):
    """Writes TensorBoardImages and TensorBoardProjector on rank zero, with images of all ranks."""

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        images = isinstance(callback, TensorBoardImages)
        if images:
            _load_torchvision()
        self._keys = (
            [callback.key] if images else [torchbearer.X, torchbearer.Y_TRUE, callback.features_key]
        )
        self._cached = "_data" if images else "_labels"
        self._first = FirstImages(callback.num_images)
        self._shortage = _Shortage(callback, callback.num_images)

    def call(self, hook: str, state: Any) -> None:
        """Keeps the images of each batch; what is written is written by rank zero."""
        share = divided(state)
        if hook in _STARTS:
            self._first.clear()
        if hook == "on_step_validation" and share is not None:
            self._first.add([state[key] for key in self._keys], share)
            return
        if hook == "on_end_validation":
            rows = self._first.gather(share, state[torchbearer.DEVICE])
            if rows:
                with _replaced(state, dict(zip(self._keys, rows, strict=True))):
                    self._write("on_step_validation", state)
            if not self.callback.done:
                self._shortage.check(getattr(self.callback, self._cached))
        self._write(hook, state)

    def _write(self, hook: str, state: Any) -> None:
        if collectives.is_rank_zero():
            with local_work.local(), _range_of_make_grid():
                super().call(hook, state)


class GatheredImages(StandIn):
    """Lets an ImagingCallback draw on rank zero, and if it caches images, those of all ranks."""

    def __init__(self, callback: ImagingCallback) -> None:
        super().__init__(callback)
        if isinstance(callback, MakeGrid):
            _load_torchvision()
        # Its hooks call ``process`` in the passes that the user chose; only that is replaced.
        self._draw: Callable[[Any], None] = callback.process
        callback.process = self._process
        self._cache = _cache_of(callback.on_batch)
        # What it draws is of the model, not of the batch.
        self._sees_all = isinstance(callback, ClassAppearanceModel)
        if self._cache is not None:
            everywhere = bool(self._handlers(rank_zero=False))
            self._first = FirstImages(self._cache.number, everywhere=everywhere)
            self._shortage = _Shortage(callback, self._cache.number)

    def call(self, hook: str, state: Any) -> None:
        """Draws at the end of a pass what was gathered in it."""
        super().call(hook, state)
        if self._cache is None:
            return
        if hook in _STARTS:
            self._first.clear()
        if hook in _ENDS:
            rows = self._first.gather(divided(state), state[torchbearer.DEVICE])
            if rows:
                with self._cache.source(lambda _: rows[0]), _replaced(state, {}):
                    self._draw_here(state)
            self._shortage.check(self._cache.images)

    def _process(self, state: Any) -> None:
        share = divided(state)
        if self._cache is None or share is None:
            if share is not None and not self._sees_all:
                self._sees_all = True  # said once
                announce(
                    f"{type(self.callback).__name__} draws from the batches of rank 0 alone; with "
                    "cache(num_images) it draws the first images of all ranks"
                )
            self._draw_here(state)
            return
        images = self._cache.take(state)
        if images is not None:
            self._first.add([images], share)

    def _draw_here(self, state: Any) -> None:
        """Draws for the handlers of this rank: only rank zero writes."""
        callback = self.callback
        everyones, mine = callback._handlers, self._handlers(collectives.is_rank_zero())
        if mine or collectives.world_size() == 1:
            callback._handlers = mine
            try:
                with local_work.local(), _range_of_make_grid():
                    self._draw(state)
            finally:
                callback._handlers = everyones

    def _handlers(self, rank_zero: bool) -> list[Any]:
        """The handlers of rank zero, or of any other rank: those that only change the state."""
        to_state = f"{ImagingCallback.to_state.__qualname__}.<locals>.handler"
        return [
            (handler, index)
            for handler, index in self.callback._handlers
            if rank_zero or getattr(handler, "__qualname__", "") == to_state
        ]


class _Cache:
    """torchbearer's cache of images, which is in the closure of a function."""

    def __init__(self, cells: dict[str, Any]) -> None:
        self._cells = cells
        self.number = int(cells["num_images"].cell_contents)
        #: The images of a batch, or None, given the state.
        self.take: Callable[[Any], torch.Tensor | None] = cells["fun"].cell_contents

    @property
    def images(self) -> torch.Tensor | None:
        """The images so far; None if there are none, or if the picture is drawn."""
        cached: torch.Tensor | None = self._cells["cache"].cell_contents["images"]
        return cached

    @contextlib.contextmanager
    def source(self, take: Callable[[Any], torch.Tensor]) -> Iterator[None]:
        """Fills the cache from another function."""
        self._cells["fun"].cell_contents = take
        try:
            yield
        finally:
            self._cells["fun"].cell_contents = self.take


class _Shortage:
    """Says once that a pass has fewer images than a callback waits for."""

    def __init__(self, callback: Any, number: int) -> None:
        self._name, self._number, self._said = type(callback).__name__, number, False

    def check(self, images: torch.Tensor | None) -> None:
        """Compares what is cached at the end of a pass."""
        if images is not None and not self._said and collectives.is_rank_zero():
            self._said = True
            announce(
                f"{self._name} waits for {self._number} images and has {len(images)} after this "
                f"pass over the data, so it draws nothing yet; num_images={len(images)} would do"
            )


def _cache_of(function: Any) -> _Cache | None:
    """The cache around which torchbearer has wrapped a function, if there is one."""
    while function is not None:
        code = getattr(function, "__code__", None)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) if code else {}
        if {"cache", "fun", "num_images"} <= cells.keys():
            return _Cache(cells)
        function = cells["func"].cell_contents if "func" in cells else None
    return None


def divided(state: Any) -> Share | None:
    """How the data of this pass is divided between ranks that can be asked for their part."""
    if collectives.world_size() == 1 or local_work.inside():
        return None
    return share_of(state.get(torchbearer.GENERATOR))


@contextlib.contextmanager
def _replaced(state: Any, values: dict[Any, Any]) -> Iterator[None]:
    """Puts these values into the state, as those of the first batch."""
    values = {**values, torchbearer.BATCH: 0}
    before = {key: state[key] for key in values if key in state}
    state.update(values)
    try:
        yield
    finally:
        for key in values.keys() - before.keys():
            del state[key]
        state.update(before)


def _load_torchvision() -> None:
    """Imports what torchbearer will need, so that :func:`_range_of_make_grid` finds it."""
    with contextlib.suppress(Exception):  # torchbearer raises the same where it draws
        importlib.import_module("torchvision.utils")


@contextlib.contextmanager
def _range_of_make_grid() -> Iterator[None]:
    """Lets torchvision's make_grid take ``range``, which torchbearer gives, as ``value_range``."""
    utils: Any = sys.modules.get("torchvision.utils")
    original = getattr(utils, "make_grid", None)
    if original is None or "range" in inspect.signature(original).parameters:
        yield
        return
    utils.make_grid = lambda *args, range=None, **options: original(
        *args, value_range=range, **options
    )
    try:
        yield
    finally:
        utils.make_grid = original
