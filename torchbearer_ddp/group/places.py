"""The place of each rank: its number on its host, its device, and who else uses that.

Every rank computes the places of all ranks from the roll call, so that all refuse alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import own_device
from torchbearer_ddp.group.membership import Member

Roll = Sequence[dict[str, Any]]


def entry_of(member: Member) -> dict[str, Any]:
    """What the other ranks need to know of a rank's place."""
    return {
        "local_rank": member.local_rank,
        "local_world_size": member.local_world_size,
        "device": member.device,
        "backend": member.backend,
        "gpus": own_device.visible_gpus(member.device),
    }


def find_places(member: Member, roll: Roll) -> list[Member]:
    """Every rank with its local rank and its device, by rank.

    Raises:
        LaunchError: If the ranks differ in backend or kind of device, there are too few GPUs, or
            ranks share one that NCCL would need for each.
    """
    _require_equal(roll, "backend", lambda entry: str(entry["backend"]))
    _require_equal(roll, "device", lambda entry: torch.device(entry["device"]).type)
    by_machine: dict[str, list[int]] = {}
    for rank, entry in enumerate(roll):
        by_machine.setdefault(entry["machine"], []).append(rank)
    found = [_place(member, rank, e, by_machine[e["machine"]]) for rank, e in enumerate(roll)]
    if member.backend != "gloo":
        _require_own_gpus(found, roll)
    return found


def _place(member: Member, rank: int, entry: dict[str, Any], local: list[int]) -> Member:
    local_rank, count = entry["local_rank"], entry["local_world_size"]
    if local_rank < 0:
        local_rank, count = local.index(rank), len(local)
    placed = dataclasses.replace(
        member, rank=rank, local_rank=local_rank, local_world_size=count, device=entry["device"]
    )
    return dataclasses.replace(placed, device=device_of(placed, len(entry["gpus"])))


def device_of(member: Member, gpus: int) -> str:
    """The device of a rank: plain ``cuda`` is its own GPU, or the only one that it can see.

    Raises:
        LaunchError: If there are fewer GPUs than ranks on its host.
    """
    device = torch.device(member.device)
    if device.type != "cuda":
        return member.device
    index = device.index
    if index is None:
        index = 0 if gpus == 1 else member.local_rank
    if index >= gpus:
        raise LaunchError(
            f"Rank {member.rank} is process number {member.local_rank + 1} on its host and would "
            f"use cuda:{index}, but {gpus} GPUs are visible to it: each rank needs its own. Start "
            "fewer there, or use --device cpu."
        )
    return f"cuda:{index}"


def _require_equal(roll: Roll, what: str, read: Callable[[dict[str, Any]], str]) -> None:
    values = [read(entry) for entry in roll]
    for rank, value in enumerate(values):
        if value != values[0]:
            raise LaunchError(
                f"The {what} differs: {values[0]} on rank 0 ({roll[0]['host']}), {value} on rank "
                f"{rank} ({roll[rank]['host']}). Give every rank the same --{what}, or check that "
                "each host sees its GPUs."
            )


def _require_own_gpus(places: Sequence[Member], roll: Roll) -> None:
    used: dict[str, int] = {}
    for member in places:
        index = torch.device(member.device).index
        gpu = roll[member.rank]["gpus"][index] if roll[member.rank]["gpus"] else ""
        if gpu and used.setdefault(gpu, member.rank) != member.rank:
            other = places[used[gpu]]
            raise LaunchError(
                f"Ranks {other.rank} and {member.rank} use the same GPU ({gpu} on "
                f"{roll[member.rank]['host']}: {other.device} of the one, {member.device} of the "
                "other), but NCCL needs one for each rank. Check --device and "
                "CUDA_VISIBLE_DEVICES of each, or use --backend gloo."
            )
