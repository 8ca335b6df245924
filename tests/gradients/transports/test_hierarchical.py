"""Shared memory inside each host and gloo between them; the hosts are played by one machine."""

import os
import signal

import pytest
import torch

from tests.gradients.transports.test_shared_memory import (
    CPU,
    DTYPES,
    SIZES,
    add_up,
    alike,
    make,
    numbers,
    waiting,
)
from tests.ranks import ranks, run_ranks
from torchbearer_ddp.errors import DesyncError, DistributedError, PeerLost
from torchbearer_ddp.gradients.transports import hosts, segment
from torchbearer_ddp.gradients.transports.choose import choose
from torchbearer_ddp.group import collectives, membership


def play_hosts(layout):
    """Lets each rank run on the host that the layout has for it, such as 'abab'."""
    os.environ[hosts.HOST_ID_VARIABLE] = layout[collectives.rank()]


@pytest.mark.parametrize("layout", ["aabb", "abba", "aabbcc"])
def test_sums_of_every_dtype_and_size(layout):
    world_size = len(layout)

    def body():
        play_hosts(layout)
        transport, line = make("auto")
        assert transport.name == "hierarchical"
        assert line == (
            "gradients travel through shared memory inside each host and gloo between hosts: "
            f"each of the {len(set(layout))} hosts has 2 ranks"
        )
        for dtype in DTYPES:
            for numel in SIZES:
                bucket = transport.allocate(numel, dtype, CPU)
                bucket.copy_(numbers(numel, dtype, collectives.rank()))
                add_up(transport, bucket)
                expected = sum(numbers(numel, dtype, r) for r in range(world_size))
                assert torch.equal(bucket, expected), (dtype, numel)

    run_ranks(body, world_size)


@ranks(4)
def test_several_buckets_in_flight_have_the_same_bits_everywhere():
    play_hosts("aabb")
    transport, _ = make("hierarchical")
    sizes = [5, 40000, 70001, 3]
    buckets = [transport.allocate(n, torch.float32, CPU, header=2) for n in sizes]
    generator = torch.Generator().manual_seed(collectives.rank())
    for step in range(50):
        waits = [waiting(f"bucket {i}") for i in range(len(buckets))]
        for bucket in buckets:
            bucket.normal_(generator=generator)
            bucket[-2:] = step
            transport.start(bucket, 0.25)
        for bucket, wait in zip(buckets, waits, strict=True):
            transport.finish(bucket, wait)
            assert bucket[-2:].tolist() == [4.0 * step] * 2
    assert all(alike(bucket) for bucket in buckets)
    buckets[1].fill_(collectives.rank())  # after the sum it belongs to this rank alone
    collectives.barrier()
    assert torch.equal(buckets[1], torch.full((40000,), float(collectives.rank())))


@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_half_precision_between_hosts_with_an_exact_header(compress):
    def body():
        play_hosts("aabb")
        transport, _ = choose(membership.current(), "auto", CPU, 0, compress)
        sizes = [3, 5, 1000, 70001]
        buckets = [transport.allocate(n, torch.float32, CPU, header=3) for n in sizes]
        for step in range(30):
            waits = [waiting(f"bucket {i}") for i in range(len(buckets))]
            for bucket in buckets:
                bucket.fill_(1.001 + collectives.rank())
                bucket[-3:] = 40001.0 + step
                transport.start(bucket, 0.25)
            for bucket, wait in zip(buckets, waits, strict=True):
                transport.finish(bucket, wait)
                assert bucket[-3:].tolist() == [4 * (40001.0 + step)] * 3
                assert torch.allclose(bucket[:-3], torch.tensor(2.501), rtol=2**-7)
        assert all(alike(bucket) for bucket in buckets)
        assert buckets[2][0] != 2.501  # it was rounded on its way

    run_ranks(body, 4)


def test_a_killed_peer_is_named_on_both_hosts(tmp_path):
    def body():
        play_hosts("aabb")
        transport, _ = make("hierarchical")
        bucket = transport.allocate(1000, torch.float32, CPU)
        add_up(transport, bucket)
        membership.current().warm = True
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="Lost connection to rank 1 "):
            add_up(transport, bucket)
        (tmp_path / str(collectives.rank())).touch()

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3"]


@pytest.mark.parametrize("moment", ["a sum", "the channels between hosts"])
def test_a_frozen_peer_is_named_on_both_hosts(moment, tmp_path):
    def freeze(*_):
        os.kill(os.getpid(), signal.SIGSTOP)

    def add_after_freezing():
        transport, _ = make("hierarchical")
        bucket = transport.allocate(1000, torch.float32, CPU)
        add_up(transport, bucket)
        if collectives.rank() == 3:
            freeze()
        add_up(transport, bucket)

    def body():
        play_hosts("aabb")
        group = membership.current()
        group.past_first_step = True
        pids = collectives.all_gather(os.getpid(), "process ids")
        if collectives.rank() == 3 and moment != "a sum":
            group.channel_between = freeze
        with pytest.raises(PeerLost, match=r"^Rank 3 on .* did not answer within 4 s"):
            add_after_freezing()
        (tmp_path / str(collectives.rank())).touch()
        if collectives.rank() == 0:
            os.kill(pids[3], signal.SIGKILL)

    with pytest.raises(AssertionError, match="rank 3 failed:\nthe process ended without a word"):
        run_ranks(body, 4, group_timeout=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@ranks(4)
def test_ranks_that_part_ways_raise_the_same():
    play_hosts("aabb")
    transport, _ = make("hierarchical")
    bucket = transport.allocate(10, torch.float32, CPU)
    with pytest.raises(DesyncError, match="rank 2: apples"):
        if collectives.rank() == 2:
            collectives.all_gather(1, "apples")
        else:
            add_up(transport, bucket)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("aab", "the hosts differ in their number of ranks: 2, 1"),
        ("ab", "each of the 2 hosts has one rank"),
    ],
)
def test_other_layouts_travel_through_gloo(layout, reason):
    def body():
        play_hosts(layout)
        transport, line = make("auto")
        assert (transport.name, line) == ("gloo", f"gradients travel through gloo: {reason}")
        for requested in ("hierarchical", "shm"):
            with pytest.raises(DistributedError, match=f"{requested}' is not possible: {reason}"):
                make(requested)

    run_ranks(body, len(layout))


@ranks(4)
def test_one_host_without_memory_takes_all_to_gloo(tmp_path):
    play_hosts("aabb")
    if collectives.rank() == 2:
        os.environ[segment.DIRECTORY_VARIABLE] = str(tmp_path / "nowhere")
    transport, line = make("auto")
    assert transport.name == "gloo"
    assert "not hierarchical, since rank 2 cannot make shared memory" in line
