"""Ranks that several tests share: reused after success, replaced after a failure."""

import os

import pytest

from tests import proc
from tests.ranks import RankPool
from torchbearer_ddp.group import collectives, membership


def process_ids():
    return collectives.all_gather(os.getpid(), "process ids")


def fail_on_rank_one():
    if collectives.rank() == 1:
        raise ValueError("no luck")
    collectives.barrier()


def leave_the_group_broken():
    membership.current().broken = True


def end_at_once():
    os._exit(3)


def test_the_same_ranks_run_one_function_after_another():
    with RankPool(2) as pool:
        first, second = pool.run(process_ids), pool.run(process_ids)
    assert first == second
    assert first[0] == first[1]
    assert not any(proc.is_running(pid) for pid in first[0])


@pytest.mark.parametrize("body", [fail_on_rank_one, end_at_once])
def test_a_failure_gives_the_next_function_new_ranks(body):
    expected = "no luck" if body is fail_on_rank_one else "ended without"
    with RankPool(2) as pool:
        before = pool.run(process_ids)[0]
        with pytest.raises(AssertionError, match=expected):
            pool.run(body)
        after = pool.run(process_ids)[0]
    assert not set(before) & set(after)


def test_a_broken_group_gives_the_next_function_new_ranks():
    with RankPool(2) as pool:
        before = pool.run(process_ids)[0]
        pool.run(leave_the_group_broken)
        assert not set(before) & set(pool.run(process_ids)[0])
