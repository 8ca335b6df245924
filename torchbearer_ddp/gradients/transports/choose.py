"""Which transport carries the gradients, and the one line that says why."""

from __future__ import annotations

import torch

from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.gradients.transports import hosts
from torchbearer_ddp.gradients.transports.hierarchical import HierarchicalTransport
from torchbearer_ddp.gradients.transports.hosts import Process
from torchbearer_ddp.gradients.transports.interface import Transport
from torchbearer_ddp.gradients.transports.segment import SegmentError, share
from torchbearer_ddp.gradients.transports.shared_memory import SharedMemoryTransport
from torchbearer_ddp.gradients.transports.torch_dist import TorchTransport
from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.membership import Group

TRANSPORTS = ("auto", "gloo", "nccl", "shm", "hierarchical")
_WORDS = {
    "gloo": "gloo",
    "nccl": "NCCL",
    "shm": "shared memory",
    "hierarchical": "shared memory inside each host and gloo between hosts",
}


def choose(
    group: Group,
    requested: str,
    device: torch.device,
    nbytes: int = 0,
    compress: str | None = None,
) -> tuple[Transport, str]:
    """Chooses a transport; collective, and the same choice on every rank.

    Args:
        group: The group of all ranks.
        requested: One of :data:`TRANSPORTS`.
        device: Where the gradients live.
        nbytes: How much each rank is going to allocate: shared memory must have room for it.
        compress: What travels between hosts instead of single precision, or None.

    Returns:
        The transport, and the line that rank zero tells the user.

    Raises:
        ValueError: If there is no such transport.
        DistributedError: On every rank, if the requested one is not possible here.
    """
    if requested not in TRANSPORTS:
        raise ValueError(
            f"transport is {requested!r}, which does not exist: it is one of "
            f"{', '.join(map(repr, TRANSPORTS))}."
        )
    collectives.agree(
        {"transport": requested, "device": device.type},
        "the way of the gradients",
        "Give every rank the same transport and the same kind of device.",
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    by_host = hosts.by_host(hosts.gather())
    best, because = _best(by_host, device, backend)
    wanted = best if requested == "auto" or group.member.world_size == 1 else requested
    if wanted == backend:
        why = because if requested in ("auto", best) else "as requested"
        return TorchTransport(group, backend, compress), _line(backend, why)
    problem = because
    if wanted == best:
        try:
            return _shared(group, by_host, nbytes, compress), _line(wanted, because)
        except SegmentError as error:
            problem = str(error)
    if requested != "auto":
        raise DistributedError(
            f"transport={requested!r} is not possible: {problem}. Use transport='auto', which "
            f"falls back to {backend} where it must."
        )
    return TorchTransport(group, backend, compress), _line(
        backend, f"not {wanted}, since {problem}"
    )


def _best(by_host: list[list[Process]], device: torch.device, backend: str) -> tuple[str, str]:
    """The fastest transport for ranks on these hosts, and why."""
    counts = [len(local) for local in by_host]
    machines = {process.machine for local in by_host for process in local}
    if sum(counts) == 1:
        return backend, "there is only one rank"
    if device.type != "cpu":
        return backend, f"the gradients are on {device.type}"
    if len(machines) > 1:
        return backend, f"the ranks differ in architecture: {'; '.join(sorted(machines))}"
    if len(counts) == 1:
        return "shm", f"all {counts[0]} ranks run on one host"
    if max(counts) == 1:
        return backend, f"each of the {len(counts)} hosts has one rank"
    if len(set(counts)) > 1:
        return backend, f"the hosts differ in their number of ranks: {', '.join(map(str, counts))}"
    return "hierarchical", f"each of the {len(counts)} hosts has {counts[0]} ranks"


def _shared(
    group: Group, by_host: list[list[Process]], nbytes: int, compress: str | None
) -> Transport:
    ranks = [[process.rank for process in local] for local in by_host]
    local = next(local for local, on in zip(by_host, ranks, strict=True) if group.member.rank in on)
    share(local, nbytes)  # only to see that there is room: a bucket would find out too late
    if len(by_host) == 1:
        return SharedMemoryTransport(group, local)
    return HierarchicalTransport(group, by_host, local, compress)


def _line(name: str, because: str) -> str:
    return f"gradients travel through {_WORDS[name]}: {because}"
