"""Ranks that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gradients.transport_cases import TRANSPORTS, play_hosts
from tests.ranks import RankPool


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport_ranks(request: pytest.FixtureRequest) -> Iterator[tuple[str, RankPool]]:
    """Each transport in turn, and ranks on the hosts that it needs."""
    world_size, layout = TRANSPORTS[request.param]
    with RankPool(world_size, lambda: play_hosts(layout)) as pool:
        yield request.param, pool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks on one host."""
    with RankPool(2) as pool:
        yield pool
