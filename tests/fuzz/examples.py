"""Bytes for the targets: made by hypothesis, the same in every run, and those of the corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")


def any_bytes(count: int) -> Callable[[Callable[[bytes], None]], Callable[[], None]]:
    """Calls the decorated test with so many examples, and with all of the corpus."""

    def decorate(test: Callable[[bytes], None]) -> Callable[[], None]:
        quiet = pytest.mark.filterwarnings("ignore:Detected pickle protocol")(test)
        wrapped = given(st.binary(max_size=64))(quiet)
        for path in sorted(CORPUS.iterdir()):
            wrapped = example(path.read_bytes())(wrapped)
        return settings(
            max_examples=count,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(wrapped)

    return decorate
