"""Exchanges with the other ranks: small values, broadcast, gather, sums, errors.

Every function is valid without a process group, where it does what a world of one would do, so a
Trial with this package's callbacks runs unchanged in a plain process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from torchbearer_ddp import checked, errors
from torchbearer_ddp.group import exchanges, framing, layouts, membership, streaming, wire

_T = TypeVar("_T")
#: So much of what is nearly always short is sent at first: each rank gets it from every other.
SHORT_BYTES = 256
#: Tensors from this size on are broadcast one by one.
_LARGE_BYTES = 2**20
_ALONE = membership.Member()
_PAIR = checked.items(checked.anything, 2)


def _member() -> membership.Member:
    membership.ensure_joined()
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
    """The device this rank computes on; without a process group an accelerator, if there is one."""
    membership.ensure_joined()
    group = membership.current()
    member = group.member if group else membership.single()
    if member:
        return torch.device(member.device)
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def is_rank_zero() -> bool:
    """True on rank zero, and without a process group."""
    return rank() == 0


def barrier(name: str = "a barrier") -> None:
    """Waits until every rank has called it.

    Args:
        name: What the barrier is for; error messages contain it.
    """
    all_gather(None, name, SHORT_BYTES)


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
    except BaseException as caught:  # sys.exit too: the others must not enter the block
        error = caught
        raise
    finally:
        if first:
            raise_together(error, "rank_zero_first")


def all_gather(value: Any, name: str, head_bytes: int = streaming.HEAD_BYTES) -> list[Any]:
    """Every rank's value, by rank: plain data (see :mod:`torchbearer_ddp.group.wire`).

    ``name`` says what is exchanged; here and below it must be equal on all ranks. What is longer
    than ``head_bytes`` on any of them takes a second exchange.
    """
    group = _group_with_peers()
    if group is None:
        return [value]
    encoded, error = _encoded(value)
    content = encoded.packed()
    contents = _exchange_content(group, content, name, head_bytes)
    return _decoded(contents, error, name)


def gather_to(value: Any, name: str, target: int = 0) -> list[Any]:
    """Every rank's value, by rank, on the target rank only; an empty list on the others."""
    group = _group_with_peers()
    if group is None:
        return [value]
    encoded, error = _encoded(value)
    content = encoded.packed()
    found = all_gather([len(content), describe_error(error)], f"{name} (sizes)", SHORT_BYTES)
    if error is not None:
        raise error
    sizes = []
    for sender, announced in enumerate(found):
        with wire.received(sender, name):
            sizes.append(checked.byte_count(_PAIR(announced, "it")[0], "its length"))
    raise_first([described for _, described in found])
    received = exchanges.gather(group, framing.with_length(content, max(sizes)), target, name)
    contents = [each[:size] for each, size in zip(received, sizes, strict=False)]
    return _decoded(contents, None, name)


def scatter(values: Sequence[Any], name: str) -> Any:
    """Rank zero's value for this rank; rank zero gives one for each, the others none."""
    group = _group_with_peers()
    if group is None:
        return values[0]
    packed: list[torch.Tensor] = []

    def pack() -> int:
        packed.extend(wire.encode(value) for value in values)
        return max(map(len, packed)) + framing.LENGTH_BYTES

    longest = from_rank_zero(pack, f"{name} (sizes)")
    with wire.received(0, name):
        checked.byte_count(longest, "its length")
    parts = [framing.message(each, longest) for each in packed] or None
    mine = exchanges.scatter(group, parts, longest, name)
    with wire.received(0, name):
        return wire.decode(mine[framing.LENGTH_BYTES :][: framing.length(mine)])


def broadcast(value: _T, name: str) -> _T:
    """Rank zero's value, on every rank; plain data."""
    group = _group_with_peers()
    if group is None:
        return value
    mine, error = _encoded(value) if is_rank_zero() else (None, None)
    received = streaming.broadcast(mine, partial(exchanges.broadcast, group), name)
    if error is not None:
        raise error
    with wire.received(0, name):
        found: Any = value if is_rank_zero() else wire.build(received.text, iter(received.blobs))
    raise_first([found.described if isinstance(found, wire.Failure) else None])
    return found  # type: ignore[no-any-return]


