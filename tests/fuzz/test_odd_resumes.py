"""Something odd at any place of a checkpoint: the older file is used, or nothing is lost.

``TORCHBEARER_DDP_ODD_RESUMES=100000`` runs all of the cases instead of some.
"""

import os

import pytest

from tests.fuzz.odd_resumes import STEPS, sweep
from tests.ranks import run_ranks

CASES = int(os.environ.get("TORCHBEARER_DDP_ODD_RESUMES", "30"))


def assert_most_fall_back(found):
    print(dict(found))  # for those who run all of them
    assert found["older"] > found.total() / 2


@pytest.mark.parametrize("step", [STEPS - 1, STEPS])  # in the middle of an epoch; before its end
@pytest.mark.timeout(60 + CASES)
def test_in_one_process(tmp_path, step):
    assert_most_fall_back(sweep(tmp_path, step, CASES))


@pytest.mark.timeout(90 + CASES)
def test_on_two_ranks(tmp_path):
    found = run_ranks(sweep, 2, (tmp_path, STEPS - 1, CASES), timeout=60 + CASES)
    assert len({frozenset(each.items()) for each in found}) == 1
    assert_most_fall_back(found[0])
