"""Each rank draws its own numbers while a run trains, and all draw the same ones between runs."""

import random

import numpy
import pytest
import torch

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
