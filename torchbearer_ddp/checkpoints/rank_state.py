"""What each rank has for itself: its generators, its metrics, its own buffers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torchbearer

from torchbearer_ddp.checkpoints import contents, metric_state
from torchbearer_ddp.checkpoints.snapshot import Snapshot
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import collectives, replicas

#: How far and how wide to look for generators in a loader: a list of transforms, not of samples.
_DEPTH = 6
_WIDTH = 32


def generators(state: Any) -> dict[str, Any]:
    """The state of every generator of this rank: python's, numpy's, torch's, and the loaders' own.

    Args:
        state: The state of the running Trial.
    """
    own = {name: _get(each) for name, each in _loader_generators(state)}
    return {**randomness.rng_state(), "loaders": own}


def set_generators(state: Any, saved: dict[str, Any]) -> None:
    """Puts back what :func:`generators` gave."""
    randomness.set_rng_state(saved)
    for name, each in _loader_generators(state):
        if name in saved["loaders"]:
            _set(each, saved["loaders"][name])


def _loader_generators(state: Any) -> list[tuple[str, Any]]:
    trial = state[torchbearer.SELF].state
    found: list[tuple[str, Any]] = []
    for key in (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA):
        if trial[key] is not None:
            found += _owned_generators(trial[key][0], str(key), set(), _DEPTH)
    return found


def _owned_generators(
    owner: Any, path: str, seen: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    """Generators among the attributes of a loader, its samplers, its data set, its transforms."""
    for name, value in getattr(owner, "__dict__", {}).items():
        here = f"{path}.{name}"
        parts = value[:_WIDTH] if isinstance(value, list | tuple) else [value]
        for index, part in enumerate(parts):
            if id(part) in seen or isinstance(part, torch.Tensor | torch.nn.Module | type):
                continue
            if isinstance(part, torch.Generator | numpy.random.Generator | random.Random):
                seen.add(id(part))
                yield f"{here}[{index}]", part
            elif hasattr(part, "__dict__") and depth:
                seen.add(id(part))
                yield from _owned_generators(part, f"{here}[{index}]", seen, depth - 1)


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, list(words), gauss]
    return _plain_numpy(generator.bit_generator.state)


def _set(generator: Any, saved: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(saved)
    elif isinstance(generator, random.Random):
        generator.setstate((saved[0], tuple(saved[1]), saved[2]))
    else:
        generator.bit_generator.state = saved


def _plain_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numpy(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, numpy.ndarray | numpy.generic) else value


def collect(state: Any, *, mid_epoch: bool) -> dict[str, Any]:
    """The generators, metrics and history of this rank.

    Running metrics are each rank's own, and are in the history.

    Args:
        state: The state of the running Trial.
        mid_epoch: True if epoch metrics are being gathered.
    """
    return {
        "generators": generators(state),
        "metrics": metric_state.collect(state[torchbearer.METRIC_LIST], mid_epoch=mid_epoch),
        "history": Snapshot().copy(state[torchbearer.HISTORY], "history"),
    }


def differing_buffers(model: torch.nn.Module) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each rank's own buffers where the ranks differ, and what the model entry is to hold of them.

    Ranks see different data, so the statistics of BatchNorm part ways within an epoch. A model
    loaded elsewhere gets their average; a run that continues gets each rank's own. The live
    buffers stay as they are: a save must not change the run.

    Args:
        model: The model, without wrappers.
    """
    world = collectives.world_size()
    if world == 1:
        return [{}], {}
    named = [(name, buffer) for name, buffer in model.named_buffers()]
    prints = collectives.all_gather(replicas.fingerprint(named), "the buffers' checksums")
    differing = [
        (name, buffer)
        for index, (name, buffer) in enumerate(named)
        if len({int(each[index]) for each in prints}) > 1
    ]
    if not differing:
        return [{} for _ in range(world)], {}
    plain = contents.plain_names(model, [name for name, _ in differing])
    mine = {plain[name]: buffer.detach().cpu() for name, buffer in differing}
    averaged = replicas.averaged_statistics(model)
    return (
        collectives.all_gather(mine, "the buffers that differ"),
        {plain[name]: averaged[name].cpu() for name, _ in differing if name in averaged},
    )


@torch.no_grad()
def restore_buffers(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Puts back this rank's own buffers.

    Args:
        model: The model, without wrappers.
        saved: This rank's part of what :func:`differing_buffers` gave.
    """
    live = dict(model.named_buffers())
    for name, plain in contents.plain_names(model, live).items():
        if plain in saved:
            live[name].copy_(saved[plain])
