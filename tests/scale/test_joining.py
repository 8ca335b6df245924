"""Many ranks join with a few requests each, and all are told the same if some do not come."""

import json
import time
import zlib

from tests.scale.simulated import SECONDS, WORLD_SIZE
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import board
from torchbearer_ddp.group.membership import Member
from torchbearer_ddp.group.roll_call import roll_call

#: Of each rank: it claims its rank, registers, arrives, reads who has arrived before and at the
#: end, and reads the outcome. The last one reads all registrations too.
REQUESTS = 7


def join(timeout=SECONDS, world_size=WORLD_SIZE):
    def action(rank, store):
        member = Member(rank, world_size(rank) if callable(world_size) else world_size,
                        local_rank=-1, timeout=timeout)  # fmt: skip
        member, roll = roll_call(store, member, time.monotonic() + timeout, serves=False)
        # A thousand copies of a thousand entries would not fit into memory.
        return member, [entry["rank"] for entry in roll], zlib.crc32(json.dumps(roll).encode())

    return action


def test_every_rank_knows_all_others_after_a_few_requests(ranks):
    found = ranks.run(join())
    assert [member.rank for member, _, _ in found] == list(range(WORLD_SIZE))
    assert [member.local_rank for member, _, _ in found] == list(range(WORLD_SIZE))
    assert all(ranks == list(range(WORLD_SIZE)) for _, ranks, _ in found)
    assert len({roll for _, _, roll in found}) == 1
    for store in ranks.stores:
        assert store.number(without={"roll"}) <= REQUESTS
        assert store.counts["compare_set", "roll"] == 1
    readers = sum(store.counts["multi_get", "several"] for store in ranks.stores)
    assert 1 <= readers <= board.JUDGES


def test_all_ranks_name_the_same_missing_ones(ranks):
    late = {0, 5, WORLD_SIZE - 1}
    found = ranks.run(join(timeout=5.0), [r for r in range(WORLD_SIZE) if r not in late])
    assert {type(error) for error in found} == {LaunchError}
    (message,) = set(map(str, found))
    assert f"Only {WORLD_SIZE - 3} of {WORLD_SIZE} ranks arrived within 5 s" in message
    assert f"missing: 0, 5, {WORLD_SIZE - 1}." in message


def test_a_world_size_that_differs_is_refused_by_all_before_the_deadline(ranks):
    # Rank zero is not there to judge.
    started = time.monotonic()
    wrong = WORLD_SIZE // 2
    found = ranks.run(
        join(world_size=lambda rank: WORLD_SIZE + (rank == wrong)), range(1, WORLD_SIZE)
    )
    (message,) = set(map(str, found))
    assert "The world size differs" in message
    assert str(WORLD_SIZE + 1) in message
    assert time.monotonic() - started < SECONDS / 2


def test_a_process_that_comes_later_with_a_rank_of_another_is_refused(ranks):
    ranks.run(join())
    for world_size in (WORLD_SIZE, WORLD_SIZE + 1):
        (error,) = ranks.run(join(world_size=world_size), [3])
        assert isinstance(error, LaunchError)
        assert "Two processes have rank 3" in str(error)
