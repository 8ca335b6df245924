"""The buckets of the run before, for a run that trains the same."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchbearer_ddp.gradients.exchange import Trained
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.trained import Named


@dataclass
class _Kept:
    """A reducer that is not in use, and what it was made for."""

    reducer: Reducer
    group: Group
    channel: Any
    parameters: list[Any]
    trained: Sequence[Trained]


class Spare:
    """Keeps a reducer from the end of a run to the first exchange of the next one.

    To make one takes several exchanges and shared memory; to make it anew for each ``run()`` of a
    loop would cost more than short runs themselves. One process keeps one: memory for a Trial that
    is done must not add up.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def keep(
        self,
        reducer: Reducer,
        group: Group,
        named: Named,
        trained: Sequence[Trained],
    ) -> None:
        """Keeps a reducer, made for these of all parameters, unless an exchange was cut short."""
        if reducer.is_sending:
            return
        _Last.drop(unless=self)
        _Last.spare = weakref.ref(self)
        self._kept = _Kept(reducer, group, group.gradients, _kinds(named), trained)

    def drop(self) -> None:
        """Lets go of what is kept."""
        self._kept = None

    def is_ready(self, group: Group, named: Named) -> bool:
        """True if what is kept is for these parameters; every rank must be asked."""
        kept = self._kept
        return (
            kept is not None
            and kept.group is group
            and not group.broken
            and kept.channel is group.gradients  # it is renewed after a failed backward pass
            and kept.parameters == _kinds(named)
            and not kept.reducer.is_outdated
        )

    def take(self, trained: Sequence[Trained]) -> Reducer | None:
        """What is kept, if it exchanges just these gradients; it is kept no longer."""
        kept, self._kept = self._kept, None
        _Last.drop()  # before another one takes memory
        if kept is None or len(kept.trained) != len(trained):
            return None
        same = all(
            mine.parameter is other.parameter and mine.kind == other.kind
            for mine, other in zip(kept.trained, trained, strict=True)
        )
        return kept.reducer if same else None


class _Last:
    """The spare of this process that keeps something."""

    spare: weakref.ref[Spare] | None = None

    @classmethod
    def drop(cls, unless: Spare | None = None) -> None:
        """Lets go of what it keeps."""
        last = cls.spare() if cls.spare is not None else None
        if last is not None and last is not unless:
            last.drop()


def _kinds(named: Named) -> list[Any]:
    """What buckets depend on: between two runs parameters may be moved, or be given other data."""
    return [(id(p), p.dtype, p.device, p.shape, p.stride()) for _, p in named]
