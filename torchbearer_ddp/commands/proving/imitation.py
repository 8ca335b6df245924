"""One process that does as N ranks do: the ways in which they differ by nature, one at a time.

Where a difference goes away when one process imitates the ranks in one respect, the reason for it
is known, and not guessed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torchbearer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from torchbearer_ddp.commands.proving.job import BATCH_NORM, LOSS, RANDOM
from torchbearer_ddp.commands.proving.replacing import replaced
from torchbearer_ddp.commands.proving.streams import step_seed

Rows = Sequence[torch.Tensor]


class Imitation:
    """What the samples of the current batch have to do with the ranks.

    Args:
        kinds: What is imitated.
    """

    def __init__(self, kinds: Sequence[str] = ()) -> None:
        self._kinds = kinds
        #: The rows of each rank, while a step runs.
        self._rows: Rows = ()
        self.count = 0
        #: Which statistics were computed over a batch.
        self.batch_norms = 0
        self._streams = _RankStreams(self)

    def begin_step(self, rows: Rows, seed: int, step: int) -> None:
        """From here on the batch of one step is used."""
        self._rows, self.count = rows, sum(map(len, rows))
        self._streams.seed([step_seed(seed, step, rank) for rank in range(len(rows))])

    def end_step(self) -> None:
        """From here on nothing is imitated."""
        self._rows, self.count = (), 0

    def rows(self, kind: str) -> Rows:
        """The rows of each rank if this is to be imitated now."""
        return self._rows if kind in self._kinds else ()

    @property
    def has_drawn(self) -> bool:
        """True if random numbers were drawn from the ranks' streams."""
        return self._streams.has_drawn

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes the place of torch's functions."""
        functional = torch.nn.functional
        counted = functools.partial(self._batch_norm, functional.batch_norm)
        streams: Any = self._streams if RANDOM in self._kinds else nullcontext()
        with replaced(functional, "batch_norm", counted), streams:
            yield

    def criterion(self, criterion: Any) -> Any:
        """A criterion that is the average of the ranks' losses."""
        if LOSS not in self._kinds or criterion is None:
            return criterion
        if isinstance(criterion, torch.nn.Module):  # its parameters keep their names
            vars(criterion)["forward"] = self._averaged(criterion.forward)
            return criterion
        return functools.wraps(criterion)(self._averaged(criterion))

    def _averaged(self, criterion: Callable[..., Any]) -> Callable[..., Any]:
        def average(*values: Any) -> Any:
            if not self._rows:
                return criterion(*values)
            parts = [(rows, _cut_all(values, rows, self.count)) for rows in self._rows if len(rows)]
            return sum(criterion(*part) * (len(rows) / self.count) for rows, part in parts)

        return average

    def _batch_norm(self, original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not given.get("training", False):
            return original(x, **given)
        self.batch_norms += 1
        rows = self.rows(BATCH_NORM)
        if not rows or len(x) != self.count:
            return original(x, **given)
        statistics = [given.get("running_mean"), given.get("running_var")]
        own = [[each if each is None else each.clone() for each in statistics] for _ in rows]
        found = [
            original(x[part], **{**given, "running_mean": mean, "running_var": var})
            for part, (mean, var) in zip(rows, own, strict=True)
        ]
        with torch.no_grad():
            for total, parts in zip(statistics, zip(*own, strict=True), strict=True):
                if total is not None:  # as the ranks' statistics are averaged after an epoch
                    total.copy_(torch.stack(parts).mean(0))
        return _joined(found, rows, 0)


class _RankStreams(TorchDispatchMode):
    """Draws the random numbers of each rank's samples from a stream of that rank."""

    def __init__(self, imitation: Imitation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._imitation = imitation
        self._states: list[Any] = []
        self.has_drawn = False

    def seed(self, seeds: Sequence[int]) -> None:
        """Begins the streams."""
        before = _generator_states()
        self._states = []
        for seed in seeds:
            torch.manual_seed(seed)
            self._states.append(_generator_states())
        _set_generator_states(before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        rows = self._imitation.rows(RANDOM)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not rows or not is_random or named.get("generator") is not None:
            return func(*args, **named)
        count = self._imitation.count
        before, found = _generator_states(), []
        for rank, part in enumerate(rows):
            _set_generator_states(self._states[rank])
            mine, its = _cut_all(args, part, count), _cut_all(named, part, count)
            found.append(func(*mine, **its))
            after = _generator_states()
            if all(map(torch.equal, after, self._states[rank])):
                # torch marks functions that may draw; this one, such as a BatchNorm, has not.
                _set_generator_states(before)
                return func(*args, **named)
            self._states[rank] = after
        self.has_drawn = True
        _set_generator_states(before)
        if func._schema.is_mutable:
            whole = args[0]
            dim = _batch_dim(whole, count)
            value = found[0] if dim is None else _joined(found, rows, dim)
            return whole.copy_(value)
        if isinstance(found[0], tuple):
            return tuple(_joined_like(each, rows) for each in zip(*found, strict=True))
        return _joined_like(found, rows)


def _generator_states() -> list[torch.Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


def _set_generator_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _cut_all(values: Any, rows: torch.Tensor, count: int) -> Any:
    """Some rows of everything that belongs to a batch: tensors, and the sizes of new ones."""

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dim = _batch_dim(value, count)
            return value if dim is None else value.index_select(dim, rows.to(value.device))
        return value

    def sizes(value: Any) -> Any:
        if isinstance(value, torchbearer.State):
            part = copy.copy(value)
            held = (torch.Tensor, list, tuple, dict)
            part.update({k: tree_map(cut, v) for k, v in value.items() if isinstance(v, held)})
            return part
        if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            dim = value.index(count) if count in value else None
            return [len(rows) if at == dim else each for at, each in enumerate(value)]
        return tree_map(cut, value)

    if isinstance(values, dict):
        return {name: sizes(value) for name, value in values.items()}
    return tuple(map(sizes, values))


def _batch_dim(tensor: Any, count: int) -> int | None:
    shape = list(tensor.shape)
    return shape.index(count) if count in shape else None


def _joined(parts: Sequence[torch.Tensor], rows: Rows, dim: int) -> torch.Tensor:
    """Puts the rows of the ranks back to where they were cut from."""
    order = torch.argsort(torch.cat([*rows])).to(parts[0].device)
    return torch.cat([*parts], dim).index_select(dim, order)


def _joined_like(parts: Sequence[Any], rows: Rows) -> Any:
    """Joins what the ranks have drawn; what is not of a batch is rank zero's."""
    sizes = [len(each) for each in rows]
    if not torch.is_tensor(parts[0]):
        return parts[0]
    for dim in range(parts[0].dim()):
        if [each.shape[dim] for each in parts] == sizes:
            return _joined(parts, rows, dim)
    return parts[0]
