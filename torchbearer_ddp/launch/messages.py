"""What the launcher does with the messages of its ranks, see :mod:`torchbearer_ddp.group.launcher`.

Warnings that several ranks raise alike are shown once, with the number of ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torchbearer_ddp.launch.notebook import NotebookBars
from torchbearer_ddp.launch.output import Output
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.started_rank import StartedRank

#: How long a warning waits for the same one of the other ranks.
_ALIKE_SECONDS = 3.0


@dataclass
class _Alike:
    """Equal warnings of several ranks."""

    since: float = field(default_factory=time.monotonic)
    ranks: list[int] = field(default_factory=list)


class Messages:
    """Acts on messages.

    Attributes:
        checkpoint: The newest checkpoint that a rank has written, or None.
    """

    def __init__(self, plan: Plan, output: Output) -> None:
        self._world, self._output = plan.member.local_world_size, output
        self.checkpoint: str | None = None
        self._warnings: dict[str, _Alike] = {}
        self._bars = NotebookBars()

    def take(self, rank: StartedRank) -> None:
        """Acts on what a rank has sent since the last call."""
        for message in rank.messages():
            kind = message.pop("kind")
            if kind == "warning":
                self._take_warning(rank.rank, message["text"])
            elif kind == "saved":
                self.checkpoint = message["path"]
            elif kind == "bar":
                self._bars.draw(**message)
            elif kind == "debugger":
                self._output.hold(message["opens"])
                rank.answer()

    def _take_warning(self, rank: int, text: str) -> None:
        self._output.keep(rank, text)
        alike: Any = self._warnings.get(text)
        if alike is not None and rank in alike.ranks:  # again on the same rank
            self._show(text)
        alike = self._warnings.setdefault(text, _Alike())
        alike.ranks.append(rank)
        if len(alike.ranks) == self._world:
            self._show(text)

    def tick(self) -> None:
        """Shows warnings that have waited long enough."""
        now = time.monotonic()
        for text, alike in list(self._warnings.items()):
            if now - alike.since > _ALIKE_SECONDS:
                self._show(text)

    def close(self) -> None:
        """Shows what still waits; no more messages come."""
        for text in list(self._warnings):
            self._show(text)
        self._bars.close()

    def _show(self, text: str) -> None:
        """Shows a warning as the first of its ranks would, and says which others have it."""
        ranks = sorted(self._warnings.pop(text).ranks)
        if len(ranks) > 1:
            names = f"all {len(ranks)} ranks"
            if len(ranks) < self._world:
                names = f"ranks {', '.join(map(str, ranks))}"
            first, feed, others = text.partition("\n")
            text = f"{first} (from {names}){feed}{others}"
        self._output.show(ranks[0], text)
