"""Random number generators: seed them alike, let the ranks' streams part, save and restore them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

_SEED_SPACE = 2**63


def mix(seed: int, *numbers: int) -> int:
    """A seed that depends on every number given: the stream of a rank, or the order of an epoch."""
    spawned = numpy.random.SeedSequence([seed % _SEED_SPACE, *numbers])
    return int(spawned.generate_state(1, numpy.uint64)[0]) % _SEED_SPACE


def seed_all(seed: int) -> None:
    """Seeds python's, numpy's and torch's generators (CUDA's included)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def diverge_streams(rank: int) -> None:
    """Gives each rank but the first a stream of its own, derived from the seed in force.

    Up to here every rank draws alike, so that a random split of the data, say, is the same split
    everywhere. Rank zero keeps its stream: it draws what a single process would.
    """
    if rank:
        seed_all(mix(torch.initial_seed(), rank))


def rng_state() -> dict[str, Any]:
    """The state of every generator, as plain data."""
    version, words, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [str(kind), torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what :func:`rng_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside leaves the training's generators as they were."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
