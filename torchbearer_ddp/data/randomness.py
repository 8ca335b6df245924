"""Random number generators: seed, save and restore them, and give each rank its own stream."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from torchbearer_ddp.group import collectives

_SEED_SPACE = 2**63
#: Takes the place of a rank in the seed of the stream that all ranks have between runs.
_BETWEEN_RUNS = 2**32 - 1
#: Accelerators of which a process may see several.
_KINDS = ("cuda", "xpu")


def mix(seed: int, *numbers: int) -> int:
    """A seed that depends on every number given: the stream of a rank, or the order of an epoch."""
    spawned = numpy.random.SeedSequence([seed % _SEED_SPACE, *numbers])
    return int(spawned.generate_state(1, numpy.uint64)[0]) % _SEED_SPACE


def seed_all(seed: int) -> None:
    """Seeds python's, numpy's and torch's generators (CUDA's included)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    if torch.accelerator.current_accelerator() is None:
        # Else torch prepares the seeding of devices that it was not even built for, each with a
        # copy of the stack: nine tenths of the time.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


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
    a, b = list(_entries(one)), list(_entries(other))
    pairs = zip(a, b, strict=False)
    same = (torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in pairs)
    return len(a) == len(b) and all(same)


def _entries(state: Any) -> Iterator[Any]:
    if isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _entries(value)
    else:
        yield state


def rng_state() -> dict[str, Any]:
    """The state of every generator, as plain data."""
    return {**process_state(), "devices": _device_states()}


def process_state() -> dict[str, Any]:
    """The state of the generators that are not a device's."""
    version, words, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    return {
        "python": [version, torch.from_numpy(numpy.array(words)), gauss],
        "numpy": [str(kind), torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }


def python_state(version: Any, words: Any, gauss: Any) -> Any:
    """A state for ``random.setstate``, which would take anything as the last of its parts."""
    return (version, tuple(words), None if gauss is None else float(gauss))


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the state that :func:`rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate(python_state(version, words.tolist(), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for kind, states in (state.get("devices") or _in_order(state)).items():
        _set_device_states(kind, states)


def device_kinds(state: dict[str, Any]) -> str:
    """On what kinds of devices numbers were drawn, according to :func:`rng_state`."""
    return " and ".join(sorted(state.get("devices") or _in_order(state))) or "the CPU"


def _device_states() -> dict[str, list[torch.Tensor]]:
    """The generators of the devices that this process uses, by kind, that of its own one first.

    Another process may see other devices, or the same ones under other numbers.
    """
    found = {}
    for kind in _KINDS:
        module = torch.get_device_module(kind)
        # Where nothing was computed on it, nothing was drawn; to ask would take memory there.
        if module.is_initialized():
            found[kind] = [module.get_rng_state(index) for index in _own_first(module)]
    if torch.backends.mps.is_available():
        found["mps"] = [torch.mps.get_rng_state()]
    return found


def _set_device_states(kind: str, states: list[torch.Tensor]) -> None:
    if kind == "mps" and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states[0])
    elif kind in _KINDS and (module := torch.get_device_module(kind)).is_available():
        for index, state in zip(_own_first(module), states, strict=False):
            module.set_rng_state(state, index)


def _own_first(module: Any) -> list[int]:
    own, count = module.current_device(), module.device_count()
    return [(own + offset) % count for offset in range(count)]


def _in_order(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The generators in a file that has those of all GPUs by their numbers, own one first."""
    states = state.get("cuda", [])
    own = collectives.local_rank() % len(states) if states else 0
    return {"cuda": [*states[own:], *states[:own]]} if states else {}


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores the state of every generator at the end of the block."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
