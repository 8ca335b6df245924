"""A large value on its way to all ranks is in the memory of each of them once."""

from pathlib import Path

import pytest
import torch

from tests.ranks import ranks
from torchbearer_ddp.group import collectives

_MIB = 2**20
SIZE = 96


def memory(what):
    """This process's memory in MiB: now (VmRSS), or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def growth(action):
    """By how many MiB an action's peak is above what there was before, and its result."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    result = action()
    return memory("VmHWM") - before, result


def checkpoint():
    torch.manual_seed(1)
    return {
        "large": torch.randn(SIZE * _MIB // 4),
        "channels_last": torch.randn(4, 3, 300, 300).to(memory_format=torch.channels_last),
        "small": [torch.full((3,), float(i)) for i in range(2000)],
        "sparse": torch.eye(3).to_sparse_csr(),
        "empty": torch.empty(0, 3),
        "nested": ({"a": b"bytes", 7: None}, float("inf"), {1, 2}),
        "odd": torch.arange(5, dtype=torch.int16)[1:4],
    }


def equal(one, other):
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.layout, one.shape) == (other.dtype, other.layout, other.shape)
        strided = one.layout is torch.strided
        return same and torch.equal(
            one if strided else one.to_dense(), other if strided else other.to_dense()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(equal, one, other))
    return one == other


@ranks(3)
def test_a_large_value_is_in_memory_once():
    value = checkpoint() if collectives.is_rank_zero() else None
    collectives.broadcast(torch.ones(SIZE), "to have seen it once")
    more, received = growth(lambda: collectives.broadcast(value, "a checkpoint"))
    assert equal(received, checkpoint())
    assert received["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert more < (0.5 if collectives.is_rank_zero() else 1.5) * SIZE, more


@ranks(2)
def test_what_cannot_be_sent_is_an_error_on_all_ranks():
    value = {"large": torch.ones(_MIB), "function": checkpoint}
    with pytest.raises(Exception, match="cannot be sent to other ranks"):
        collectives.broadcast(value if collectives.is_rank_zero() else None, "a value")
    assert collectives.broadcast(collectives.rank() + 1, "afterwards") == 1
