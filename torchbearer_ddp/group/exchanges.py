"""How bytes reach the other ranks: through the memory of a host, gloo, or with GPUs NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import framing, hosts, segment, wire
from torchbearer_ddp.group.host_channel import MOST_BYTES, MOST_RANKS, HostChannel
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait, complete, wait_for, waiter

#: Large payloads are sent in pieces: gloo counts bytes in 32 bits in places.
_PIECE_BYTES = 64 * 2**20
#: The longest description of a process, and reason why it shares no memory.
_OFFER_BYTES = 4096
_PROCESS = checked.record(
    {
        "rank": checked.whole(0),
        "host": checked.text(),
        "pid": checked.whole(0),
        "started": checked.whole(0),
        "machine": checked.text(),
        "memory": checked.whole(-1),
        "file": checked.text(),
        "problem": checked.text(),
    }
)


def open_channels(group: Group) -> None:
    """Makes what the exchanges of a group go through, unless it was made; collective."""
    if not group.has_channels:  # a group that the user made, at its first exchange
        complete(group.make_channels, Wait(group, "the channels of the process group"))
    if not group.is_open:
        try:
            if 1 < group.member.world_size <= MOST_RANKS:
                group.host_channel = _host_channel(group)
        except BaseException:  # Ctrl-C, which a script may catch: the others may have decided
            group.broken = True
            raise
        group.is_open = True


def all_gather(group: Group, mine: torch.Tensor, name: str) -> list[torch.Tensor]:
    """The bytes of every rank, by rank; equally many on each."""
    wait = Wait(group, name)
    if group.host_channel is not None and len(mine) <= MOST_BYTES:
        with _broken_if_out_of_step(group):
            return list(group.host_channel.all_gather(mine, wait))
    everyone = [torch.empty_like(mine) for _ in range(group.member.world_size)]
    wait_for(dist.all_gather(everyone, mine, group=group.control, async_op=True), wait)
    return everyone


def gather(group: Group, mine: torch.Tensor, target: int, name: str) -> list[torch.Tensor]:
    """The bytes of every rank on the target rank; an empty list on the others."""
    received = None
    if group.member.rank == target:
        received = [torch.empty_like(mine) for _ in range(group.member.world_size)]
    wait = Wait(group, name)
    wait_for(dist.gather(mine, received, target, group=group.control, async_op=True), wait)
    return received or []


def scatter(group: Group, parts: list[torch.Tensor] | None, size: int, name: str) -> torch.Tensor:
    """This rank's part, of so many bytes, of those that rank zero gives."""
    mine = torch.empty(size, dtype=torch.uint8, device="cpu")
    wait = Wait(group, name)
    wait_for(dist.scatter(mine, parts, 0, group=group.control, async_op=True), wait)
    return mine


def broadcast(group: Group, flat: torch.Tensor, name: str) -> None:
    """Overwrites a flat tensor with rank zero's."""
    wait, channel = Wait(group, name), _channel(group, flat)
    is_short = flat.numel() * flat.element_size() <= MOST_BYTES
    if group.host_channel is not None and flat.device.type == "cpu" and is_short:
        with _broken_if_out_of_step(group):
            group.host_channel.broadcast(flat, wait)
        return
    wait_on = waiter(channel)
    for piece in torch.split(flat, max(1, _PIECE_BYTES // flat.element_size())):
        wait_on(dist.broadcast(piece, 0, group=channel, async_op=True), wait)


def all_reduce(group: Group, flat: torch.Tensor, name: str) -> None:
    """Replaces a flat tensor by its sum over all ranks."""
    wait, channel = Wait(group, name), _channel(group, flat)
    waiter(channel)(dist.all_reduce(flat, group=channel, async_op=True), wait)


@contextlib.contextmanager
def _broken_if_out_of_step(group: Group) -> Iterator[None]:
    """The channel does not hold the group, which would keep both alive once the user is done."""
    try:
        yield
    except DesyncError:
        group.broken = True
        raise


def _channel(group: Group, tensor: torch.Tensor) -> Any:
    return group.control if tensor.device.type == "cpu" else group.gradients


def _host_channel(group: Group) -> HostChannel | None:
    """The channel in shared memory, if all ranks are on one host and can share it; collective."""
    with segment.offered() as (memory, problem):
        mine = asdict(hosts.Process.current(group.member.rank, memory, problem))
        everyone = [hosts.Process(**each) for each in _offers(group, mine, _PROCESS)]
        if len(hosts.by_host(everyone)) > 1:
            return None
        made, problem = None, everyone[0].problem
        try:
            made = None if problem else HostChannel(group.member.rank, everyone)
        except OSError as error:
            problem = str(error)[: _OFFER_BYTES // 8]
        # After this no rank signals to one that is not ready, and the first may close the memory.
        return None if any(_offers(group, problem, checked.text())) else made


def _offers(group: Group, mine: Any, form: checked.Form) -> list[Any]:
    name = "the memory that the host shares"
    message = framing.message(wire.encode(mine), _OFFER_BYTES)
    found = []
    for sender, each in enumerate(all_gather(group, message, name)):
        with wire.received(sender, name):
            content = each[framing.LENGTH_BYTES :][: framing.length(each)]
            found.append(form(wire.decode(content), name))
    return found
