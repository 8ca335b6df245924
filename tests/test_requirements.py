"""Where something is missing, tests are skipped, or fail if skipping is forbidden."""

import pytest

from tests.requirements import NO_SKIP, unavailable


@pytest.mark.parametrize("value", [None, "", "0"])
def test_skipping_is_allowed(monkeypatch, value):
    monkeypatch.delenv(NO_SKIP, raising=False)
    if value is not None:
        monkeypatch.setenv(NO_SKIP, value)
    with pytest.raises(pytest.skip.Exception, match="no such program; install it"):
        unavailable("no such program; install it")


@pytest.mark.parametrize("value", ["1", "yes"])
def test_skipping_is_forbidden(monkeypatch, value):
    monkeypatch.setenv(NO_SKIP, value)
    with pytest.raises(pytest.fail.Exception, match=rf"no such program.*NO_SKIP is {value}"):
        unavailable("no such program; install it")
