"""The board: what the waiting ranks publish in the store, and who reads it.

A store serves one request at a time. If each of many ranks read the entries of all others, it would
be busy for longer than a rank may take to answer.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError, PeerLost
from torchbearer_ddp.group import posts
from torchbearer_ddp.group.membership import Group

#: So many ranks read the board, spread over all: some of them may have ended.
JUDGES = 8
#: So often a second all ranks together publish that they wait, if there are many.
_ENTRIES_PER_SECOND = 250
_RANKS_PER_GRACE_SECOND = 100
_WAITING = checked.record(
    {"sequence": checked.whole(0), "activity": checked.text(), "poll": checked.whole(0)}
)
_FAILURE = checked.record(
    {
        "rank": checked.whole(0),
        "host": checked.text(),
        "what": checked.text(),
        "trace": checked.text(),
    }
)
_CONCLUSION = checked.record(
    {"kind": checked.one_of("DesyncError", "PeerLost"), "message": checked.text()}
)


class Pace(NamedTuple):
    """How often a rank asks the store.

    Attributes:
        is_judge: Whether it reads the board at every look; in a small world every rank does.
        pause: Seconds between two of its looks, from where on that is a limit.
        grace: How much longer than in a small world the store may take to answer.
    """

    is_judge: bool
    pause: float
    grace: float


@functools.cache  # every exchange asks for it
def pace(rank: int, world_size: int) -> Pace:
    """The pace of a rank."""
    return Pace(
        is_judge=rank % -(-world_size // JUDGES) == 0,
        pause=world_size / _ENTRIES_PER_SECOND,
        grace=world_size / _RANKS_PER_GRACE_SECOND if world_size > JUDGES else 0.0,
    )


def read(group: Group, answered: Callable[[], None]) -> dict[int, dict[str, Any]]:
    """The entries of all ranks that have published one; calls ``answered`` at each answer."""
    store, everyone = group.store, range(group.member.world_size)
    keys = [f"waiting/{rank}" for rank in everyone]
    if len(keys) <= JUDGES or not store.has_extended_api():  # type: ignore[attr-defined]
        found = []
        for key in keys:
            found.append(posts.read(store, key, _WAITING))
            answered()
    else:
        if not group.board_is_complete:
            for key in keys:  # one request for all blocks until there is an entry for each
                store.compare_set(key, "", "")
                answered()
            group.board_is_complete = True
        contents = store.multi_get(keys)
        found = [posts.parse(*each, _WAITING) for each in zip(contents, keys, strict=True)]
    answered()
    return {rank: entry for rank, entry in zip(everyone, found, strict=True) if entry}


def raise_recorded(group: Group, answered: Callable[[], None]) -> None:
    """Raises the failure or the conclusion that a rank has recorded, if any."""
    failure = posts.read(group.store, "failure", _FAILURE)
    answered()
    if failure:
        # On its own host the failed rank shows its traceback itself.
        trace = failure["trace"] if failure["host"] != socket.gethostname() else ""
        raise PeerLost(
            f"Rank {failure['rank']} on {failure['host']} {failure['what']} "
            f"(Rank {group.member.rank} stopped because of it.)"
            + (f"\n\n{trace}" if trace else ""),
            rank=failure["rank"],
            host=failure["host"],
        )
    conclusion = posts.read(group.store, "conclusion", _CONCLUSION)
    answered()
    if conclusion:
        kind = {"DesyncError": DesyncError, "PeerLost": PeerLost}[conclusion["kind"]]
        raise kind(conclusion["message"])


def names(ranks: list[int], hosts: list[str]) -> str:
    """Ranks with their hosts; of many the first ones."""
    shown = [f"{rank} on {hosts[rank]}" for rank in ranks[:JUDGES]]
    return ", ".join(shown + _more(ranks)) or "?"


def activities(entries: dict[int, dict[str, Any]]) -> str:
    """A list of what each rank waits for; of many that wait for the same the first ones."""
    ranks: dict[str, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        ranks.setdefault(entry["activity"], []).append(rank)
    if len(entries) <= JUDGES:
        return ", ".join(
            f"rank {rank} waits for {entry['activity']}" for rank, entry in sorted(entries.items())
        )
    return "; ".join(
        f"rank {', '.join(list(map(str, found[:JUDGES])) + _more(found))} waits for {activity}"
        for activity, found in ranks.items()
    )


def out_of_step(entries: dict[int, dict[str, Any]]) -> str:
    """The message where ranks with the same number of exchanges do different things."""
    return (
        f"Ranks are out of step: {activities(entries)}. Every rank must run the same steps; look "
        "for a branch, a loop or a callback that only some ranks have."
    )


def _more(ranks: list[int]) -> list[str]:
    return [f"{len(ranks) - JUDGES} more"] if len(ranks) > JUDGES else []
