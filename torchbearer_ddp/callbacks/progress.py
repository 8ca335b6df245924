"""One progress bar for all ranks, which counts the samples of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torchbearer
from torch.utils.data import DataLoader, IterableDataset
from torchbearer.callbacks import AggregatePredictions, Callback, Tqdm
from torchbearer.trial import CallbackListInjection
from tqdm import tqdm

from torchbearer_ddp.callbacks.bars import progress_bar
from torchbearer_ddp.callbacks.hooks import StandIn
from torchbearer_ddp.data.loaders import share_of
from torchbearer_ddp.group import collectives


@dataclass(frozen=True)
class PassSamples:
    """The samples of one pass over a loader.

    Attributes:
        per_step: How many all ranks together take in one step.
        total: How many there are in the pass; the last step may have fewer than the others.
    """

    per_step: int
    total: int

    def after(self, steps: int) -> int:
        """The number of samples that so many steps have taken."""
        return min(steps * self.per_step, self.total)


class SamplesTqdm(Tqdm):  # type: ignore[misc]
    """torchbearer's progress bar for batches, counting samples of all ranks.

    It shares the attributes of the bar that it replaces, so whoever moves one moves both.
    """

    tqdm_args: dict[str, Any]

    def __init__(self, bar: Tqdm) -> None:
        self.__dict__ = vars(bar)
        self.samples: PassSamples | None = None

    def _on_start(self, state: Any, letter: str) -> None:
        """Counts the samples of each pass: loaders differ in batch size."""
        steps, plain = state[torchbearer.STEPS], self.tqdm_args
        self.samples = samples_of_pass(state.get(torchbearer.GENERATOR), steps)
        if self.samples is not None:
            self.tqdm_args = {"unit": " samples", **plain}
            state[torchbearer.STEPS] = self.samples.total  # what torchbearer's bar counts up to
        super()._on_start(state, letter)
        state[torchbearer.STEPS], self.tqdm_args = steps, plain

    def _update(self, state: Any) -> None:
        """Moves the bar by what this step has taken."""
        if self.samples is None or self._on_epoch:
            super()._update(state)
            return
        # The bar moves by one itself, as the metrics are shown.
        self._loader.n = self.samples.after(state[torchbearer.BATCH] + 1) - 1
        super()._update(state)


class RankZeroBar(StandIn):
    """Shows a bar in the user's list on rank zero, where it counts the samples of all ranks."""

    def __init__(self, bar: Tqdm) -> None:
        super().__init__(bar)
        if bar.tqdm_module is tqdm:  # made before this package was imported
            bar.tqdm_module = progress_bar
        # A subclass of the user's counts as it likes.
        self._shown = SamplesTqdm(bar) if type(bar) is Tqdm else bar

    def call(self, hook: str, state: Any) -> None:
        """Calls the bar, or the one that replaces it."""
        if collectives.world_size() == 1:
            super().call(hook, state)
        elif collectives.is_rank_zero():
            getattr(self._shown, hook)(state)


class _OwnPredictions(AggregatePredictions):  # type: ignore[misc]
    """Collects the predictions of a rank, of which there may be none."""

    def __init__(self, original: AggregatePredictions) -> None:
        self.__dict__ = vars(original)

    def on_end_validation(self, state: Any) -> None:
        """Does not try to join nothing; SyncMetrics has the predictions of all ranks."""
        if self.predictions_list:
            super().on_end_validation(state)
        else:
            state[torchbearer.FINAL_PREDICTIONS] = []


def samples_of_pass(loader: Any, steps: int) -> PassSamples | None:
    """The samples that all ranks take in so many steps, if their number is known."""
    size = global_batch_size(loader)
    if size is None or steps < 0:
        return None
    total = samples_in(loader)
    if total is not None and loader.batch_size and loader.drop_last:
        total -= total % int(loader.batch_size)
    # With more steps than batches the loader is started again.
    is_whole = total is not None and steps <= len(loader)
    return PassSamples(size, min(steps * size, total) if is_whole and total else steps * size)


def global_batch_size(loader: Any) -> int | None:
    """The number of samples that all ranks together take in one step, if it is known."""
    if not isinstance(loader, DataLoader):
        return None
    sampler: Any = loader.batch_sampler
    size = loader.batch_size or getattr(getattr(sampler, "inner", sampler), "batch_size", None)
    if size is None:
        return None
    return int(size) * (collectives.world_size() if share_of(loader) is not None else 1)


def samples_in(loader: Any) -> int | None:
    """The number of samples of all ranks in one pass over a loader, if it is known."""
    share = share_of(loader)
    if share is not None and share.original is loader:
        return share.total  # the user's own sampler or data set shards it
    whole = loader if share is None else share.original
    source = whole.dataset if isinstance(whole.dataset, IterableDataset) else whole.sampler
    if whole.batch_size is None:
        source = getattr(whole.batch_sampler, "sampler", None)
    return len(source) if hasattr(source, "__len__") else None


def silence(state: Any) -> None:
    """Hides the progress bars of ranks other than zero, before any run."""
    if not collectives.is_rank_zero():
        state[torchbearer.SELF].verbose = 0


def replace_injected(state: Any) -> None:
    """Replaces what torchbearer adds to a run: its bar, and what collects predictions."""
    for injection in injections(state):
        injected = injection.callback
        if isinstance(injected, AggregatePredictions):
            injection.callback = _OwnPredictions(injected)
        elif isinstance(injected, Tqdm):
            injection.callback = _bar_of_rank(injected)


def _bar_of_rank(bar: Tqdm) -> Callback:
    """The bar of this rank: ``run(verbose=...)`` adds one that is not hidden."""
    if collectives.is_rank_zero():
        return bar if bar._on_epoch else SamplesTqdm(bar)
    if bar._loader is not None:  # a bar of epochs is already on the screen
        bar._loader.leave = False
        bar._loader.close()
    return Callback()


def warn_of_no_steps(state: Any) -> None:
    """Warns if there is training data and not one step of training."""
    trial_state = state[torchbearer.SELF].state
    loader = state[torchbearer.GENERATOR]
    if loader is None or trial_state[torchbearer.TRAIN_STEPS] != 0:
        return
    if not collectives.is_rank_zero():
        return
    size = global_batch_size(loader)
    found = "" if size is None else f" of {samples_in(loader)} samples, where a step takes {size}"
    warnings.warn(
        f"This run trains nothing: there are 0 training steps in an epoch{found}. Use more data, a "
        "smaller batch size, or drop_last=False.",
        RuntimeWarning,
        stacklevel=2,
    )


def injections(state: Any) -> Iterator[CallbackListInjection]:
    """The callbacks that torchbearer has added around the callback list for this run."""
    callbacks = state[torchbearer.CALLBACK_LIST]
    while isinstance(callbacks, CallbackListInjection):
        yield callbacks
        callbacks = callbacks.callback_list
