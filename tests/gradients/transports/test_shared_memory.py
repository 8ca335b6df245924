"""Sums in shared memory: right, alike on every rank, and never a hang."""

import os
import re
import signal
import time

import pytest
import torch

from tests import proc
from tests.gradients.transport_cases import (
    DTYPES,
    SIZES,
    add_up,
    bucket,
    is_equal_everywhere,
    make,
    numbers,
    waiting,
)
from tests.ranks import ranks, run_ranks
from torchbearer_ddp.errors import DesyncError, DistributedError, PeerLost
from torchbearer_ddp.gradients.transports import shared_memory
from torchbearer_ddp.group import collectives, membership, segment


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_of_every_dtype_and_size(world_size):
    def body():
        cases = [(numel, dtype) for dtype in DTYPES for numel in SIZES]
        transport, line = make("auto", [bucket(*case) for case in cases])
        assert line == f"gradients: shared memory ({world_size} ranks on one host)"
        for index, ((numel, dtype), tensor) in enumerate(
            zip(cases, transport.tensors, strict=True)
        ):
            assert torch.equal(tensor, torch.zeros(numel, dtype=dtype))
            for seed in range(2):
                tensor.copy_(numbers(numel, dtype, collectives.rank(), seed))
                add_up(transport, index)
                expected = sum(numbers(numel, dtype, r, seed) for r in range(world_size))
                assert torch.equal(tensor, expected), (dtype, numel)

    run_ranks(body, world_size)


@pytest.mark.parametrize("numel", [10, 50000])
def test_each_rank_has_its_own_weight_and_the_header_has_none(numel):
    def body():
        transport, _ = make("shm", [bucket(numel, header=3)])
        (tensor,) = transport.tensors
        for step in range(3):
            tensor.copy_(torch.arange(numel) + collectives.rank() + step)
            add_up(transport, weight=(0.25, 0.5, 4.0)[collectives.rank()])
            base = torch.arange(numel) + float(step)
            body, header = tensor[:-3], tensor[-3:]
            assert torch.allclose(body, 4.75 * base[:-3] + 0.5 + 8.0)
            assert torch.equal(header, 3 * base[-3:] + 3)

    run_ranks(body, 3)


@pytest.mark.parametrize("threads_each", [1, 2])
def test_more_threads_than_cores_are_not_used_for_a_sum(threads_each):
    """An operation of several threads would wait for one that has no core."""
    numel, most = 300_000, shared_memory.ONE_THREAD_NUMEL

    def body():
        mine = sorted(os.sched_getaffinity(0))
        if len(mine) > 1:  # as a launcher binds ranks: one core for each
            os.sched_setaffinity(0, {mine[collectives.rank()]})
        collectives.barrier()
        torch.set_num_threads(threads_each)
        transport, _ = make("shm", [bucket(numel)])
        (tensor,) = transport.tensors
        (exchange,) = transport._exchanges
        largest = max(piece.whole[0].numel() for piece in exchange._pieces)
        assert (largest <= most) == (len(mine) == 1 or threads_each > 1)
        tensor.copy_(numbers(numel, tensor.dtype, collectives.rank()))
        add_up(transport)
        assert torch.equal(tensor, sum(numbers(numel, tensor.dtype, r) for r in range(2)))

    run_ranks(body, 2)


@ranks(3)
def test_a_bucket_belongs_to_its_rank_after_the_sum():
    transport, _ = make("shm", [bucket(100), bucket(100000)])
    for index, tensor in enumerate(transport.tensors):
        tensor.fill_(1.0)
        add_up(transport, index)
        tensor.mul_(collectives.rank())
        collectives.barrier()
        assert torch.equal(tensor, torch.full_like(tensor, 3.0 * collectives.rank()))
        collectives.barrier()


@ranks(3)
def test_many_rounds_of_several_buckets_in_flight_give_the_same_bits_everywhere():
    sizes = [5, 40000, 70001, 3, 17000]
    transport, _ = make("shm", [bucket(n) for n in sizes])
    generator = torch.Generator().manual_seed(collectives.rank())
    sums = [torch.zeros(n) for n in sizes]
    for _ in range(200):
        waits = [waiting(f"bucket {i}") for i in range(len(sizes))]
        for index, tensor in enumerate(transport.tensors):
            tensor.normal_(generator=generator)
            transport.start(index, 1 / 3)
        for index, (wait, total) in enumerate(zip(waits, sums, strict=True)):
            transport.finish(index, wait)
            total.mul_(0.9).add_(transport.tensors[index])
    assert all(is_equal_everywhere(total) for total in sums)


