"""The device of these tests, and ranks that each have one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool
from tests.requirements import gpu_tests_on

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
#: NCCL's first connection may take a while.
GROUP_TIMEOUT = 120.0


@pytest.fixture(scope="session")
def kind() -> str:
    """``cuda``, or ``cpu`` where the tests are tried without GPUs."""
    return gpu_tests_on()


@pytest.fixture(scope="module")
def two(kind: str) -> Iterator[RankPool]:
    """Two ranks, each with a GPU of its own, that exchange gradients through NCCL."""
    with RankPool(2, device=kind, backend=BACKENDS[kind], group_timeout=GROUP_TIMEOUT) as pool:
        yield pool


@pytest.fixture(scope="module")
def alone(kind: str) -> Iterator[RankPool]:
    """One process on one GPU."""
    with RankPool(1, device=kind, backend=BACKENDS[kind], group_timeout=GROUP_TIMEOUT) as pool:
        yield pool
