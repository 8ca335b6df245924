"""The devices of the ranks, and the backend between them: what is refused, by whom, and when."""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.processes import free_port
from tests.ranks import run_ranks
from tests.stand_ins import cuda_devices, failing_backend
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import collectives, membership, waiting
from torchbearer_ddp.group.join import abandon, join, leave
from torchbearer_ddp.group.membership import Member

IFNAME, RETHROW = "GLOO_SOCKET_IFNAME", "TORCH_NCCL_RETHROW_CUDA_ERRORS"


def join_again(port, timeout=20.0, between=lambda: None, **changes):
    """Leaves the group of the test and joins another one."""
    rank, size = collectives.rank(), collectives.world_size()
    collectives.barrier()
    leave()
    between()
    fields = {"local_rank": rank, "local_world_size": size, "timeout": timeout, **changes}
    join(Member(rank=rank, world_size=size, **fields), "127.0.0.1", port, serve=rank == 0)


def refusal(port, **changes):
    """The error of a join that must fail."""
    with pytest.raises(LaunchError) as caught:
        join_again(port, **changes)
    return str(caught.value)


def seconds_until_refused(port, problem, troubled, timeout):
    failing_backend.behaviour.problem = problem if collectives.rank() in troubled else ""
    started = time.monotonic()
    text = refusal(port, backend=failing_backend.NAME, timeout=timeout)
    return text, time.monotonic() - started


# The backend of the devices is made at join: within the timeout, and with its own words.


def test_a_backend_that_cannot_connect_is_a_launch_error_with_its_own_words():
    # Rank 1 hangs meanwhile, as NCCL does when another rank fails; it says what rank 0 found.
    (text, seconds), (other, later) = run_ranks(_one_raises, 2, (free_port(),))
    assert text == other
    assert "rank 0" in text
    assert "Connect to 10.0.0.9<4711> failed: Connection refused" in text
    assert "NCCL_SOCKET_IFNAME" in text
    assert max(seconds, later) < 15  # and not only at the timeout of 20 s


def _one_raises(port):
    problem = "raise" if collectives.rank() == 0 else "hang"
    return seconds_until_refused(port, problem, (0, 1), 20.0)


def test_a_backend_that_hangs_is_a_launch_error_at_the_timeout():
    found = run_ranks(seconds_until_refused, 2, (free_port(), "hang", (0, 1), 3.0))
    assert len({text for text, _ in found}) == 1
    assert "within 3 s" in found[0][0]
    assert "NCCL_SOCKET_IFNAME" in found[0][0]
    assert max(seconds for _, seconds in found) < 15


def test_the_backend_is_made_once_at_join_in_a_thread_that_can_be_left():
    assert run_ranks(_made_at_join, 2, (free_port(),)) == [(True,), (True,)]


def _made_at_join(port):
    join_again(port, backend=failing_backend.NAME)
    collectives.barrier()
    dist.all_reduce(torch.zeros(1), group=membership.current().gradients)
    return failing_backend.behaviour.made


# A broken device is the first cause, not a lost connection.


def test_an_error_of_the_device_stays_the_error_of_its_rank():
    assert run_ranks(_device_error, 2, (free_port(),)) == ["CUDA error: device-side assert"] * 2


def _device_error(port):
    join_again(port, backend=failing_backend.NAME)
    collectives.barrier()
    group = membership.current()
    failing_backend.behaviour.device_error = "CUDA error: device-side assert"
    wait = waiting.Wait(group, "the gradients")
    work = dist.all_reduce(torch.zeros(1), group=group.gradients, async_op=True)
    try:
        waiting.wait_for(work, wait)
    except torch.AcceleratorError as error:
        assert group.broken
        abandon()
        return str(error)


# The environment is written once, before the first group, and is as it was afterwards.


def test_the_environment_is_written_before_the_first_group_and_not_after():
    for found in run_ranks(_environments, 2, (free_port(),)):
        before, first, joined, later, after = found
        assert before == {}
        assert first == joined == later == {IFNAME: "lo", RETHROW: "0"}
        assert after == {}


