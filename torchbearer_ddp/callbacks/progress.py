"""One progress bar for all ranks, which counts the samples of all of them."""

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
    """torchbearer's bar for batches, in samples of all ranks."""

    tqdm_args: dict[str, Any]

    @classmethod
    def like(cls, printer: Tqdm) -> SamplesTqdm:
        """A bar with the settings of another one.

        Args:
            printer: The bar to take after.
        """
        bar = cls.__new__(cls)
        bar.__dict__.update(vars(printer))
        return bar

    def _on_start(self, state: Any, letter: str) -> None:
        """A new bar for each pass: loaders differ in batch size."""
        size = global_batch_size(state.get(torchbearer.GENERATOR))
        plain = self.tqdm_args
        if size is not None:
            self.tqdm_args = {**plain, "unit": " samples", "unit_scale": size}
        super()._on_start(state, letter)
        self.tqdm_args = plain


def global_batch_size(loader: Any) -> int | None:
    """The samples that all ranks together take in one step, if that is known.

    Args:
        loader: The loader of this rank.
    """
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size
    if size is None:  # a batch sampler, perhaps our share of one
        sampler: Any = loader.batch_sampler
        size = getattr(getattr(sampler, "inner", sampler), "batch_size", None)
    if size is None:
        return None
    return int(size) * (collectives.world_size() if share_of(loader) is not None else 1)


def silence(state: Any) -> None:
    """Before any run: ranks other than zero print no bar.

    Args:
        state: The state of the Trial.
    """
    if not collectives.is_rank_zero():
        state[torchbearer.SELF].verbose = 0
        for callback in state[torchbearer.CALLBACK_LIST]:
            if isinstance(callback, Tqdm):
                callback.tqdm_args = {**callback.tqdm_args, "disable": True}


def take_over(state: Any) -> None:
    """At the start of a run: it may have been given a verbosity of its own.

    Args:
        state: The state of the running Trial.
    """
    for injection in injections(state):
        printer = injection.callback
        if not isinstance(printer, Tqdm):
            continue
        if not collectives.is_rank_zero():
            if printer._loader is not None:  # a bar of epochs has begun already
                printer._loader.leave = False
                printer._loader.close()
            injection.callback = Callback()
        elif not printer._on_epoch:
            injection.callback = SamplesTqdm.like(printer)


def injections(state: Any) -> Iterator[CallbackListInjection]:
    """What torchbearer has put around the callback list for this run.

    Args:
        state: The state of the running Trial.
    """
    callbacks = state[torchbearer.CALLBACK_LIST]
    while isinstance(callbacks, CallbackListInjection):
        yield callbacks
        callbacks = callbacks.callback_list
