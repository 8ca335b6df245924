"""Shared memory inside each host and gloo between them; the hosts are played by one machine."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.gradients.transport_cases import (
    DTYPES,
    SIZES,
    add_up,
    bucket,
    is_equal_everywhere,
    make,
    numbers,
    play_hosts,
    waiting,
)
from tests.ranks import ranks, run_ranks
from torchbearer_ddp.errors import DesyncError, DistributedError, PeerLost
from torchbearer_ddp.gradients.transports.compression import NUMBER_BY_NUMBER, Compression
from torchbearer_ddp.group import collectives, membership, segment


@pytest.mark.parametrize("layout", ["aabb", "abba", "aabbcc"])
def test_sums_of_every_dtype_and_size(layout):
    world_size = len(layout)

    def body():
        play_hosts(layout)
        cases = [(numel, dtype) for dtype in DTYPES for numel in SIZES]
        transport, line = make("auto", [bucket(*case) for case in cases])
        assert transport.name == "hierarchical"
        assert line == (
            "gradients: shared memory inside each host, gloo between hosts "
            f"(each of the {len(set(layout))} hosts has 2 ranks)"
        )
        for index, ((numel, dtype), tensor) in enumerate(
            zip(cases, transport.tensors, strict=True)
        ):
            tensor.copy_(numbers(numel, dtype, collectives.rank()))
            add_up(transport, index)
            expected = sum(numbers(numel, dtype, r) for r in range(world_size))
            assert torch.equal(tensor, expected), (dtype, numel)

    run_ranks(body, world_size)


@ranks(4)
def test_several_buckets_in_flight_have_the_same_bits_everywhere():
    play_hosts("aabb")
    sizes = [5, 40000, 70001, 3]
    transport, _ = make("hierarchical", [bucket(n, header=2) for n in sizes])
    generator = torch.Generator().manual_seed(collectives.rank())
    for step in range(50):
        waits = [waiting(f"bucket {i}") for i in range(len(sizes))]
        for index, tensor in enumerate(transport.tensors):
            tensor.normal_(generator=generator)
            tensor[-2:] = step
            transport.start(index, 0.25)
        for index, (tensor, wait) in enumerate(zip(transport.tensors, waits, strict=True)):
            transport.finish(index, wait)
            assert tensor[-2:].tolist() == [4.0 * step] * 2
    assert all(is_equal_everywhere(tensor) for tensor in transport.tensors)
    transport.tensors[1].fill_(collectives.rank())  # after the sum it belongs to this rank alone
    collectives.barrier()
    assert torch.equal(transport.tensors[1], torch.full((40000,), float(collectives.rank())))


@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_half_precision_between_hosts_with_an_exact_header(compress):
    def body():
        play_hosts("aabb")
        sizes = [3, 5, 1000, 70001]
        transport, _ = make("auto", [bucket(n, header=3) for n in sizes], compress)
        for step in range(30):
            waits = [waiting(f"bucket {i}") for i in range(len(sizes))]
            for index, tensor in enumerate(transport.tensors):
                tensor.fill_(1.001 + collectives.rank())
                tensor[-3:] = 40001.0 + step
                transport.start(index, 0.25)
            for index, (tensor, wait) in enumerate(zip(transport.tensors, waits, strict=True)):
                transport.finish(index, wait)
                assert tensor[-3:].tolist() == [4 * (40001.0 + step)] * 3
                assert torch.allclose(tensor[:-3], torch.tensor(2.501), rtol=2**-7)
        assert all(is_equal_everywhere(tensor) for tensor in transport.tensors)
        assert transport.tensors[2][0] != 2.501  # it was rounded

    run_ranks(body, 4)


@pytest.mark.parametrize("layout", ["aabb", "abcabc"])
@pytest.mark.parametrize("hook", NUMBER_BY_NUMBER)
def test_a_hook_of_torch_that_fits_slices_is_called_between_hosts(hook, layout):
    def body():
        play_hosts(layout)
        sizes, world_size = [3, 5, 1000, 70001], collectives.world_size()
        buckets = [bucket(n, header=3) for n in sizes]
        transport, line = make("auto", buckets, Compression(hook=hook))
        assert transport.name == "hierarchical"
        assert f"shared memory inside each host, {hook.__name__} between hosts" in line
        exact = "allreduce" in hook.__name__
        for step in range(10):
            waits = [waiting(f"bucket {i}") for i in range(len(sizes))]
            for index, tensor in enumerate(transport.tensors):
                tensor.fill_(1.001 + collectives.rank())
                tensor[-3:] = 40001.0 + step
                transport.start(index, 1 / world_size)
            for index, (tensor, wait) in enumerate(zip(transport.tensors, waits, strict=True)):
                transport.finish(index, wait)
                assert tensor[-3:].tolist() == [world_size * (40001.0 + step)] * 3
                mean = torch.tensor(1.001 + (world_size - 1) / 2)
                assert torch.allclose(tensor[:-3], mean, rtol=1e-6 if exact else 2**-7)
                assert exact or tensor.numel() == 3 or tensor[0] != mean  # it was rounded
        assert all(is_equal_everywhere(tensor) for tensor in transport.tensors)

    run_ranks(body, len(layout))


def test_a_hook_with_a_group_of_its_own_and_one_of_the_user_see_every_rank():
    def users_own(state, bucket):
        return default_hooks.allreduce_hook(state, bucket)

    def body():
        play_hosts("aabb")
        for hook, state in (
            (default_hooks.fp16_compress_hook, dist.group.WORLD),
            (users_own, None),
        ):
            transport, _ = make("auto", [bucket(100)], Compression(hook=hook, hook_state=state))
            assert transport.name == "hook"
            transport.tensors[0].fill_(collectives.rank())
            add_up(transport, weight=0.25)
            assert torch.equal(transport.tensors[0], torch.full((100,), 1.5))

    run_ranks(body, 4)


def test_a_killed_peer_is_named_on_both_hosts(tmp_path):
    def body():
        play_hosts("aabb")
        transport, _ = make("hierarchical", [bucket(1000)])
        add_up(transport)
        membership.current().past_first_step = True
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="Lost connection to rank 1 "):
            add_up(transport)
        (tmp_path / str(collectives.rank())).touch()

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3"]


@pytest.mark.parametrize("moment", ["a sum", "the channels between hosts"])
def test_a_frozen_peer_is_named_on_both_hosts(moment, tmp_path):
    def freeze(*_):
        os.kill(os.getpid(), signal.SIGSTOP)

    def add_after_freezing():
        transport, _ = make("hierarchical", [bucket(1000)])
        add_up(transport)
        if collectives.rank() == 3:
            freeze()
        add_up(transport)

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
def test_ranks_that_are_out_of_step_raise_the_same():
    play_hosts("aabb")
    transport, _ = make("hierarchical")
    with pytest.raises(DesyncError, match="rank 2 waits for apples"):
        if collectives.rank() == 2:
            collectives.all_gather(1, "apples")
        else:
            add_up(transport)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("aab", "the hosts differ in their number of ranks: 2, 1"),
        ("ab", "each of the 2 hosts has one rank"),
    ],
)
def test_other_layouts_use_gloo(layout, reason):
    def body():
        play_hosts(layout)
        transport, line = make("auto")
        assert (transport.name, line) == ("gloo", f"gradients: gloo ({reason})")
        for requested in ("hierarchical", "shm"):
            with pytest.raises(
                DistributedError, match=f"{requested}' is not possible here .{reason}"
            ):
                make(requested)

    run_ranks(body, len(layout))


@ranks(4)
def test_one_host_without_memory_takes_all_to_gloo(tmp_path):
    play_hosts("aabb")
    if collectives.rank() == 2:
        os.environ[segment.DIRECTORY_VARIABLE] = str(tmp_path / "nowhere")
    transport, line = make("auto")
    assert transport.name == "gloo"
    assert "(not hierarchical: rank 2 cannot make shared memory" in line