def _sum_of_noise(numel, rounds):
    transport, _ = make("shm", [bucket(numel)])
    (tensor,) = transport.tensors
    generator = torch.Generator().manual_seed(collectives.rank())
    total = torch.zeros(numel)
    for _ in range(rounds):
        tensor.normal_(generator=generator)
        add_up(transport, weight=0.3)
        total.mul_(0.9).add_(tensor)
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
        transport, _ = make("shm", [bucket(numel)])
        add_up(transport)
        membership.current().past_first_step = True
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(
            PeerLost, match=r"Lost connection to rank 1 .*process \d+, has ended"
        ) as caught:
            add_up(transport)
        assert caught.value.rank == 1
        (tmp_path / str(collectives.rank())).write_text(str(time.monotonic() - started))

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 3)
    for rank in (0, 2):
        assert float((tmp_path / str(rank)).read_text()) < 5


@pytest.mark.parametrize("numel", [10, 100000])
def test_a_frozen_peer_is_named_at_the_timeout(numel, tmp_path):
    def body():
        transport, _ = make("shm", [bucket(numel)])
        add_up(transport)
        membership.current().past_first_step = True
        pids = collectives.all_gather(os.getpid(), "process ids")
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"Rank 1 on .* did not answer within 4 s"):
            add_up(transport)
        (tmp_path / str(collectives.rank())).touch()
        if collectives.rank() == 0:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 3, group_timeout=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


@ranks(2)
def test_ranks_that_are_out_of_step_raise_the_same():
    transport, _ = make()
    with pytest.raises(
        DesyncError, match="rank 0 waits for the gradients, rank 1 waits for apples"
    ):
        if collectives.rank() == 0:
            add_up(transport)
        else:
            collectives.all_gather(1, "apples")


@pytest.mark.parametrize("numel", [10, 100000])
def test_ranks_that_start_different_buckets_raise(numel):
    def body():
        transport, _ = make("shm", [bucket(numel), bucket(numel)])
        add_up(transport, 0)
        with pytest.raises(DesyncError, match="is at a different exchange than rank"):
            add_up(transport, collectives.rank())

    run_ranks(body, 2)


@ranks(2)
def test_ranks_that_ask_for_different_buckets_raise():
    for requested in ("shm", "gloo"):
        with pytest.raises(DesyncError, match=r"bucket 1 .*: 10 \+ 0 .* rank 0; 11 \+ 0 .* rank 1"):
            make(requested, [bucket(5), bucket(10 + collectives.rank())])


# Where shared memory is not possible.


def falls_back(reason):
    buckets = [bucket(5, header=1), bucket(2**20)]
    transport, line = make("auto", buckets)
    assert transport.name == "gloo"
    assert re.match(rf"gradients: gloo \(not shm: rank {reason}.*\)$", line), line
    transport.tensors[0].fill_(2.0)
    add_up(transport, weight=0.5)
    assert transport.tensors[0].tolist() == [2.0] * 4 + [4.0]
    with pytest.raises(
        DistributedError, match=rf"transport='shm' is not possible here \(rank {reason}.*'auto'"
    ):
        make("shm", buckets)


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
    transport, _ = make("shm", [bucket(1000)])
    assert transport.name == "shm"
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
        DistributedError, match=r"'hierarchical' is not possible here .2 ranks on one host"
    ):
        make("hierarchical")
    with pytest.raises(DesyncError, match=r"transport.*gloo on rank 0; auto on rank 1"):
        make("gloo" if collectives.rank() == 0 else "auto")
    transport, line = make("gloo")
    assert (transport.name, line) == ("gloo", "gradients: gloo (as requested)")


@ranks(2)
def test_memory_has_no_name_and_goes_with_its_last_user():
    before = proc.count_maps("torchbearer_ddp")  # the channel of the group for small messages
    transport, _ = make("shm", [bucket(2**20)])
    tensor = transport.tensors[0]
    assert proc.count_maps("torchbearer_ddp") == before + 1
    # What this process has mapped; others on this machine may come and go in /dev/shm.
    assert not proc.maps("/dev/shm/")
    del transport
    tensor.fill_(1.0)  # a bucket outlives its transport
    del tensor
    assert proc.count_maps("torchbearer_ddp") == before
