"""Exchanges with the other ranks: small values, broadcast, gather, agreement.

Every function is valid without a process group, where it does what a world of one would do, so a
Trial with this package's callbacks runs unchanged in a plain process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchbearer_ddp import errors
from torchbearer_ddp.errors import DesyncError, DistributedError
from torchbearer_ddp.group import membership, wire
from torchbearer_ddp.group.waiting import Wait, wait_for

_T = TypeVar("_T")
#: A message of this size holds most plain values; a longer one is sent in two parts.
_HEAD_BYTES = 4096
_LENGTH_BYTES = 8
#: Large payloads are sent in pieces: gloo counts bytes in 32 bits in places.
_PIECE_BYTES = 64 * 2**20
_ALONE = membership.Member()


def _member() -> membership.Member:
    group = membership.current()
    return group.member if group else _ALONE


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return _member().rank


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return _member().world_size


def local_rank() -> int:
    """This process's rank on its host; 0 without a process group."""
    return _member().local_rank


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
    """Waits until every rank has called it.

    Args:
        name: What the barrier is for; error messages contain it.
    """
    all_gather(None, name)


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Lets the first rank of each host run the block before the others, for example a download.

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
    """Every rank's value, by rank: plain data (see :mod:`torchbearer_ddp.group.wire`).

    ``name`` says what is exchanged; here and below it must be equal on all ranks.
    """
    group = _group_with_peers()
    if group is None:
        return [value]
    message = _packed(value)
    messages = _gather_bytes(group, _padded(message[:_HEAD_BYTES], _HEAD_BYTES), name)
    rest = max(map(_length, messages)) - _HEAD_BYTES
    if rest > 0:
        tails = _gather_bytes(group, _padded(message[_HEAD_BYTES:], rest), f"{name} (continued)")
        messages = [torch.cat(parts) for parts in zip(messages, tails, strict=True)]
    return [_unpacked(each) for each in messages]


def gather_to(value: Any, name: str, target: int = 0) -> list[Any]:
    """Every rank's value, by rank, on the target rank only; an empty list on the others."""
    group = _group_with_peers()
    if group is None:
        return [value]
    message = _packed(value)
    message = _padded(message, max(all_gather(len(message), f"{name} (sizes)")))
    is_target = group.member.rank == target
    received = [torch.empty_like(message) for _ in range(world_size())] if is_target else None
    work = dist.gather(message, received, target, group=group.control, async_op=True)
    wait_for(work, Wait(group, name))
    return [_unpacked(each) for each in received or []]


def broadcast(value: _T, name: str, source: int = 0) -> _T:
    """The source rank's value, on every rank; plain data."""
    group = _group_with_peers()
    if group is None:
        return value
    is_source = group.member.rank == source
    message = _packed(value) if is_source else torch.empty(0, dtype=torch.uint8)
    received = _padded(message[:_HEAD_BYTES], _HEAD_BYTES)
    _broadcast_flat(group, received, name, source)
    rest = _length(received) - _HEAD_BYTES
    if rest > 0:
        tail = _padded(message[_HEAD_BYTES:], rest)
        _broadcast_flat(group, tail, f"{name} (continued)", source)
        received = torch.cat([received, tail])
    return value if is_source else _unpacked(received)


def broadcast_tensors(tensors: Sequence[torch.Tensor], name: str, source: int = 0) -> None:
    """Overwrites tensors with those of the source rank; shapes and dtypes must be equal."""
    group = _group_with_peers()
    if group is None:
        return
    for key, members in _by_kind(tensors).items():
        flat = torch.cat([t.detach().reshape(-1) for t in members])
        _broadcast_flat(group, flat, f"{name} ({key}, {flat.numel()} elements)", source)
        if group.member.rank != source:
            _copy_back(flat, members)


