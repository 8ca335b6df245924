"""Freed memory is kept for the next step, unless the user has set limits."""

import ctypes

import pytest
import torch

from tests.programs import launch
from tests.ranks import ranks
from torchbearer_ddp.group import memory

BLOCK_BYTES = 100 * 2**20


class Allocator(ctypes.Structure):
    """What glibc tells about itself: ``man mallinfo``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


def free_bytes():
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Allocator
    return ask().fordblks


def kept_of_a_block(size=BLOCK_BYTES):
    """How much of a freed block the process still has."""
    before = free_bytes()
    block = torch.ones(size // 4)
    del block
    return free_bytes() - before


def test_without_ranks_the_allocator_is_as_it_was():
    assert kept_of_a_block() < BLOCK_BYTES / 2


@ranks(2)
def test_a_rank_keeps_memory_that_a_step_frees():
    assert kept_of_a_block() > BLOCK_BYTES / 2
    # The next ones lie there too, or beside it: aligned blocks do not always fit into the hole that
    # one of them has left.
    assert sum(kept_of_a_block() for _ in range(20)) < 2 * BLOCK_BYTES


@ranks(2)
def test_larger_blocks_are_returned_to_the_kernel():
    assert kept_of_a_block(4 * memory.KEPT_BYTES) < memory.KEPT_BYTES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHBEARER_DDP_KEEP_MEMORY", "0"),
        ("MALLOC_MMAP_THRESHOLD_", "1000000"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=65536"),
    ],
)
def test_settings_of_the_user_are_not_changed(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert max(launch(kept_of_a_block)) < BLOCK_BYTES / 2
