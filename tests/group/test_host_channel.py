"""Small messages through the memory of a host: the same as through gloo, and never a hang."""

import os
import random
import signal
import time
from functools import partial

import pytest
import torch

from tests.ranks import ranks, run_ranks
from torchbearer_ddp.errors import DesyncError, DistributedError, PeerLost
from torchbearer_ddp.group import collectives, exchanges, hosts, membership, segment
from torchbearer_ddp.group.host_channel import MOST_BYTES
from torchbearer_ddp.group.waiting import Wait


def _exchanges_of(seed):
    """What a rank gets from exchanges that all ranks draw alike, with values of its own."""
    drawn, mine = random.Random(seed), collectives.rank()
    found = []
    for index in range(60):
        kind = drawn.choice(["gather", "text", "flag", "barrier", "value", "tensors", "sum", "to"])
        length = drawn.choice([0, 1, 200, 240, 300, MOST_BYTES - 8, MOST_BYTES, 3 * MOST_BYTES])
        name = f"{kind} {index}"
        if drawn.random() < 0.2:
            time.sleep(0.001 * mine)  # the work of a slow rank
        if kind == "gather":
            found.append(collectives.all_gather([mine, index], name, drawn.choice([64, 256, 4096])))
        elif kind == "text":
            found.append(collectives.all_gather(f"{mine}" * (length * (1 + mine) // 2), name))
        elif kind == "flag":
            found.append(collectives.any_rank(mine == drawn.randrange(9), name))
        elif kind == "barrier":
            collectives.barrier()
        elif kind == "value":
            found.append(collectives.broadcast({"from": mine, "text": "x" * length}, name))
        elif kind == "tensors":
            tensors = [torch.full((n,), float(mine + 1)) for n in (3, length)]
            collectives.broadcast_tensors(tensors, name)
            found.append([each.tolist() for each in tensors])
        elif kind == "sum":
            tensor = torch.arange(5.0) * (1 + mine)
            collectives.all_reduce([tensor], name)
            found.append(tensor.tolist())
        else:
            found.append(collectives.gather_to((mine, "y" * length), name, target=index % 2))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_exchanges_give_what_they_give_through_gloo(world_size):
    def body():
        group = membership.current()
        for seed in range(3):
            assert group.host_channel is not None
            mine = _exchanges_of(seed)
            channel, group.host_channel = group.host_channel, None
            assert _exchanges_of(seed) == mine
            group.host_channel = channel

    run_ranks(body, world_size)


@ranks(3)
def test_what_a_rank_has_received_is_its_own():
    received = [exchanges.all_gather(membership.current(), _bytes(i), "numbers") for i in range(9)]
    assert [[int(each[0]) for each in found] for found in received] == [
        [3 * i + rank for rank in range(3)] for i in range(9)
    ]


@ranks(2)
def test_the_memory_may_be_opened_in_inference_mode():
    group = membership.current()
    group.host_channel, group.is_open = None, False
    with torch.inference_mode():
        collectives.barrier()
    assert group.host_channel is not None
    assert collectives.all_gather(collectives.rank(), "ranks") == [0, 1]
    assert collectives.broadcast(collectives.rank(), "a rank") == 0
    tensor = torch.full((4,), float(collectives.rank()))
    collectives.broadcast_tensors([tensor], "a tensor")
    assert not tensor.any()


@ranks(2)
def test_memory_that_is_another_file_by_now_is_left_alone(tmp_path):
    with segment.offered() as (memory, problem):
        mine = hosts.Process.current(0, memory, problem)
        before, path = os.dup(memory), tmp_path / f"{collectives.rank()}"
        path.write_text("something of the user's")
        with path.open("r+") as other:
            os.dup2(other.fileno(), memory)
            with pytest.raises(OSError, match="does not offer this memory any more"):
                segment.Segment(mine, 0, 1, 4096)
        os.close(before)
        assert path.read_text() == "something of the user's"


@ranks(2)
def test_a_forked_process_speaks_for_no_rank():
    child = os.fork()
    if not child:
        try:
            collectives.barrier()
        except DistributedError as error:
            os._exit(7 if "is not a rank" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert collectives.all_gather(collectives.rank(), "ranks") == [0, 1]


def _bytes(index):
    return torch.full((100,), 3 * index + collectives.rank(), dtype=torch.uint8)


@ranks(3)
def test_ranks_that_do_different_things_raise_the_same_at_once_and_stay_in_step():
    for _ in range(3):
        name = "pears" if collectives.rank() == 1 else "apples"
        words = "rank 0 waits for apples, rank 1 waits for pears, rank 2 waits for apples"
        with pytest.raises(DesyncError, match=f"Ranks are out of step: {words}") as caught:
            collectives.all_gather(1, name)
        assert "only some ranks have" in str(caught.value)
        assert collectives.all_gather(collectives.rank(), "afterwards") == [0, 1, 2]


@ranks(2)
def test_long_names_that_end_differently_are_told_apart():
    with pytest.raises(DesyncError, match="Ranks are out of step"):
        collectives.all_gather(1, "x" * 500 + str(collectives.rank()))


@ranks(2)
def test_a_rank_that_sends_more_than_fits_is_out_of_step_with_one_that_sends_less():
    """One of them goes through gloo, where nobody else is."""
    size = MOST_BYTES + collectives.rank()
    name = f"bytes {collectives.rank()}"
    with pytest.raises(DesyncError, match=r"rank 0 waits for bytes 0, rank 1 waits for bytes 1"):
        exchanges.all_gather(membership.current(), torch.zeros(size, dtype=torch.uint8), name)


@ranks(2)
def test_a_signal_that_is_taken_as_an_exception_comes_is_not_lost():
    rounds, begun, drawn = 2000, [], random.Random(3)

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    group = membership.current()
    collectives.barrier()
    signals = group.host_channel._signals
    signal.signal(signal.SIGALRM, interrupt)
    wait, caught = Wait(group, "the signals"), 0
    while signals.are_owed or len(begun) < rounds:
        try:
            if collectives.rank() == 0:  # once: none may come between this and the next attempt
                signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-6, 5e-5))
            if not signals.are_owed:
                signals.post(before=partial(begun.append, None))
            signals.collect(wait)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            caught += 1
    # Both have taken all, so each waits for the other in an exchange of another kind too.
    collectives.all_reduce([torch.ones(3)], "a sum")
    counts = collectives.all_gather((len(begun), caught), "what was counted")
    assert [count for count, _ in counts] == [rounds, rounds]
    assert counts[0][1] > 100


@ranks(3)
def test_an_exchange_that_was_interrupted_on_one_rank_does_not_count_for_the_next():
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    store, mine = membership.current().store, collectives.rank()
    for attempt in range(3):
        if mine == 0:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # the others wait for this one
            with pytest.raises(Interrupted):
                collectives.all_gather(1, "interrupted")
            store.set(f"interrupted {attempt}", "yes")
        else:
            store.wait([f"interrupted {attempt}"])
            assert collectives.all_gather(1, "interrupted") == [1, 1, 1]
        for index in range(5):
            assert collectives.all_gather((mine, index), "next") == [(r, index) for r in range(3)]


def test_a_killed_peer_is_named_within_seconds(tmp_path):
    def body():
        collectives.barrier()
        membership.current().past_first_step = True
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(
            PeerLost, match=r"Lost connection to rank 1 .*process \d+, has ended"
        ) as caught:
            collectives.all_gather(1, "numbers")
        assert caught.value.rank == 1
        (tmp_path / str(collectives.rank())).write_text(str(time.monotonic() - started))

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 3)
    for rank in (0, 2):
        assert float((tmp_path / str(rank)).read_text()) < 5


def test_a_frozen_peer_is_named_at_the_timeout(tmp_path):
    def body():
        membership.current().past_first_step = True
        pids = collectives.all_gather(os.getpid(), "process ids")
        if collectives.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"Rank 1 on .* did not answer within 4 s"):
            collectives.all_gather(1, "numbers")
        (tmp_path / str(collectives.rank())).touch()
        if collectives.rank() == 0:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process ended without a word"):
        run_ranks(body, 3, group_timeout=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


def _opened_again():
    """Decides anew what small messages go through."""
    group = membership.current()
    group.is_open, group.host_channel = False, None
    exchanges.open_channels(group)
    assert collectives.all_gather(collectives.rank(), "ranks") == [0, 1, 2]
    return group.host_channel


@ranks(3)
def test_gloo_takes_them_where_a_rank_cannot_share_memory(tmp_path):
    if collectives.rank() == 0:
        os.environ[segment.DIRECTORY_VARIABLE] = str(tmp_path / "nowhere")
    assert _opened_again() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@ranks(3)
def test_gloo_takes_them_where_a_rank_may_not_open_the_memory():
    if collectives.rank() == 2:
        os.setresuid(65534, 65534, 65534)
    assert _opened_again() is None


@ranks(3)
def test_gloo_takes_them_where_ranks_are_on_several_hosts():
    os.environ[hosts.HOST_ID_VARIABLE] = "a" if collectives.rank() else "b"
    assert _opened_again() is None
    os.environ[hosts.HOST_ID_VARIABLE] = "a"
    assert _opened_again() is not None
