"""What each rank has for itself: its generators, its metrics, its own buffers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
import torchbearer

from torchbearer_ddp.checkpoints import contents, metric_state
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import layouts, replicas, wire

#: How far and how wide to look for generators in a loader: a list of transforms, not of samples.
_DEPTH = 6
_WIDTH = 32


def collect(state: Any, started: dict[str, Any], place: dict[str, Any] | None) -> torch.Tensor:
    """The generators, metrics and history of this rank, packed into one tensor.

    ``started`` are the generators at the start of the run. Running metrics are each rank's own, and
    are in the history. In mid-epoch, ``place`` is this rank's place in the epoch. Packed, it is one
    record of the file, not one for each batch.
    """
    metrics = metric_state.collect(state[torchbearer.METRIC_LIST], mid_epoch=place is not None)
    return wire.encode(
        {
            "generators": generators(state),
            "started": started,
            "metrics": metrics,
            "history": state[torchbearer.HISTORY],
            "epoch": place,
        }
    )


def unpack(part: dict[str, Any], device: Any) -> dict[str, Any]:
    """What a rank collected, with its own buffers, and its own part of what else is trained."""
    own = {"buffers": part["buffers"], "others": part.get("others", {})}
    return {**wire.decode(part["packed"], device), **own}


def generators(state: Any) -> dict[str, Any]:
    """The state of every generator of this rank: python's, numpy's, torch's, and the loaders'."""
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
        return list(generator.getstate())
    return _plain_numpy(generator.bit_generator.state)


def _set(generator: Any, saved: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(saved)
    elif isinstance(generator, random.Random):
        generator.setstate(tuple(saved))
    else:
        generator.bit_generator.state = saved


def _plain_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numpy(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, numpy.ndarray | numpy.generic) else value


def differing_buffers(
    model: torch.nn.Module, checksums: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """This rank's buffers, by plain name, where the ranks' checksums of them differ.

    Ranks see different data, so the statistics of BatchNorm diverge within an epoch.
    """
    differ = (torch.stack([*checksums]) != checksums[0]).any(0).tolist()
    return {
        contents.plain_name(model, name): buffer.detach().cpu()
        for (name, buffer), differs in zip(model.named_buffers(), differ, strict=True)
        if differs
    }


def averaged_statistics(
    model: torch.nn.Module, buffers: Sequence[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The BatchNorm statistics that differ, averaged over the ranks' :func:`differing_buffers`.

    A model loaded elsewhere gets their average, a run that continues each rank's own. The live
    buffers stay as they are: a save must not change the run.
    """
    averaged = {}
    for name in [contents.plain_name(model, n) for n, _ in replicas.batch_norm_statistics(model)]:
        if name in buffers[0]:
            own = torch.stack([each[name] for each in buffers])
            averaged[name] = own.double().mean(0).to(own.dtype)
    return averaged


def restore_buffers(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Puts back this rank's own buffers."""
    for name, buffer in model.named_buffers():
        if (plain := contents.plain_name(model, name)) in saved:
            layouts.overwrite(buffer, saved[plain])
