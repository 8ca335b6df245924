"""Ranks that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gradients.transport_cases import LAYOUTS, pool_for
from tests.ranks import RankPool


@pytest.fixture(scope="module", params=LAYOUTS)
def transport_ranks(request: pytest.FixtureRequest) -> Iterator[tuple[str, RankPool]]:
    """Each transport in turn, and ranks on the hosts that it needs."""
    with pool_for(request.param) as pool:
        yield request.param, pool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks on one host."""
    with RankPool(2) as pool:
        yield pool
