"""Which transport carries the gradients, and the one line that gives the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.gradients.transports.compression import POWERSGD, Compression, hook_name
from torchbearer_ddp.gradients.transports.hierarchical import HierarchicalTransport
from torchbearer_ddp.gradients.transports.hooked import HookTransport
from torchbearer_ddp.gradients.transports.interface import Bucket, Transport
from torchbearer_ddp.gradients.transports.leaders import LeaderTransport
from torchbearer_ddp.gradients.transports.shared_memory import SegmentError, SharedMemoryTransport
from torchbearer_ddp.gradients.transports.torch_dist import TorchTransport
from torchbearer_ddp.group import agreement, hosts, segment
from torchbearer_ddp.group.hosts import Hosts, Process
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.own_device import backend_of

_TITLES = {
    "gloo": "gloo",
    "nccl": "NCCL",
    "shm": "shared memory",
    "hierarchical": "shared memory inside each host, gloo between hosts",
}
TRANSPORTS = ("auto", *_TITLES)


def choose(
    group: Group,
    requested: str,
    buckets: Sequence[Bucket],
    compress: str | Compression | None = None,
) -> tuple[Transport, str]:
    """Makes the transport for these buckets; collective, and the same choice on every rank.

    Args:
        group: The group of all ranks.
        requested: One of :data:`TRANSPORTS`.
        buckets: What it is to sum, the same on every rank.
        compress: What travels between hosts instead of single precision, or None.

    Returns:
        The transport, and the line that rank zero shows the user.

    Raises:
        ValueError: If there is no such transport.
        DesyncError: On every rank, if the ranks differ in what they ask for.
        DistributedError: On every rank, if the requested one is not possible here.
    """
    _check(requested)
    compression = Compression.of(compress)
    device = next((b.device.type for b in buckets if b.device.type != "cpu"), "cpu")
    backend = backend_of(group.gradients, device)
    # The memory is offered before it is known whether it is needed: it has no size yet, and its
    # descriptor travels with the rest instead of in an exchange of its own.
    with segment.offered() as (memory, problem):
        sizes = {f"bucket {index}": bucket.describe() for index, bucket in enumerate(buckets)}
        everyone = agreement.agree(
            {"transport": requested, "compress": compression.describe(), **sizes},
            "the transport of the gradients",
            "Build the same model on every rank, and give every rank the same options.",
            extra=asdict(Process.current(group.member.rank, memory, problem)),
        )
        by_host = hosts.by_host([Process(**each) for each in everyone])
        best, reason = _best(by_host, device, backend)
        wanted = best if requested == "auto" or len(everyone) == 1 else requested
        is_hooked = compression.hook is not None and len(everyone) > 1
        if wanted == best != backend and (not is_hooked or _is_between_hosts(best, compression)):
            try:
                shared = _shared(group, buckets, by_host, compression)
                return shared, _line(best, reason, compression)
            except SegmentError as error:
                reason = str(error)
    if is_hooked:
        return HookTransport(group, buckets, compression), _line("", "", compression)
    if wanted == backend:
        reason = reason if wanted == best else "as requested"
    elif requested == "auto":
        reason = f"not {wanted}: {reason}"
    else:
        raise DistributedError(
            f"transport={requested!r} is not possible here ({reason}). Use transport='auto', which "
            f"falls back to {backend} where it must."
        )
    if compression.kind == POWERSGD and len(everyone) > 1:
        return HookTransport(group, buckets, compression), _line(backend, reason)
    return TorchTransport(group, buckets, backend, compression), _line(backend, reason)


def _is_between_hosts(transport: str, compression: Compression) -> bool:
    """True for a hook that need not see what each rank has: in one host it does, as in DDP."""
    return transport == "hierarchical" and compression.fits_slices


def _check(requested: str) -> None:
    if requested not in TRANSPORTS:
        raise ValueError(
            f"transport is {requested!r}, which does not exist: it is one of "
            f"{', '.join(map(repr, TRANSPORTS))}."
        )


def _shared(
    group: Group, buckets: Sequence[Bucket], by_host: Hosts, compression: Compression
) -> Transport:
    """A transport in shared memory; nothing is compressed inside a host."""
    if len(by_host) == 1:
        return SharedMemoryTransport(group, buckets, by_host)
    if compression.kind == POWERSGD:
        return LeaderTransport(group, buckets, by_host, compression)
    return HierarchicalTransport(group, buckets, by_host, compression)


def _best(by_host: Hosts, device: str, backend: str) -> tuple[str, str]:
    """The fastest transport for ranks on these hosts, and the reason."""
    counts = [len(local) for local in by_host]
    machines = {process.machine for local in by_host for process in local}
    if sum(counts) == 1:
        return backend, "there is only one rank"
    if device != "cpu":
        return backend, f"the gradients are on {device}"
    if len(machines) > 1:
        return backend, f"the ranks differ in architecture: {'; '.join(sorted(machines))}"
    if len(counts) == 1:
        return "shm", f"{counts[0]} ranks on one host"
    if max(counts) == 1:
        return backend, f"each of the {len(counts)} hosts has one rank"
    if len(set(counts)) > 1:
        return backend, f"the hosts differ in their number of ranks: {', '.join(map(str, counts))}"
    return "hierarchical", f"each of the {len(counts)} hosts has {counts[0]} ranks"


def _line(name: str, reason: str, compression: Compression | None = None) -> str:
    if compression is None or compression.hook is None:
        return f"gradients: {_TITLES.get(name, name)} ({reason})"
    hook = hook_name(compression.hook)
    if name:
        return f"gradients: shared memory inside each host, {hook} between hosts ({reason})"
    return f"gradients: the hook {hook}"
