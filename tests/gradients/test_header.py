"""The header: every rank reads what every rank wrote."""

import pytest
import torch

from torchbearer_ddp.gradients.header import Header, RankReport, in_step


def exchanged(notes, used, dtype=torch.float32):
    """What each rank reads after the ranks' headers were summed."""
    world, parameters = len(notes), len(used[0])
    places = [torch.full((Header.size(world, parameters),), 7.0, dtype=dtype) for _ in notes]
    headers = [Header(place, rank, world) for rank, place in enumerate(places)]
    for header, note, marks in zip(headers, notes, used, strict=True):
        header.write(note, None if all(marks) else marks)
    total = sum(places)
    for place in places:
        place.copy_(total)
    return [header.read() for header in headers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rank_reads_what_every_rank_wrote(dtype):
    notes = [
        RankReport(5, 32, stop=False, signal=0, seconds=0.5, loss=1.0, wishes=2**19 + 1),
        RankReport(5, 8, stop=True, signal=15, seconds=1.5, loss=3.0, again=True, wishes=4),
    ]
    for answer in exchanged(notes, [[True, True, False], [True, False, False]], dtype):
        assert answer.steps == [5, 5]
        assert answer.samples == 40
        assert answer.stop
        assert answer.signal == 15
        assert answer.slowest == 1.5
        assert answer.loss == 2.0
        assert answer.again
        assert answer.wishes == 2**19 + 5
        assert answer.used.tolist() == [True, True, False]
        assert in_step(answer, 5)


def test_ranks_out_of_step_all_see_it_even_where_the_mean_fits():
    answers = exchanged([RankReport(1), RankReport(2), RankReport(3)], [[True]] * 3)
    assert [in_step(answer, step) for answer, step in zip(answers, (1, 2, 3), strict=True)] == [
        False
    ] * 3
    assert answers[0].steps == [1, 2, 3]


def test_a_step_number_stays_exact_for_ever():
    for step in (2**22 - 1, 2**22, 2**30 + 3):
        assert all(
            in_step(answer, step) for answer in exchanged([RankReport(step)] * 2, [[True]] * 2)
        )
        assert not in_step(
            exchanged([RankReport(step), RankReport(step + 1)], [[True]] * 2)[0], step
        )
