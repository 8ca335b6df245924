"""Random numbers that both sides of a proof can draw alike: by the step, and by the sample."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchbearer_ddp.data import randomness
from torchbearer_ddp.data.joined import JoinedBatches

#: How many samples are looked at to see whether loading them draws random numbers.
_LOOKED_AT = 16


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one rank's random numbers in one step."""
    return randomness.mix(seed, step, rank)


class SampleStreams(Dataset[Any]):
    """A data set whose random numbers belong to the sample, whoever loads it and when.

    Attributes are read from and written to the inner data set.
    """

    def __init__(self, inner: Any, seed: int) -> None:
        vars(self).update(inner=inner, _seed=seed, _looked_at=0, draws=False, indices=[])

    def __getitem__(self, index: Any) -> Any:
        before = _states()
        _seed(randomness.mix(self._seed, zlib.crc32(repr(index).encode())))
        looks = self._looked_at < _LOOKED_AT
        seeded = randomness.process_state() if looks else None
        try:
            return self.inner[index]
        finally:
            if seeded is not None:
                drew = not randomness.equal_states(seeded, randomness.process_state())
                vars(self).update(_looked_at=self._looked_at + 1, draws=self.draws or drew)
            _restore(before)
            self.indices.append(index)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        # A data set's way to load many samples at once would go past this one.
        if name.startswith("__") or name in ("inner", "_seed", "_looked_at", "draws", "indices"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


def by_sample(loader: Any, seed: int) -> None:
    """Lets a loader's random numbers belong to its samples, if it loads them one by one."""
    if isinstance(loader, JoinedBatches):
        loader = loader.inner
    done = (IterableDataset, SampleStreams)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, done):
        # A DataLoader refuses this by its own __setattr__; its iterators have not begun.
        vars(loader)["dataset"] = SampleStreams(loader.dataset, seed)


def _seed(seed: int) -> None:
    """Seeds what a data set draws from; torch.manual_seed takes a millisecond, for CUDA's sake."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
