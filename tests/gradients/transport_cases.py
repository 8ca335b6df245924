"""What the tests of several transports share: their ranks and hosts, and sums of one bucket."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from tests.ranks import RankPool
from tests.stand_ins import nccl
from torchbearer_ddp.gradients.transports import shared_memory
from torchbearer_ddp.gradients.transports.choose import choose
from torchbearer_ddp.gradients.transports.compression import Compression
from torchbearer_ddp.gradients.transports.interface import Bucket, Transport
from torchbearer_ddp.group import collectives, hosts, membership
from torchbearer_ddp.group.waiting import Wait

#: By transport the host of each rank that it needs.
LAYOUTS = {"gloo": "aa", "shm": "aa", "hierarchical": "abba", nccl.NAME: "ab"}
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
SIZES = [0, 1, 2, 3, 17, 1009, 16384, 100003, shared_memory.CACHE_BYTES // 4 + 1]


def play_hosts(layout: str) -> None:
    """Lets each rank run on the host that the layout has for it, such as 'abab'."""
    os.environ[hosts.HOST_ID_VARIABLE] = layout[collectives.rank()]


def pool_for(transport: str) -> RankPool:
    """Ranks on the hosts that a transport needs, with its backend."""
    layout = LAYOUTS[transport]

    def prepare() -> None:
        play_hosts(layout)
        nccl.behaviour.reset()

    return RankPool(len(layout), prepare, backend=transport if transport == nccl.NAME else "gloo")


def option(transport: str) -> str:
    """What a callback asks for to get this transport."""
    return "auto" if transport == nccl.NAME else transport


def bucket(size: int, dtype: torch.dtype = torch.float32, header: int = 0) -> Bucket:
    """A bucket of so many elements, the header among them."""
    return Bucket(dtype, CPU, size - header, header)


def make(
    requested: str = "shm",
    buckets: Sequence[Bucket] = (),
    compress: str | Compression | None = None,
) -> tuple[Transport, str]:
    """The transport for some buckets, or for one that holds 10 numbers; and its line."""
    return choose(_group(), requested, buckets or [bucket(10)], compress)


def numbers(numel: int, dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    """The same small integers in every process."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def waiting(activity: str = "the gradients") -> Wait:
    """A wait of this rank's group."""
    return Wait(_group(), activity)


def add_up(transport: Transport, index: int = 0, weight: float = 1.0) -> None:
    """Sums one bucket."""
    wait = waiting()
    transport.start(index, weight)
    transport.finish(index, wait)


def is_equal_everywhere(tensor: torch.Tensor) -> bool:
    """True if every rank has the same bits."""
    mine = tensor.contiguous().view(torch.uint8).sum(dtype=torch.int64).item()
    everyone = collectives.all_gather((mine, tensor), "the bits")
    return all(m == mine and torch.equal(t, tensor) for m, t in everyone)


def _group() -> Any:
    return membership.current()
