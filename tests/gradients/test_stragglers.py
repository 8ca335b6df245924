"""A rank that is slower for long is named once, and one that is slow now and then is not."""

import pytest

from torchbearer_ddp.gradients import stragglers
from torchbearer_ddp.gradients.stragglers import Stragglers

HOSTS = ["node1", "node1", "node2", "node2"]


def lines(times_at, steps=400, hosts=HOSTS):
    watch = Stragglers(hosts)
    found = [
        (step, watch.add(times_at(step), lambda step=step: step)) for step in range(1, steps + 1)
    ]
    return [(step, line) for step, line in found if line]


def test_a_slow_rank_is_named_once_since_the_step_where_it_became_slow():
    def times(step):
        return [0.01, 0.011, 0.01, 0.018 if step > 200 else 0.01]

    [(step, line)] = lines(times)
    assert step == 260
    assert line.startswith("rank 3 on node2 takes 1.8 times as long as the others since step 201 (")
    assert "18 ms against 10 ms" in line


@pytest.mark.parametrize(
    "times",
    [
        lambda step: [0.01, 0.01, 0.01, 0.012],  # hardly slower
        lambda step: [0.0001, 0.0001, 0.0001, 0.0009],  # too short to matter
        lambda step: [0.02 if step // 20 % 4 == rank else 0.01 for rank in range(4)],  # in turn
        lambda step: [0.01, 0.01, 0.01, 0.5 if step in (30, 230) else 0.01],  # now and then
        lambda step: [0.0] * 4,
    ],
)
def test_others_are_not_named(times):
    assert lines(times) == []


def test_two_ranks_and_one_that_does_nothing():
    [(_, line)] = lines(lambda step: [0.02, 0.01], hosts=["a", "b"])
    assert line.startswith("rank 0 on a takes 2.0 times as long as the others since step 1 (")
    [(_, line)] = lines(lambda step: [0.0, 0.01], hosts=["a", "b"])
    assert line.startswith("rank 1 on b takes much longer than the others since step 1 (")


def test_it_is_said_again_only_after_some_minutes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: clock[0])

    def times(step):
        clock[0] = float(step)
        return [0.01, 0.02]

    assert [step for step, _ in lines(times, 1000, ["a", "b"])] == [60, 360, 660, 960]