def all_reduce(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Replaces each tensor by its sum over all ranks; shapes and dtypes must be equal."""
    group = _group_with_peers()
    if group is None:
        return
    for key, members in _by_kind(tensors).items():
        flat = torch.cat([t.detach().reshape(-1) for t in members])
        wait = Wait(group, f"{name} ({key}, {flat.numel()} elements)")
        wait_for(dist.all_reduce(flat, group=_channel(group, flat), async_op=True), wait)
        _copy_back(flat, members)


def any_rank(flag: bool, name: str) -> bool:
    """True on every rank if the flag is true on any."""
    return any(all_gather(bool(flag), name))


def raise_together(error: BaseException | None, name: str) -> None:
    """Raises on every rank if any rank has an error, so that no rank is left waiting.

    A rank with an error of its own raises that; the others raise one that names the failed rank.
    """
    found = all_gather(describe_error(error), name)
    if error is not None:
        raise error
    raise_first(found)


def describe_error(error: BaseException | None) -> list[str] | None:
    """An error as plain data, for :func:`raise_first` on other ranks."""
    return None if error is None else [type(error).__name__, str(error)]


def raise_first(described: Sequence[list[str] | None]) -> None:
    """Raises the error of the first rank that has one: of its class, if that is one of ours."""
    for failed, found in enumerate(described):
        if found is not None:
            known = getattr(errors, found[0], None)
            kind = known if isinstance(known, type) else DistributedError
            raised: DistributedError = kind(f"Rank {failed}: {found[1]}")
            raised.secondary = True
            raise raised


def from_rank_zero(action: Callable[[], _T], name: str) -> _T:
    """The plain data that an action returns on rank zero, which alone runs it; errors reach all."""
    result: Any = None
    error: Exception | None = None
    if is_rank_zero():
        try:
            result = action()
        except Exception as caught:
            error = caught
    described, result = broadcast((describe_error(error), result), name)
    if error is not None:
        raise error
    raise_first([described])
    return result  # type: ignore[no-any-return]


def agree(values: dict[str, Any], what: str, remedy: str) -> None:
    """Raises the same DesyncError on every rank if any of these values differs between ranks."""
    raise_difference(all_gather(values, what), what, remedy)


def raise_difference(everyone: Sequence[dict[str, Any]], what: str, remedy: str) -> None:
    """Raises a DesyncError that names the first value that differs between these ranks."""
    for key in sorted({key for values in everyone for key in values}):
        found: dict[str, list[int]] = {}
        for each_rank, values in enumerate(everyone):
            found.setdefault(_shortened(values.get(key)), []).append(each_rank)
        if len(found) > 1:
            listing = "; ".join(
                f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in found.items()
            )
            raise DesyncError(f"The ranks disagree on {key} ({what}): {listing}. {remedy}")


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _group_with_peers() -> membership.Group | None:
    """The group, or None if there is no other rank to exchange with."""
    group = membership.current()
    return group if group is not None and group.member.world_size > 1 else None


def _packed(value: Any) -> torch.Tensor:
    """A value as a message: the length of the message, and then the encoded value."""
    content = wire.encode(value)
    length = (_LENGTH_BYTES + len(content)).to_bytes(_LENGTH_BYTES, "little")
    return torch.cat([torch.frombuffer(bytearray(length), dtype=torch.uint8), content])


def _unpacked(message: torch.Tensor) -> Any:
    return wire.decode(message[_LENGTH_BYTES : _length(message)])


def _length(message: torch.Tensor) -> int:
    return int.from_bytes(message[:_LENGTH_BYTES].numpy().tobytes(), "little")


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, size - len(part)))


def _gather_bytes(group: membership.Group, mine: torch.Tensor, name: str) -> list[torch.Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(group.member.world_size)]
    wait = Wait(group, name)
    wait_for(dist.all_gather(everyone, mine, group=group.control, async_op=True), wait)
    return everyone


def _broadcast_flat(group: membership.Group, flat: torch.Tensor, name: str, source: int) -> None:
    wait = Wait(group, name)
    for piece in torch.split(flat, max(1, _PIECE_BYTES // flat.element_size())):
        work = dist.broadcast(piece, source, group=_channel(group, flat), async_op=True)
        wait_for(work, wait)


def _channel(group: membership.Group, tensor: torch.Tensor) -> Any:
    return group.control if tensor.device.type == "cpu" else group.gradients


def _by_kind(tensors: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Tensors by dtype and device: those of one kind are sent as one flat tensor."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kind = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
            kinds.setdefault(kind, []).append(tensor)
    return kinds


@torch.no_grad()
def _copy_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
