"""One store and its connections for all tests of this folder."""

import pytest

from tests.scale.simulated import WORLD_SIZE, Ranks


@pytest.fixture(scope="session")
def connected():
    return Ranks(WORLD_SIZE)


@pytest.fixture
def ranks(connected):
    connected.renew()
    return connected
