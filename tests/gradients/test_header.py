"""The header: every rank reads what every rank wrote."""

import pytest
import torch

from torchbearer_ddp.gradients.header import Header, RankReport


def exchanged(reports, used, dtype=torch.float32):
    """What each rank reads after the ranks' headers were summed."""
    world, parameters = len(reports), len(used[0])
    places = [torch.full((Header.size(world, parameters),), 7.0, dtype=dtype) for _ in reports]
    headers = [Header(place, rank, world) for rank, place in enumerate(places)]
    for header, report, marks in zip(headers, reports, used, strict=True):
        header.write(report, None if all(marks) else marks)
    total = sum(places)
    for place in places:
        place.copy_(total)
    return [header.read(None) for header in headers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rank_reads_what_every_rank_wrote(dtype):
    reports = [
        RankReport(5, 32, seconds=0.5, loss=1.0, wishes=2**19 + 1, batch=7, groups=1, frozen=3),
        RankReport(
            *(5, 8.5, True, 15, 1.5, 3.0, True, 4),
            **{"batch": 8, "site": 2, "groups": 2**19, "mixed": 2, "failed": True, "regroup": True},
        ),
    ]
    for summary in exchanged(reports, [[True, True, False], [True, False, False]], dtype):
        assert list(summary.steps) == [5, 5]
        assert list(summary.weights) == [32, 8.5]
        assert list(summary.batches) == [7, 8]
        assert list(summary.sites) == [0, 2]
        assert list(summary.frozen) == [3, 0]
        assert summary.failed == [1]
        assert summary.regroup
        assert (summary.groups, summary.mixed) == (2**19 + 1, 2)
        assert summary.stop
        assert summary.signal == 15
        assert summary.slowest == 1.5
        assert list(summary.losses) == [1.0, 3.0]
        assert summary.again
        assert summary.wishes == 2**19 + 5
        assert summary.used == [True, True, False]
        assert "backward pass of rank 1 failed" in summary.problem(5)


def test_ranks_out_of_step_all_see_it_even_where_the_mean_fits():
    summaries = exchanged([RankReport(1), RankReport(2), RankReport(3)], [[True]] * 3)
    assert [
        summary.problem(step) is None for summary, step in zip(summaries, (1, 2, 3), strict=True)
    ] == [False] * 3
    assert list(summaries[0].steps) == [1, 2, 3]


def test_a_step_number_stays_exact_for_ever():
    for step in (2**22 - 1, 2**22, 2**30 + 3):
        assert all(
            summary.problem(step) is None
            for summary in exchanged([RankReport(step)] * 2, [[True]] * 2)
        )
        apart = exchanged([RankReport(step), RankReport(step + 1)], [[True]] * 2)
        assert apart[0].problem(step) is not None
