"""The roll call: every rank registers in the store, and waits until all have.

The last ranks to come read all registrations with one request each, and publish them as one list,
so a rank needs a few requests, however many ranks there are. A missing rank, two processes with one
rank, nodes with different world sizes, and devices that do not fit together raise an error that
names them, the same on every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError, LaunchError
from torchbearer_ddp.group import board, posts
from torchbearer_ddp.group.bounded import in_time
from torchbearer_ddp.group.launcher import TOKEN_VARIABLE
from torchbearer_ddp.group.membership import Member
from torchbearer_ddp.group.places import Roll, entry_of, find_places
from torchbearer_ddp.group.rendezvous import (
    ABANDON_SECONDS,
    POLL_SECONDS,
    STORE_SECONDS,
    count,
    depart,
)

#: What every rank registers, see :func:`_exchange`.
_ENTRY = checked.record(
    {
        "rank": checked.whole(0),
        "world_size": checked.whole(1),
        "host": checked.text(),
        "machine": checked.text(),
        "pid": checked.whole(0),
        "seed": checked.whole(-(2**63), 2**64 - 1),
        "local_rank": checked.whole(-1),
        "local_world_size": checked.whole(1),
        "device": checked.text(),
        "backend": checked.text(),
        "gpus": checked.items(checked.text()),
    }
)
#: The outcome, of which the first one that is published holds: all registrations, or a refusal.
_OUTCOME, _ARRIVED = "roll", "arrived"
_ROLL = checked.record({"refused": checked.text(), "roll": checked.items(_ENTRY)})
#: So much of the outcome is read for each rank.
_LONGEST_ENTRY = 4096
#: So often a second all ranks together ask for the outcome, if there are many.
_QUESTIONS_PER_SECOND = 2500
#: So many missing ranks are named.
_MOST_NAMED = 50


def roll_call(
    store: Store, member: Member, deadline: float, *, serves: bool
) -> tuple[Member, Roll]:
    """Registers this rank; returns it with its place, and the registrations of all ranks.

    Raises:
        LaunchError: If ranks are missing at the deadline, or were started with different settings.
    """
    lost = (
        f"Lost the rendezvous store while waiting for the other ranks (rank {member.rank} of "
        f"{member.world_size}): the process that holds it has ended or is frozen, or the network "
        "is cut. See its output."
    )
    try:
        # At the deadline _exchange names the missing ranks, unless the store does not answer: all
        # ranks ask it then.
        latest = deadline + STORE_SECONDS + board.pace(member.rank, member.world_size).grace
        roll = in_time(lambda: _exchange(store, member, deadline), latest, lost)
        with checked.as_error(LaunchError), checked.damage("What the ranks have registered"):
            return find_places(member, roll)[member.rank], roll
    except (LaunchError, DesyncError) as error:
        depart(store, member.world_size, ABANDON_SECONDS if serves else 0.0, None)
        if isinstance(error, DesyncError):  # something else is in the store
            raise LaunchError(str(error)) from error
        raise


def _exchange(store: Store, member: Member, deadline: float) -> Roll:
    """Registers this rank and waits for the registrations of the others."""
    mine = {
        "rank": member.rank,
        "world_size": member.world_size,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "seed": torch.initial_seed(),
        **entry_of(member),
    }

    def publish(refused: str, roll: Roll = ()) -> Roll:
        # Every rank takes the outcome that was published first.
        outcome = {"refused": refused, "roll": roll}
        longest = _LONGEST_ENTRY * max(256, member.world_size)
        found = posts.first(store, _OUTCOME, outcome, _ROLL, longest)
        if found["refused"]:
            raise LaunchError(found["refused"])
        return list(found["roll"])

    def refuse(message: str) -> LaunchError:
        publish(message)
        return LaunchError(message)  # the others have met before

    if taken := register(store, member.rank, mine):
        raise refuse(taken)
    arrival = f"{member.rank}/{member.world_size} "
    store.append(_ARRIVED, arrival)  # type: ignore[attr-defined]  # torch's types do not know it
    arrived = _arrived(store)
    for rank, world_size in arrived.items():
        # Of two ranks that differ the later one sees both.
        if world_size != member.world_size and (info := registration(store, rank)):
            raise refuse(
                f"The world size differs: {member.world_size} on rank {member.rank} "
                f"({mine['host']}), {world_size} on rank {rank} "
                f"({info['host']}). Give every node the same --world-size."
            )
    everyone = range(member.world_size)
    # Of many ranks that arrive at the same time, most see that all have.
    if arrived.keys() >= set(everyone) and member.rank in [*arrived][-board.JUDGES :]:
        return publish("", _registrations(store, everyone))
    pause = max(POLL_SECONDS, member.world_size / _QUESTIONS_PER_SECOND)
    while not store.check([_OUTCOME]) and time.monotonic() < deadline:
        time.sleep(pause)
    return publish(_missing(member, _arrived(store)))


def _arrived(store: Store) -> dict[int, int]:
    """The ranks that have registered, in that order, with the world size that each was given."""
    content = store.get(_ARRIVED)
    with posts.told(), checked.damage(f"The entry {_ARRIVED!r}"):
        pairs = [text.split("/") for text in content.decode().split()]
        return {int(rank): int(world_size) for rank, world_size in pairs}


def _registrations(store: Store, ranks: Sequence[int]) -> Roll:
    """What these ranks have registered, read with one request."""
    keys = [f"registered/{rank}" for rank in ranks]
    return [
        posts.parse(content or b"null", key, _ENTRY)
        for key, content in zip(keys, store.multi_get(keys), strict=True)
    ]


def _missing(member: Member, arrived: Mapping[int, int]) -> str:
    missing = [str(rank) for rank in range(member.world_size) if rank not in arrived]
    shown = missing[:_MOST_NAMED] + [f"{len(missing) - _MOST_NAMED} more"] * (
        len(missing) > _MOST_NAMED
    )
    return (
        f"Only {member.world_size - len(missing)} of {member.world_size} ranks arrived within "
        f"{member.timeout:g} s; missing: {', '.join(shown) or 'none'}. "
        "Start them, see their output, or allow more time with --timeout."
        + " Ranks with another TORCHBEARER_DDP_TOKEN do not meet."
        * (TOKEN_VARIABLE in os.environ)
    )


def register(
    store: Store, rank: int, mine: Mapping[str, Any], form: checked.Form = _ENTRY
) -> str | None:
    """Registers a rank with what others need to know; a sentence if another process has it."""
    if count(store, f"claim/{rank}", 1) > 1:
        key = f"registered/{rank}"
        other = posts.parse(store.get(key) or b"null", key, form)
        return (
            f"Two processes have rank {rank}: process {other['pid']} on {other['host']} and "
            f"process {mine['pid']} on {mine['host']}. Start each with its own --rank."
        )
    store.set(f"registered/{rank}", json.dumps(mine))
    return None


def registration(store: Store, rank: int, form: checked.Form = _ENTRY) -> dict[str, Any] | None:
    """What a rank has registered, or None if it has not come yet."""
    found: dict[str, Any] | None = posts.read(store, f"registered/{rank}", form)
    return found


def _machine() -> str:
    """Identifies this host until its next boot; two hosts may have the same name."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}"
    return socket.gethostname()
