"""Sums in shared memory: right, alike on every rank, and never a hang."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import ranks, run_ranks
from torchbearer_ddp.errors import DesyncError, DistributedError, PeerLost
from torchbearer_ddp.gradients.transports import hosts, segment, shared_memory
from torchbearer_ddp.gradients.transports.choose import choose
from torchbearer_ddp.group import collectives, membership
from torchbearer_ddp.group.waiting import Wait

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
CHUNK = shared_memory.CACHE_BYTES // 4
SIZES = [0, 1, 2, 3, 17, 1009, 16384, 100003, CHUNK + 1]


def make(requested="shm", nbytes=0):
    return choose(membership.current(), requested, CPU, nbytes)


def numbers(numel, dtype, rank, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def waiting(what="the gradients"):
    return Wait(membership.current(), what)


def add_up(transport, bucket, weight=1.0):
    wait = waiting()
    transport.start(bucket, weight)
    transport.finish(bucket, wait)


def alike(tensor):
    """True if every rank has the same bits."""
    mine = tensor.contiguous().view(torch.uint8).sum(dtype=torch.int64).item()
    everyone = collectives.all_gather((mine, tensor), "the bits")
    return all(m == mine and torch.equal(t, tensor) for m, t in everyone)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_of_every_dtype_and_size(world_size):
    def body():
        transport, line = make()
        assert (
            line
            == f"gradients travel through shared memory: all {world_size} ranks run on one host"
        )
        for dtype in DTYPES:
            for numel in SIZES:
                bucket = transport.allocate(numel, dtype, CPU)
                assert torch.equal(bucket, torch.zeros(numel, dtype=dtype))
                for seed in range(2):
                    bucket.copy_(numbers(numel, dtype, collectives.rank(), seed))
                    add_up(transport, bucket)
                    expected = sum(numbers(numel, dtype, r, seed) for r in range(world_size))
                    assert torch.equal(bucket, expected), (dtype, numel)

    run_ranks(body, world_size)


@pytest.mark.parametrize("numel", [10, 50000])
def test_each_rank_has_its_own_weight_and_the_header_has_none(numel):
    def body():
        transport, _ = make()
        bucket = transport.allocate(numel, torch.float32, CPU, header=3)
        for step in range(3):
            bucket.copy_(torch.arange(numel) + collectives.rank() + step)
            add_up(transport, bucket, weight=(0.25, 0.5, 4.0)[collectives.rank()])
            base = torch.arange(numel) + float(step)
            body, header = bucket[:-3], bucket[-3:]
            assert torch.allclose(body, 4.75 * base[:-3] + 0.5 + 8.0)
            assert torch.equal(header, 3 * base[-3:] + 3)

    run_ranks(body, 3)


@ranks(3)
def test_a_bucket_belongs_to_its_rank_after_the_sum():
    transport, _ = make()
    for numel in (100, 100000):
        bucket = transport.allocate(numel, torch.float32, CPU)
        bucket.fill_(1.0)
        add_up(transport, bucket)
        bucket.mul_(collectives.rank())
        collectives.barrier()
        assert torch.equal(bucket, torch.full((numel,), 3.0 * collectives.rank()))
        collectives.barrier()


@ranks(3)
def test_many_rounds_of_several_buckets_in_flight_give_the_same_bits_everywhere():
    transport, _ = make()
    sizes = [5, 40000, 70001, 3, 17000]
    buckets = [transport.allocate(n, torch.float32, CPU) for n in sizes]
    generator = torch.Generator().manual_seed(collectives.rank())
    sums = [torch.zeros(n) for n in sizes]
    for _ in range(200):
        waits = [waiting(f"bucket {i}") for i in range(len(buckets))]
        for bucket in buckets:
            bucket.normal_(generator=generator)
            transport.start(bucket, 1 / 3)
        for bucket, wait, total in zip(buckets, waits, sums, strict=True):
            transport.finish(bucket, wait)
            total.mul_(0.9).add_(bucket)
    assert all(alike(total) for total in sums)


def _sum_of_noise(numel, rounds):
    transport, _ = make()
    bucket = transport.allocate(numel, torch.float32, CPU)
    generator = torch.Generator().manual_seed(collectives.rank())
    total = torch.zeros(numel)
    for _ in range(rounds):
        bucket.normal_(generator=generator)
        add_up(transport, bucket, 0.3)
        total.mul_(0.9).add_(bucket)
    return total


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_thousand_rounds_are_alike_on_every_rank_and_in_every_run(world_size):
    first = run_ranks(_sum_of_noise, world_size, (20011, 1000))
    second = run_ranks(_sum_of_noise, world_size, (20011, 1000))
    for each in (*first, *second):
        assert torch.equal(each, first[0])


# What goes wrong.


@pytest.mark.parametrize("numel", [10, 100000])
def test_a_killed_peer_is_named_within_seconds(numel, tmp_path):
    def body():
        transport, _ = make()
        bucket = transport.allocate(numel, torch.float32, CPU)
        add_up(transport, bucket)
        membership.current().warm = True
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(
            PeerLost, match=r"Lost connection to rank 1 .*process \d+, has ended"
        ) as caught:
            add_up(transport, bucket)
        assert caught.value.rank == 1
        (tmp_path / str(collectives.rank())).write_text(str(time.monotonic() - started))

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 3)
    for rank in (0, 2):
        assert float((tmp_path / str(rank)).read_text()) < 5


@pytest.mark.parametrize("numel", [10, 100000])
def test_a_frozen_peer_is_named_at_the_timeout(numel, tmp_path):
    def body():
        transport, _ = make()
        bucket = transport.allocate(numel, torch.float32, CPU)
        add_up(transport, bucket)
        membership.current().warm = True
        pids = collectives.all_gather(os.getpid(), "process ids")
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"Rank 1 on .* did not answer within 4 s"):
            add_up(transport, bucket)
        (tmp_path / str(collectives.rank())).touch()
        if collectives.rank() == 0:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 3, group_timeout=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


@ranks(2)
def test_ranks_that_part_ways_raise_the_same():
    transport, _ = make()
    bucket = transport.allocate(10, torch.float32, CPU)
    with pytest.raises(DesyncError, match="rank 0: the gradients; rank 1: apples"):
        if collectives.rank() == 0:
            add_up(transport, bucket)
        else:
            collectives.all_gather(1, "apples")


@pytest.mark.parametrize("numel", [10, 100000])
def test_ranks_that_start_different_buckets_raise(numel):
    def body():
        transport, _ = make()
        buckets = [transport.allocate(numel, torch.float32, CPU) for _ in range(2)]
        add_up(transport, buckets[0])
        with pytest.raises(DesyncError, match="is at a different exchange than rank"):
            add_up(transport, buckets[collectives.rank()])

    run_ranks(body, 2)


@ranks(2)
def test_ranks_that_ask_for_different_buckets_raise():
    transport, _ = make()
    with pytest.raises(DesyncError, match=r"elements.*10 on rank 0; 11 on rank 1"):
        transport.allocate(10 + collectives.rank(), torch.float32, CPU)


def test_a_process_is_not_taken_for_another_with_its_id():
    started = hosts.start_time(os.getpid())
    mine = hosts.Process(rank=0, host="a", pid=os.getpid(), started=started, machine="b")
    assert mine.alive()
    assert not hosts.Process(0, "a", os.getpid(), started + 1, "b").alive()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, and its parent has not asked
    assert hosts.start_time(child) is None
    os.waitpid(child, 0)
    assert hosts.start_time(child) is None


# Where shared memory is not possible.


def falls_back(reason):
    transport, line = make("auto", nbytes=2**20)
    assert transport.name == "gloo"
    assert re.match(f"gradients travel through gloo: not shm, since rank {reason}", line), line
    bucket = transport.allocate(5, torch.float32, CPU, header=1)
    bucket.fill_(2.0)
    add_up(transport, bucket, weight=0.5)
    assert bucket.tolist() == [2.0] * 4 + [4.0]
    with pytest.raises(DistributedError, match=r"transport='shm' is not possible: rank .*'auto'"):
        make("shm", nbytes=2**20)


@ranks(2)
def test_a_directory_that_is_not_there_falls_back(tmp_path):
    os.environ[segment.DIRECTORY_VARIABLE] = str(tmp_path / "nowhere")
    falls_back("0 cannot make shared memory: .Errno 2. No such file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small tmpfs")
@ranks(2)
def test_too_little_room_falls_back(tmp_path):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec, ms_private = 0x20000, 0x4000, 0x40000
    assert libc.unshare(clone_newns) == 0, os.strerror(ctypes.get_errno())
    libc.mount(b"none", b"/", None, ms_rec | ms_private, None)
    where = str(tmp_path).encode()
    assert libc.mount(b"tmpfs", where, b"tmpfs", 0, b"size=1m") == 0
    os.environ[segment.DIRECTORY_VARIABLE] = str(tmp_path)
    transport, _ = make("shm")
    assert transport.name == "shm"
    with pytest.raises(segment.SegmentError, match="No space left on device"):
        transport.allocate(2**20, torch.float32, CPU)
    del transport
    falls_back("[01] cannot share memory with rank 0: .Errno 28. No space left")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@ranks(2)
def test_another_users_rank_falls_back():
    if collectives.rank() == 1:
        os.setresuid(65534, 65534, 65534)
    falls_back("1 cannot share memory with rank 0: .Errno 13. Permission denied")


@ranks(2)
def test_a_transport_that_does_not_exist_or_fit_is_an_error_on_every_rank():
    with pytest.raises(
        ValueError, match="'smoke signals', which does not exist: it is one of 'auto'"
    ):
        make("smoke signals")
    with pytest.raises(DistributedError, match="'nccl' is not possible"):
        make("nccl")
    with pytest.raises(
        DistributedError, match="'hierarchical' is not possible: all 2 ranks run on one"
    ):
        make("hierarchical")
    with pytest.raises(DesyncError, match=r"transport.*gloo on rank 0; auto on rank 1"):
        make("gloo" if collectives.rank() == 0 else "auto")
    transport, line = make("gloo")
    assert (transport.name, line) == ("gloo", "gradients travel through gloo: as requested")


@ranks(2)
def test_memory_has_no_name_and_goes_with_its_last_user():
    before = set(Path("/dev/shm").iterdir())
    transport, _ = make()
    bucket = transport.allocate(2**20, torch.float32, CPU)
    assert set(Path("/dev/shm").iterdir()) <= before
    transport.close()
    bucket.fill_(1.0)  # a bucket outlives its transport
    del transport, bucket
    assert "torchbearer_ddp" not in Path("/proc/self/maps").read_text()
