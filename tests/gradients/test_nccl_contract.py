"""The reducer over a backend that promises what NCCL promises (see tests/stand_ins/nccl.py)."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.transport_cases import (
    add_up,
    bucket,
    make,
    play_hosts,
    pool_for,
    waiting,
)
from tests.ranks import run_ranks
from tests.stand_ins import nccl
from torchbearer_ddp.errors import PeerLost
from torchbearer_ddp.gradients.exchange import Options, Trained
from torchbearer_ddp.gradients.header import RankReport
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.gradients.weights import Average
from torchbearer_ddp.group import collectives, exchanges, membership
from torchbearer_ddp.group.waiting import report_failure

_EQUAL = Average.EQUAL


@pytest.fixture(scope="module")
def pool():
    with pool_for(nccl.NAME) as ranks:
        yield ranks


def on_stand_in(body):
    """Runs a test on two ranks of the stand-in."""

    def test(pool):
        pool.run(body)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 2)
    )


def reducer_of(model, **options):
    parameters = list(reversed(list(model.parameters())))
    return Reducer(membership.current(), [Trained(p) for p in parameters], Options(**options))


def one_step(model, reducer, before=lambda: None):
    """One exchange; every gradient is then the mean over the ranks' own."""
    model.zero_grad()
    loss = model(torch.full((3, 6), 1.0 + collectives.rank())).square().mean()
    reducer.begin(average=_EQUAL, weight=1.0)
    loss.backward()
    before()
    return reducer.reduce(RankReport(), _EQUAL)


def expected(model):
    """The mean of the gradients of all ranks, computed by this rank alone."""
    copy = network()
    copy.load_state_dict(model.state_dict())
    world = collectives.world_size()
    total = sum(copy(torch.full((3, 6), 1.0 + r)).square().mean() for r in range(world))
    (total / world).backward()
    return [each.grad for each in copy.parameters()]


def assert_averaged(model):
    for parameter, mean in zip(model.parameters(), expected(model), strict=True):
        torch.testing.assert_close(parameter.grad, mean)


@on_stand_in
def test_a_rank_that_is_late_and_a_gpu_that_is_slow():
    model = network()
    reducer = reducer_of(model, bucket_bytes=64)
    one_step(model, reducer)
    one_step(model, reducer, before=lambda: time.sleep(1.5 * collectives.rank()))
    assert_averaged(model)
    nccl.behaviour.device_seconds = 1.2
    one_step(model, reducer)
    assert_averaged(model)
    assert reducer.choice.startswith(f"gradients: {nccl.NAME} (")


def died(pid=None):
    os.kill(pid or os.getpid(), signal.SIGKILL)


def frozen():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("end", [died, frozen])
def test_a_rank_that_dies_or_freezes_is_named_at_the_timeout(end, tmp_path):
    def body():
        play_hosts("ab")
        model = network()
        reducer = reducer_of(model, bucket_bytes=64)
        one_step(model, reducer)
        pids = collectives.all_gather(os.getpid(), "process ids")
        if collectives.rank() == 1:
            end()
        with pytest.raises(PeerLost, match=r"^Rank 1 on .* did not answer within 5 s"):
            one_step(model, reducer)
        assert ("wait", "allreduce", 1) in nccl.behaviour.log
        (tmp_path / "named").touch()
        died(pids[1])
        died()  # a group with a dead rank cannot be left

    with pytest.raises(AssertionError, match="the process ended without a word"):
        run_ranks(body, 2, group_timeout=5, backend=nccl.NAME)
    assert (tmp_path / "named").exists()