def _environments(port):
    def now(environment=os.environ):
        return {name: environment[name] for name in (IFNAME, RETHROW) if name in environment}

    rank = collectives.rank()
    collectives.barrier()
    leave()
    before = now()
    member = Member(rank, 2, rank, 2, backend=failing_backend.NAME, timeout=20.0)
    join(member, "127.0.0.1", port, serve=rank == 0)
    joined = now()
    membership.current().renew_gradients()
    later = now()
    collectives.barrier()
    leave()
    return before, now(failing_backend.behaviour.environment), joined, later, now()


def test_what_the_user_has_set_stays():
    assert run_ranks(_set_by_user, 2, (free_port(),)) == [("lo", "1")] * 2


def _set_by_user(port):
    def set_both():
        os.environ[IFNAME], os.environ[RETHROW] = "lo", "1"

    join_again(port, backend=failing_backend.NAME, between=set_both)
    collectives.barrier()
    leave()
    return os.environ[IFNAME], os.environ[RETHROW]


# The roll call compares devices and backends, and all ranks refuse together.


def _refused(port, per_rank, uuids):
    """What this rank says if the ranks have these settings and see these GPUs."""
    rank = collectives.rank()
    with cuda_devices.visible(*uuids[rank]):
        return refusal(port, **per_rank[rank])


@pytest.mark.parametrize(
    ("per_rank", "uuids", "words"),
    [
        (
            [{"device": "cuda:0", "backend": "cpu:gloo,cuda:nccl"}] * 2,
            [["GPU-a"], ["GPU-a"]],
            ["Ranks 0 and 1 use the same GPU", "GPU-a"],
        ),
        (
            [{"device": "cuda", "backend": "cpu:gloo,cuda:nccl", "local_rank": -1}] * 2,
            [["GPU-a", "GPU-b"], ["GPU-a"]],
            ["Ranks 0 and 1 use the same GPU", "GPU-a"],
        ),
        (
            [{"device": "cuda", "backend": "cpu:gloo,cuda:nccl"}] * 2,
            [["GPU-a", "GPU-b"], []],
            ["Rank 1 is process number 2 on its host", "0 GPUs are visible"],
        ),
        (
            [{"device": "cuda", "backend": "gloo"}, {"device": "cpu"}],
            [["GPU-a"], []],
            ["The device differs", "cuda on rank 0", "cpu on rank 1", "--device"],
        ),
        (
            [{}, {"backend": failing_backend.NAME}],
            [[], []],
            ["The backend differs", "gloo on rank 0", f"{failing_backend.NAME} on rank 1"],
        ),
    ],
    ids=["same GPU", "same GPU of unknown local rank", "too few", "device", "backend"],
)
def test_all_ranks_refuse_together(per_rank, uuids, words):
    one, other = run_ranks(_refused, 2, (free_port(), per_rank, uuids))
    assert one == other
    for word in words:
        assert word in one


def test_gloo_may_share_a_gpu():
    assert run_ranks(_shared, 2, (free_port(),)) == ["cuda:0", "cuda:0"]


def _shared(port):
    with cuda_devices.visible("GPU-a"):
        join_again(port, device="cuda:0")
        return str(collectives.device())


# A group that the user made.


def test_a_group_of_the_user_for_gpus_has_the_current_gpu():
    # Processes that have joined nothing before, as in a script that makes its own group.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        port = free_port()
        futures = [pool.submit(_adopted, rank, port) for rank in range(2)]
        assert [each.result(timeout=60) for each in futures] == ["cuda:0", "cuda:1"]


def _adopted(rank, port):
    dist.Backend.register_backend("on_gpus", failing_backend.FailingBackend, devices=["cuda"])
    with cuda_devices.visible("GPU-a", "GPU-b"):
        torch.cuda.set_device(rank)
        place = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("on_gpus", init_method=place, rank=rank, world_size=2)
        collectives.barrier()
        return str(collectives.device())
