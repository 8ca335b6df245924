"""Each rank draws its own numbers while a run trains, and all draw the same ones between runs."""

import random

import numpy
import pytest
import torch

from tests.stand_ins import cuda_devices
from torchbearer_ddp.data import randomness


def draw():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def ranks_draw(seed, runs, world_size=3):
    """What each rank draws in a run and after it."""
    during, after = [], []
    for rank in range(world_size):
        randomness.seed_all(seed)
        before = draw()
        randomness.enter_run(seed, runs, rank)
        during.append(draw())
        torch.rand(rank)  # ranks may draw different amounts
        randomness.leave_run(seed, runs)
        after.append((before, draw()))
    return during, after


@pytest.mark.parametrize("seed", [0, 3, 2**64 - 1])
def test_own_streams_in_a_run_and_a_common_one_around_it(seed):
    seen = set()
    for runs in range(3):
        during, after = ranks_draw(seed, runs)
        assert len(set(during)) == 3
        assert len(set(after)) == 1
        seen |= {each[2] for each in during[1:]} | {after[0][1][2]}
    assert len(seen) == 9, "every run and every pause has numbers of its own"


def test_rank_zero_draws_as_one_process_would():
    randomness.seed_all(5)
    alone = [draw(), draw()]
    randomness.seed_all(5)
    found = [draw()]
    randomness.enter_run(5, 0, 0)
    assert [*found, draw()] == alone


@pytest.mark.parametrize(
    "drawing", [random.random, numpy.random.rand, lambda: torch.rand(1), lambda: None]
)
def test_drawing_is_noticed(drawing):
    before = randomness.rng_state()
    drawn = drawing() is not None
    assert randomness.equal_states(before, randomness.rng_state()) is not drawn


# The generators of GPUs: the rank's own, wherever it is among those that can be seen.


def saved_with(*uuids, own):
    with cuda_devices.visible(*uuids) as gpus:
        torch.cuda.set_device(own)
        gpus.states = [
            torch.full((16,), 100 + index, dtype=torch.uint8) for index in range(len(uuids))
        ]
        return randomness.rng_state()


def first_numbers(gpus):
    return [int(state[0]) for state in gpus.states]


@pytest.mark.parametrize(
    ("saved", "own_then", "now", "own_now", "expected"),
    [
        ("abcd", 2, "c", 0, [102]),
        ("c", 0, "abcd", 2, [0, 1, 100, 3]),
        ("abcd", 1, "ab", 1, [102, 101]),  # of the others as many as there are, from the own one on
        ("ab", 0, "ab", 0, [100, 101]),
        ("abcd", 3, "", 0, []),
        ("", 0, "ab", 1, [0, 1]),
    ],
)
def test_the_generator_of_the_own_gpu_is_restored(saved, own_then, now, own_now, expected):
    state = saved_with(*saved, own=own_then) if saved else randomness.rng_state()
    with cuda_devices.visible(*now) as gpus:
        if now:
            torch.cuda.set_device(own_now)
        randomness.set_rng_state(state)
        assert first_numbers(gpus) == expected


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [("abc", "abc", [100, 101, 102]), ("abc", "c", [100]), ("a", "abc", [100, 1, 2])],
)
def test_a_file_that_has_the_generators_of_all_gpus_can_be_read(then, now, expected):
    state = randomness.rng_state()
    state["cuda"] = [torch.full((16,), 100 + i, dtype=torch.uint8) for i in range(len(then))]
    with cuda_devices.visible(*now) as gpus:
        randomness.set_rng_state(state)
        assert first_numbers(gpus) == expected


def test_a_draw_on_a_gpu_is_seen():
    with cuda_devices.visible("a", "b") as gpus:
        before = randomness.rng_state()
        assert randomness.equal_states(before, randomness.rng_state())
        gpus.states[1] += 1
        assert not randomness.equal_states(before, randomness.rng_state())
