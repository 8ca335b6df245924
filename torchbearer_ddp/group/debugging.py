"""A rank that is held in a debugger, as the other ranks see it: they wait without a timeout."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from torchbearer_ddp import checked
from torchbearer_ddp.group import launcher, membership, posts
from torchbearer_ddp.log import logger

_KEY = "debugger"
_ENTRY = checked.record({"rank": checked.whole(0), "place": checked.text()})


def terminal() -> str | None:
    """The terminal that a debugger of this process can use: the launcher's, or its own."""
    if path := os.environ.get(launcher.TERMINAL_VARIABLE):
        return path
    with contextlib.suppress(OSError):
        return os.ttyname(0)
    return None


@contextlib.contextmanager
def held(place: str) -> Iterator[None]:
    """Tells the other ranks that this one is held in a debugger, at this line of the script."""
    group = membership.current()
    if group is None:
        yield
        return
    rank = group.member.rank
    group.store.set(_KEY, json.dumps({"rank": rank, "place": place}))
    try:
        yield
    finally:
        group.store.set(_KEY, "")


class Holder:
    """Finds out whether a rank is held in a debugger, and says so once."""

    def __init__(self) -> None:
        self._said: Any = None

    def found(self, store: Any, rank: int) -> bool:
        """True if a rank is held, so that this one may wait for as long as that takes."""
        text = store.get(_KEY) if store.check([_KEY]) else b""
        if not text:
            return False
        if text != self._said:
            self._said, entry = text, posts.parse(text, _KEY, _ENTRY)
            logger.info(
                f"rank {rank} waits without a timeout: rank {entry['rank']} is in the debugger at "
                f"{entry['place']}"
            )
        return True


#: Of this process.
holder = Holder()
