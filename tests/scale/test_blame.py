"""Of many ranks that wait for one, all name that one; few of them read what all have published."""

import threading
import time

import pytest

from tests.scale.simulated import WORLD_SIZE
from torchbearer_ddp.errors import DesyncError, PeerLost
from torchbearer_ddp.group import board, rendezvous, waiting
from torchbearer_ddp.group.membership import Group, Member
from torchbearer_ddp.group.waiting import Wait

TIMEOUT = 5.0
HOSTS = [f"host{rank}" for rank in range(WORLD_SIZE)]
#: A look of a rank that is no judge: it publishes, and reads the failure, the conclusion, and
#: whether a debugger holds a rank.
REQUESTS_PER_LOOK = 4


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """All ranks share the cores of one machine here, so one may get none for a while."""
    monkeypatch.setattr(waiting, "_STORE_SECONDS", 30.0)


def group_of(rank, store, timeout=TIMEOUT):
    group = Group(Member(rank, WORLD_SIZE, timeout=timeout), store, HOSTS)
    group.past_first_step = True
    return group


def wait_for_ever(activity):
    """Waits as a rank whose exchange is never done."""

    def action(rank, store):
        wait = Wait(group_of(rank, store), activity(rank))
        while True:
            time.sleep(1.0)
            wait.poll()

    return action


def others_than(*ranks):
    return [rank for rank in range(WORLD_SIZE) if rank not in ranks]


@pytest.mark.parametrize("frozen", [0, WORLD_SIZE // 2 + 1])
def test_all_name_the_rank_that_is_frozen(ranks, frozen):
    found = ranks.run(wait_for_ever(lambda _: "the gradients"), others_than(frozen))
    assert {type(error) for error in found} == {PeerLost}
    (message,) = set(map(str, found))
    assert message.startswith(f"Rank {frozen} on host{frozen} did not answer within {TIMEOUT:g} s")
    judges = 0
    for rank in others_than(frozen):
        counts = ranks.stores[rank].counts
        if board.pace(rank, WORLD_SIZE).is_judge:
            judges += 1
            assert counts["multi_get", "several"] >= 1
        else:
            looks = counts["set", f"waiting/{rank}"]
            # It may have left at the farewells of a late look, and reads the conclusion once.
            without = {"farewells"}
            assert ranks.stores[rank].number(without=without) <= REQUESTS_PER_LOOK * looks + 1
            assert counts["multi_get", "several"] == 0
    assert 1 <= judges <= board.JUDGES


def test_all_name_the_rank_that_was_lost(ranks):
    lost = 7

    def action(rank, store):
        wait = Wait(group_of(rank, store, timeout=60.0), "the gradients")
        return wait.connection_error(RuntimeError("Connection reset by peer"))

    found = ranks.run(action, others_than(lost))
    assert {error.rank for error in found} == {lost}
    assert all(str(error).startswith("Lost connection to rank 7 on host7") for error in found)


def test_all_name_the_ranks_that_have_left_after_few_questions(ranks):
    left = [5, WORLD_SIZE - 1]
    for rank in reversed(left):
        farewell = {"rank": rank, "why": "returned from the worker", "sequence": 0}
        rendezvous.depart(ranks.stores[rank], WORLD_SIZE, 0.0, farewell)
    found = ranks.run(wait_for_ever(lambda _: "the gradients"), others_than(*left))
    assert {type(error) for error in found} == {DesyncError}
    (message,) = set(map(str, found))
    assert message.startswith(f"Rank 5, {left[1]} has already returned from the worker while rank ")
    for rank in others_than(*left):
        looks = ranks.stores[rank].counts["set", f"waiting/{rank}"]
        # A judge asks for farewells too, and records what it concludes.
        assert ranks.stores[rank].number() <= (REQUESTS_PER_LOOK + 4) * looks + 1


def test_all_name_the_rank_that_is_out_of_step(ranks):
    odd = 3
    found = ranks.run(wait_for_ever(lambda rank: "a barrier" if rank == odd else "the gradients"))
    assert {type(error) for error in found} == {DesyncError}
    (message,) = set(map(str, found))
    assert f"rank {odd} waits for a barrier" in message
    assert len(message) < 500


def test_if_every_judge_is_frozen_the_others_find_out_themselves(ranks):
    judges = [rank for rank in range(WORLD_SIZE) if board.pace(rank, WORLD_SIZE).is_judge]
    found = ranks.run(wait_for_ever(lambda _: "the gradients"), others_than(*judges))
    (message,) = set(map(str, found))
    assert message.startswith(f"Rank 0 on host0, {judges[1]} on host{judges[1]}, ")


class Slow:
    """A store that takes its time for each request."""

    def __init__(self, store, seconds):
        self._store, self._seconds = store, seconds

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def late(*arguments):
            threading.Event().wait(self._seconds)
            return method(*arguments)

        return late


def test_a_store_that_is_slow_is_not_a_frozen_rank(ranks, monkeypatch):
    monkeypatch.setattr(waiting, "_STORE_SECONDS", 2.0)
    # All requests of one look take longer than the store may take for one.
    slow = Slow(ranks.stores[1], 0.7)
    wait = Wait(Group(Member(1, 2, timeout=0.5), slow, HOSTS[:2]), "a barrier")
    wait._group.past_first_step = True
    time.sleep(0.6)
    with pytest.raises(PeerLost, match=r"^Rank 0 on host0 did not answer within 0\.5 s while the"):
        wait.poll()
