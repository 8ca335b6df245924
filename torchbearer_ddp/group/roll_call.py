"""The roll call: every rank registers in the store, and waits until all have.

A missing rank, two processes with one rank, nodes with different world sizes, and devices that do
not fit together raise an error that names them, the same on every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import time
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group.bounded import in_time
from torchbearer_ddp.group.membership import Member
from torchbearer_ddp.group.places import entry_of, find_places
from torchbearer_ddp.group.rendezvous import ABANDON_SECONDS, POLL_SECONDS, STORE_SECONDS, depart


def roll_call(
    store: Store, member: Member, deadline: float, *, serves: bool
) -> tuple[Member, list[dict[str, Any]]]:
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
        # At the deadline _exchange names the missing ranks, unless the store does not answer.
        roll = in_time(lambda: _exchange(store, member, deadline), deadline + STORE_SECONDS, lost)
        return find_places(member, roll)[member.rank], roll
    except LaunchError:
        depart(store, member.world_size, ABANDON_SECONDS if serves else 0.0, None)
        raise


def _exchange(store: Store, member: Member, deadline: float) -> list[dict[str, Any]]:
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

    def refuse(message: str) -> LaunchError:
        # Every rank raises the refusal that was recorded first.
        return LaunchError(store.compare_set("refused", "", message).decode())

    if store.add(f"claim/{member.rank}", 1) > 1:
        other = json.loads(store.get(f"registered/{member.rank}"))
        raise refuse(
            f"Two processes have rank {member.rank}: process {other['pid']} on {other['host']} "
            f"and process {mine['pid']} on {mine['host']}. Start each with its own --rank."
        )
    store.set(f"registered/{member.rank}", json.dumps(mine))
    known: dict[int, dict[str, Any]] = {}
    # Every rank waits until all ranks know all others, so that all raise the same refusal.
    while store.add("ready", 0) < member.world_size:
        if store.check(["refused"]):
            raise refuse("")
        for rank in range(member.world_size):
            if rank not in known and store.check([f"registered/{rank}"]):
                known[rank] = info = json.loads(store.get(f"registered/{rank}"))
                if info["world_size"] != member.world_size:
                    raise refuse(
                        f"The world size differs: {member.world_size} on rank {member.rank} "
                        f"({mine['host']}), {info['world_size']} on rank {rank} "
                        f"({info['host']}). Give every node the same --world-size."
                    )
                if len(known) == member.world_size:
                    store.add("ready", 1)
        if time.monotonic() > deadline and store.add("ready", 0) < member.world_size:
            missing = [rank for rank in range(member.world_size) if rank not in known]
            raise refuse(
                f"Only {len(known)} of {member.world_size} ranks arrived within "
                f"{member.timeout:g} s; missing: {', '.join(map(str, missing)) or 'none'}. "
                "Start them, see their output, or allow more time with --timeout."
            )
        time.sleep(POLL_SECONDS)
    return [known[rank] for rank in range(member.world_size)]


def _machine() -> str:
    """Identifies this host until its next boot; two hosts may have the same name."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}"
    return socket.gethostname()
