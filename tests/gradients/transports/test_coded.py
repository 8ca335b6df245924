"""Sums in fewer bytes: equal on every rank, an exact header, and all of it during backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.gradients.transport_cases import (
    add_up,
    bucket,
    is_equal_everywhere,
    make,
    play_hosts,
    waiting,
)
from tests.ranks import RankPool
from torchbearer_ddp.group import collectives

KINDS = ["bf16", "fp16", "int8"]
SIZES = [4, 300, 1000, 70_000]
HEADER = 3


@pytest.fixture(scope="module", params=["ab", "abc", "abcabc"])
def hosts(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks on two and three hosts, one or two on each."""
    layout = request.param
    with RankPool(len(layout), lambda: play_hosts(layout)) as pool:
        yield pool


def fill(tensor, rank):
    generator = torch.Generator().manual_seed(rank)
    tensor.copy_(torch.randn(tensor.numel(), generator=generator))
    tensor[-HEADER:] = torch.arange(HEADER) + 2**20 + rank


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_near_and_equal_and_the_header_is_exact(hosts, kind):
    def body():
        rank, world = collectives.rank(), collectives.world_size()
        transport, _ = make("auto", [bucket(n + HEADER, header=HEADER) for n in SIZES], kind)
        for _ in range(3):
            for tensor in transport.tensors:
                fill(tensor, rank)
            wait = waiting()
            for index in range(len(SIZES)):
                transport.start(index, 1.0)
            for index in range(len(SIZES)):
                transport.finish(index, wait)
            for tensor in transport.tensors:
                expected = torch.zeros_like(tensor)
                for other in range(world):
                    one = torch.empty_like(tensor)
                    fill(one, other)
                    expected += one
                assert torch.equal(tensor[-HEADER:], expected[-HEADER:])
                off = float((tensor - expected)[:-HEADER].abs().max())
                assert off < 0.02 * float(expected[:-HEADER].abs().max()) * world
                assert is_equal_everywhere(tensor)

    hosts.run(body)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_runs_before_anybody_waits(kind):
    """The sums of slices, too, are sent by the channel's threads: backward goes on meanwhile."""

    def body():
        transport, _ = make("auto", [bucket(5000 + HEADER, header=HEADER)], kind)
        add_up(transport)  # connected
        fill(transport.tensors[0], collectives.rank())
        transport.start(0)
        done = threading.Event()
        transport._sums[0][0]._future.add_done_callback(lambda _: done.set())
        assert done.wait(20), "the sum waits for somebody who waits for it"
        transport.finish(0, waiting())

    with RankPool(3, lambda: play_hosts("abc")) as pool:
        pool.run(body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_reaches_every_rank(hosts, kind):
    def body():
        transport, _ = make("auto", [bucket(5000 + HEADER, header=HEADER)], kind)
        fill(transport.tensors[0], collectives.rank())
        if collectives.rank() == 1:
            transport.tensors[0][4321] = float("inf")
        add_up(transport)
        assert not transport.tensors[0][4321].isfinite()
        assert transport.tensors[0][:100].isfinite().all()
        transport.commit()
        fill(transport.tensors[0], collectives.rank())
        add_up(transport)
        assert transport.tensors[0].isfinite().all()  # the residual has not kept it

    hosts.run(body)
