"""The only place that talks to other ranks: small values, broadcast, gather, agreement.

Every function is valid without a process group, where it does what a world of one would do, so a
Trial with this package's callbacks runs unchanged in a plain process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchbearer_ddp.errors import DesyncError, DistributedError
from torchbearer_ddp.group import membership, wire
from torchbearer_ddp.group.waiting import Wait, wait_for

_T = TypeVar("_T")
#: One message of this size holds most plain values; what is longer needs a second one.
_HEAD_BYTES = 4096
_LENGTH_BYTES = 8
#: Large payloads are sent in pieces: gloo counts bytes in 32 bits in places.
_PIECE_BYTES = 64 * 2**20


def rank() -> int:
    """This process's rank; 0 without a process group."""
    group = membership.current()
    return group.member.rank if group else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    group = membership.current()
    return group.member.world_size if group else 1


def local_rank() -> int:
    """This process's rank on its host; 0 without a process group."""
    group = membership.current()
    return group.member.local_rank if group else 0


def device() -> torch.device:
    """The device this rank computes on; without a process group a GPU if there is one."""
    group = membership.current()
    member = group.member if group else membership.single()
    if member:
        return torch.device(member.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_rank_zero() -> bool:
    """True on rank zero, and without a process group."""
    return rank() == 0


def barrier(name: str = "a barrier") -> None:
    """Waits until every rank has come here.

    Args:
        name: What the barrier is for, as an error message would say it.
    """
    all_gather(None, name)


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Lets the first rank of each host run the block before the others (a download, say).

    Example: ::

        >>> from torchbearer_ddp import rank_zero_first
        >>> with rank_zero_first():
        ...     data = 'fetched once, read by all'
    """
    error: BaseException | None = None
    first = local_rank() == 0
    try:
        if not first:
            raise_together(None, "rank_zero_first")
        yield
    except Exception as caught:
        error = caught
        raise
    finally:
        if first:
            raise_together(error, "rank_zero_first")


def all_gather(value: Any, name: str) -> list[Any]:
    """Every rank's value, by rank.

    Args:
        value: Plain data (see :mod:`torchbearer_ddp.wire`); each rank may give another.
        name: What is exchanged, the same on every rank.
    """
    group = membership.current()
    if group is None or group.member.world_size == 1:
        return [value]
    packed = wire.encode(value)
    head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
    head[:_LENGTH_BYTES] = _length(packed)
    room = _HEAD_BYTES - _LENGTH_BYTES
    head[_LENGTH_BYTES : _LENGTH_BYTES + min(room, len(packed))] = packed[:room]
    heads = _gather_bytes(group, head, name)
    sizes = [int.from_bytes(h[:_LENGTH_BYTES].numpy().tobytes(), "little") for h in heads]
    rest = max(sizes) - room
    if rest <= 0:
        return [wire.decode(h[_LENGTH_BYTES:][:n]) for h, n in zip(heads, sizes, strict=True)]
    tail = torch.zeros(rest, dtype=torch.uint8)
    tail[: max(0, len(packed) - room)] = packed[room:]
    tails = _gather_bytes(group, tail, f"{name} (continued)")
    return [
        wire.decode(torch.cat([h[_LENGTH_BYTES:], t])[:n])
        for h, t, n in zip(heads, tails, sizes, strict=True)
    ]


def broadcast(value: _T, name: str, source: int = 0) -> _T:
    """The value of one rank, on every rank.

    Args:
        value: Plain data; only the source's counts.
        name: What is exchanged, the same on every rank.
        source: The rank whose value is sent.
    """
    group = membership.current()
    if group is None or group.member.world_size == 1:
        return value
    mine = group.member.rank == source
    packed = wire.encode(value) if mine else torch.empty(0, dtype=torch.uint8)
    size = int(all_gather(len(packed), name)[source])
    buffer = packed if mine else torch.empty(size, dtype=torch.uint8)
    _broadcast_flat(group, buffer, f"{name} (content)", source)
    return value if mine else wire.decode(buffer)


def broadcast_tensors(tensors: Sequence[torch.Tensor], name: str, source: int = 0) -> None:
    """Overwrites these tensors with those of one rank, flattened per dtype and device.

    Args:
        tensors: The same shapes and dtypes on every rank.
        name: What is exchanged, the same on every rank.
        source: The rank whose tensors are sent.
    """
    group = membership.current()
    if group is None or group.member.world_size == 1:
        return
    for key, members in _by_kind(tensors).items():
        flat = torch.cat([t.detach().reshape(-1) for t in members])
        _broadcast_flat(group, flat, f"{name} ({key})", source)
        if group.member.rank != source:
            _copy_back(flat, members)


def all_reduce(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Replaces each tensor by its sum over all ranks, flattened per dtype and device.

    Args:
        tensors: The same shapes and dtypes on every rank.
        name: What is exchanged, the same on every rank.
    """
    group = membership.current()
    if group is None or group.member.world_size == 1:
        return
    for key, members in _by_kind(tensors).items():
        flat = torch.cat([t.detach().reshape(-1) for t in members])
        channel = group.control if flat.device.type == "cpu" else group.gradients
        wait = Wait(group, f"{name} ({key}, {flat.numel()} elements)")
        wait_for(dist.all_reduce(flat, group=channel, async_op=True), wait)
        _copy_back(flat, members)


def any_rank(flag: bool, name: str) -> bool:
    """True on every rank if any rank says so.

    Args:
        flag: This rank's say.
        name: What is asked, the same on every rank.
    """
    return any(all_gather(bool(flag), name))


def raise_together(error: BaseException | None, name: str) -> None:
    """Raises on every rank if any rank has an error, so that none is left waiting alone.

    A rank with an error of its own raises that one; the others raise one of the same kind, if it is
    one of ours, that names the rank.

    Args:
        error: This rank's error, or None.
        name: What was attempted, the same on every rank.
    """
    if world_size() == 1:
        if error is not None:
            raise error
        return
    mine = None if error is None else [type(error).__name__, str(error)]
    for other, found in enumerate(all_gather(mine, name)):
        if found is None:
            continue
        if error is not None:
            raise error
        kind = {c.__name__: c for c in _all_errors()}.get(found[0], DistributedError)
        raised = kind(f"Rank {other}: {found[1]}")
        raised.secondary = True
        raise raised


def from_rank_zero(action: Callable[[], _T], name: str) -> _T:
    """What an action gives on rank zero, the only one to do it; if it fails there, all raise.

    Args:
        action: Gives plain data.
        name: What it gives, the same on every rank.
    """
    result: Any = None
    error: Exception | None = None
    if is_rank_zero():
        try:
            result = action()
        except Exception as caught:
            error = caught
    raise_together(error, f"reading {name}")
    return broadcast(result, name)  # type: ignore[no-any-return]


def agree(values: dict[str, Any], what: str, remedy: str, extra: Any = None) -> list[Any]:
    """Compares values between ranks; where they differ, all raise the same error.

    Args:
        values: Plain data by name.
        what: What is compared, the same on every rank.
        remedy: What the user can do about a difference.
        extra: Plain data that travels along and may differ.

    Returns:
        The ``extra`` of every rank, by rank.

    Raises:
        DesyncError: If any value differs; it names the value, the ranks and what they have.
    """
    everyone = all_gather((values, extra), what)
    for key in sorted({k for each, _ in everyone for k in each}):
        found: dict[str, list[int]] = {}
        for each_rank, (each, _) in enumerate(everyone):
            value = each.get(key)
            found.setdefault(value if isinstance(value, str) else repr(value), []).append(each_rank)
        if len(found) > 1:
            listing = "; ".join(f"{_short(v)} on rank {_ranks(r)}" for v, r in found.items())
            raise DesyncError(f"The ranks disagree on {key} ({what}): {listing}. {remedy}")
    return [each_extra for _, each_extra in everyone]


def _ranks(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."


def _all_errors() -> Iterator[type[DistributedError]]:
    from torchbearer_ddp import errors

    for found in vars(errors).values():
        if isinstance(found, type) and issubclass(found, DistributedError):
            yield found


def _length(packed: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(
        bytearray(len(packed).to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8
    )


def _gather_bytes(group: membership.Group, mine: torch.Tensor, name: str) -> list[torch.Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(group.member.world_size)]
    wait = Wait(group, name)
    wait_for(dist.all_gather(everyone, mine, group=group.control, async_op=True), wait)
    return everyone


def _broadcast_flat(group: membership.Group, flat: torch.Tensor, name: str, source: int) -> None:
    channel = group.control if flat.device.type == "cpu" else group.gradients
    wait = Wait(group, f"{name}, {flat.numel()} elements")
    for piece in torch.split(flat, max(1, _PIECE_BYTES // flat.element_size())):
        wait_for(dist.broadcast(piece, source, group=channel, async_op=True), wait)


def _by_kind(tensors: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    kinds: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kind = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
            kinds.setdefault(kind, []).append(tensor)
    return kinds


@torch.no_grad()
def _copy_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