def test_a_start_that_raises_is_the_first_cause(tmp_path):
    def body():
        play_hosts("ab")
        model = network()
        reducer = reducer_of(model, bucket_bytes=64)
        one_step(model, reducer)
        if collectives.rank() == 1:
            nccl.behaviour.start_error = dist.DistBackendError("ncclInvalidUsage: no memory left")
        try:
            one_step(model, reducer)
        except RuntimeError as error:
            report_failure(membership.current(), error)
            text = f"{type(error).__name__}: {error}"
            (tmp_path / str(collectives.rank())).write_text(text)
            membership.current().broken = True

    run_ranks(body, 2, backend=nccl.NAME, group_timeout=300)  # long before the timeout
    own, told = ((tmp_path / rank).read_text() for rank in "10")
    assert own == "DistBackendError: ncclInvalidUsage: no memory left"
    assert told.startswith("PeerLost: Rank 1 on ")
    assert "no memory left" in told


def test_an_error_that_nccl_reports_of_another_rank(tmp_path):
    def body():
        play_hosts("ab")
        transport, _ = make("auto", [bucket(10)])
        nccl.behaviour.remote_error = "ncclRemoteError: connection closed"
        with pytest.raises(PeerLost, match="the transport reported: ncclRemoteError"):
            add_up(transport)
        (tmp_path / str(collectives.rank())).touch()

    run_ranks(body, 2, backend=nccl.NAME)
    assert len(list(tmp_path.iterdir())) == 2


@on_stand_in
def test_an_assertion_on_the_device_is_this_ranks_own_error():
    transport, _ = make("auto", [bucket(10)])
    nccl.behaviour.device_error = torch.AcceleratorError("device-side assert triggered")
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        add_up(transport)


@on_stand_in
def test_messages_start_in_one_order_whatever_appears_first():
    model = network()
    reducer = reducer_of(model, bucket_bytes=64)
    nccl.behaviour.log.clear()
    for _ in range(3):
        one_step(model, reducer)
    mine = [each for each in nccl.behaviour.log if each[0] == "start"]
    everyone = collectives.all_gather(mine, "what was started")
    assert everyone[0] == everyone[1]
    assert len(mine) > 6
    # All buckets of a step are under way before the first is waited for.
    order = [kind for kind, *_ in nccl.behaviour.log]
    assert order == [*["start"] * (len(mine) // 3), *["wait"] * (len(mine) // 3)] * 3


@on_stand_in
def test_compressed_buckets_are_all_sent_on_before_any_is_finished():
    transport, _ = make("auto", [bucket(1000, header=3) for _ in range(3)], "bf16")
    wait = waiting()
    nccl.behaviour.log.clear()
    for index, tensor in enumerate(transport.tensors):
        tensor.fill_(1.001 + collectives.rank())
        transport.start(index, 0.5)
    for index, tensor in enumerate(transport.tensors):
        transport.finish(index, wait)
        torch.testing.assert_close(tensor[:-3], torch.full((997,), 1.501), rtol=2**-7, atol=0)
        torch.testing.assert_close(tensor[-3:], torch.full((3,), 3.002))
    steps = [(kind, name) for kind, name, _ in nccl.behaviour.log]
    last_sent_on = max(i for i, each in enumerate(steps) if each == ("start", "all_gather"))
    first_finished = steps.index(("wait", "all_gather"))
    assert last_sent_on < first_finished


@on_stand_in
def test_tensors_of_every_dtype_are_sent_though_nccl_does_not_know_it():
    dtypes = [
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.bfloat16,
    ]
    group = membership.current()
    with pytest.MonkeyPatch.context() as patch:  # as for tensors on a GPU
        patch.setattr(exchanges, "_channel", lambda *_: group.gradients)
        patch.setattr(group, "host_channel", None)
        value = 1 - collectives.rank()
        large = 2**20  # one that travels by itself, without a copy
        mine = [torch.full((n,), value).to(dtype) for dtype in dtypes for n in (3, large)]
        places = [each.data_ptr() for each in mine]
        collectives.broadcast_tensors(mine, "tensors of every dtype")
    assert [each.data_ptr() for each in mine] == places
    for tensor, dtype in zip(mine, [each for each in dtypes for _ in range(2)], strict=True):
        assert tensor.dtype == dtype
        assert (tensor.to(torch.complex64) == 1).all()
    assert {name for _, name, _ in nccl.behaviour.log} == {"broadcast"}
