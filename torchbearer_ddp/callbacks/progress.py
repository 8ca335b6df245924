"""One progress bar for all ranks, which counts the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torchbearer
from torch.utils.data import DataLoader
from torchbearer.callbacks import Callback, Tqdm
from torchbearer.trial import CallbackListInjection

from torchbearer_ddp.data.loaders import share_of
from torchbearer_ddp.group import collectives


class SamplesTqdm(Tqdm):  # type: ignore[misc]
    """torchbearer's progress bar for batches, counting samples of all ranks."""

    tqdm_args: dict[str, Any]

    def __init__(self, bar: Tqdm) -> None:
        self.__dict__.update(vars(bar))

    def _on_start(self, state: Any, letter: str) -> None:
        """Sets the unit for each pass: loaders differ in batch size."""
        size = global_batch_size(state.get(torchbearer.GENERATOR))
        plain = self.tqdm_args
        if size is not None:
            self.tqdm_args = {**plain, "unit": " samples", "unit_scale": size}
        super()._on_start(state, letter)
        self.tqdm_args = plain


def global_batch_size(loader: Any) -> int | None:
    """The number of samples that all ranks together take in one step, if it is known."""
    if not isinstance(loader, DataLoader):
        return None
    sampler: Any = loader.batch_sampler
    size = loader.batch_size or getattr(getattr(sampler, "inner", sampler), "batch_size", None)
    if size is None:
        return None
    return int(size) * (collectives.world_size() if share_of(loader) is not None else 1)


def silence(state: Any) -> None:
    """Hides the progress bars of ranks other than zero, before any run."""
    if not collectives.is_rank_zero():
        state[torchbearer.SELF].verbose = 0
        for callback in state[torchbearer.CALLBACK_LIST]:
            if isinstance(callback, Tqdm):
                callback.tqdm_args = {**callback.tqdm_args, "disable": True}


def replace_bars(state: Any) -> None:
    """Replaces the bars of a run at its start: ``run(verbose=...)`` adds one that is not hidden."""
    for injection in injections(state):
        bar = injection.callback
        if not isinstance(bar, Tqdm):
            continue
        if not collectives.is_rank_zero():
            if bar._loader is not None:  # a bar of epochs is already on the screen
                bar._loader.leave = False
                bar._loader.close()
            injection.callback = Callback()
        elif not bar._on_epoch:
            injection.callback = SamplesTqdm(bar)


def injections(state: Any) -> Iterator[CallbackListInjection]:
    """The callbacks that torchbearer has added around the callback list for this run."""
    callbacks = state[torchbearer.CALLBACK_LIST]
    while isinstance(callbacks, CallbackListInjection):
        yield callbacks
        callbacks = callbacks.callback_list