def broadcast_tensors(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Overwrites tensors with those of rank zero; shapes, dtypes and layouts must be equal."""
    if group := _group_with_peers():
        strided = [tensor for tensor in tensors if layouts.is_strided(tensor)]
        large = [each for each in strided if each.nbytes >= _LARGE_BYTES]
        for tensor in large:
            # Straight into its memory: a copy of a large model would cost more than sending it.
            flat = layouts.to_bytes(tensor)
            exchanges.broadcast(group, flat, f"{name} ({_kind(tensor)}, {tensor.numel()} elements)")
            layouts.overwrite_bytes(tensor, flat)
        small = [each for each in strided if each.nbytes < _LARGE_BYTES]
        for flat, description in _flattened(small, name):
            # As bytes: gloo and NCCL do not know every dtype.
            exchanges.broadcast(group, flat.view(torch.uint8), description)
        others = [tensor for tensor in tensors if not layouts.is_strided(tensor)]
        if others:  # sparse: rank zero's may have another number of elements
            for tensor, value in zip(others, broadcast(others, f"{name} (sparse)"), strict=True):
                layouts.overwrite(tensor, value.to(tensor.device))


def all_reduce(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Replaces each tensor by its sum over all ranks; shapes and dtypes must be equal."""
    if group := _group_with_peers():
        for flat, description in _flattened(tensors, name):
            exchanges.all_reduce(group, flat, description)


def any_rank(flag: bool, name: str) -> bool:
    """True on every rank if the flag is true on any."""
    return any(all_gather(bool(flag), name, SHORT_BYTES))


def raise_together(error: BaseException | None, name: str) -> None:
    """Raises on every rank if any rank has an error, so that no rank is left waiting.

    A rank with an error of its own raises that; the others raise one that names the failed rank.
    """
    found = all_gather(describe_error(error), name, SHORT_BYTES)
    if error is not None:
        raise error
    raise_first(found)


def run_together(action: Callable[[], _T], name: str) -> _T:
    """Runs an action on every rank; if it raises on any rank, all ranks raise."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    raise_together(error, name)
    return result


def describe_error(error: BaseException | None) -> list[str] | None:
    """An error as plain data, for :func:`raise_first` on other ranks."""
    return None if error is None else [type(error).__name__, str(error)]


def raise_first(described: Sequence[list[str] | None]) -> None:
    """Raises the error of the first rank that has one: of its class, if that is one of ours."""
    for failed, found in enumerate(described):
        if found is not None:
            with wire.received(failed, "an error"):
                checked.items(checked.text(), 2)(found, "it")
            raised = errors.class_named(found[0])(f"Rank {failed}: {found[1]}")
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
    with wire.received(0, name):
        described, result = _PAIR(broadcast((describe_error(error), result), name), "it")
    if error is not None:
        raise error
    raise_first([described])
    return result  # type: ignore[no-any-return]


def _group_with_peers() -> membership.Group | None:
    """The group, or None if there is no other rank to exchange with."""
    membership.ensure_joined()
    group = membership.current()
    if group is None or group.member.world_size == 1:
        return None
    if group.pid != os.getpid():
        raise errors.DistributedError(
            f"Process {os.getpid()} was forked from rank {group.member.rank} and is not a rank: it "
            "cannot exchange anything with the others. Call it in the process that has forked it."
        )
    exchanges.open_channels(group)
    return group


def _exchange_content(
    group: membership.Group, mine: torch.Tensor, name: str, head_bytes: int
) -> list[torch.Tensor]:
    """Exchanges encoded values: their lengths with those that fit, and if one does not fit, all."""
    heads = exchanges.all_gather(group, framing.message(mine, head_bytes), name)
    sizes = []
    for sender, each in enumerate(heads):
        with wire.received(sender, name):
            sizes.append(framing.length(each))
    contents = [each[framing.LENGTH_BYTES :] for each in heads]
    if max(sizes) > head_bytes - framing.LENGTH_BYTES:
        whole = framing.with_length(mine, max(sizes))
        contents = exchanges.all_gather(group, whole, f"{name} (continued)")
    return [content[:size] for content, size in zip(contents, sizes, strict=True)]


def _encoded(value: Any) -> tuple[wire.Encoded, TypeError | None]:
    """A value for the other ranks; in place of one that cannot be sent, the error."""
    try:
        return wire.take_apart(value), None
    except TypeError as error:
        return wire.Failure(describe_error(error) or []).take_apart(), error


def _decoded(contents: Sequence[torch.Tensor], error: TypeError | None, name: str) -> list[Any]:
    """Every rank's value; if one could not be sent, all ranks raise, after the exchange."""
    if error is not None:
        raise error
    values = []
    for sender, content in enumerate(contents):
        with wire.received(sender, name):
            values.append(wire.decode(content))
    raise_first([each.described if isinstance(each, wire.Failure) else None for each in values])
    return values


@torch.no_grad()
def _flattened(tensors: Sequence[torch.Tensor], name: str) -> Iterator[tuple[torch.Tensor, str]]:
    """All tensors of each dtype and device as one, which is copied back after its exchange."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, _), members in kinds.items():
        joined = torch.cat([layouts.to_bytes(tensor) for tensor in members])
        flat = joined.view(dtype)
        yield flat, f"{name} ({_kind(flat)}, {flat.numel()} elements)"
        parts = torch.split(flat, [tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            layouts.overwrite(tensor, part.view(tensor.shape))


def _kind(tensor: torch.Tensor) -> str:
    """What messages say of a tensor; the number of its device may differ between the ranks."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
