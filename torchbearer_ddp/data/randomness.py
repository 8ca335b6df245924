"""Random number generators: seed, save and restore them, and give each rank its own stream."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

_SEED_SPACE = 2**63
#: Takes the place of a rank in the seed of the stream that all ranks have between runs.
_BETWEEN_RUNS = 2**32 - 1


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
    """Gives each rank except rank zero its own random stream, derived from the current seed.

    Before this call all ranks draw the same numbers, so that for example a random split of the data
    is the same on every rank. Rank zero keeps its stream: it draws as a single process would.
    """
    if rank:
        seed_all(mix(torch.initial_seed(), rank))


def enter_run(seed: int, runs: int, rank: int) -> None:
    """Gives each rank its own streams while a run trains.

    Rank zero keeps its stream, which is the common one until then: it draws as a single process
    would. ``seed`` is ``torch.initial_seed()`` at this moment, so that a seed set by the script
    counts; ``runs`` is the number of runs before this one.
    """
    if rank:
        seed_all(mix(seed, rank, runs))


def leave_run(seed: int, runs: int) -> None:
    """Gives all ranks one common stream after a run: a function of the seed and the runs so far.

    ``seed`` and ``runs`` are those that :func:`enter_run` was given.
    """
    seed_all(mix(seed, _BETWEEN_RUNS, runs))


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if nothing was drawn between two calls of :func:`rng_state`."""
    pairs = zip(_entries(one), _entries(other), strict=True)
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def _entries(state: dict[str, Any]) -> Iterator[Any]:
    for value in state.values():
        yield from value if isinstance(value, list) else [value]


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
    """Restores the state that :func:`rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores the state of every generator at the end of the block."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
