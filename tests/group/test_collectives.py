"""Every collective on real ranks, also where ranks raise or are out of step."""

import sys
import threading

import pytest
import torch

from tests.ranks import ranks
from torchbearer_ddp.errors import CheckpointError, DesyncError, DistributedError, PeerLost
from torchbearer_ddp.group import agreement, collectives, exchanges, framing, membership, wire
from torchbearer_ddp.group.waiting import Wait, complete


@ranks(3)
def test_all_gather_short_and_long_values():
    rank = collectives.rank()
    assert collectives.all_gather(rank, "short") == [0, 1, 2]
    long = collectives.all_gather("x" * (5000 * rank), "long")
    assert [len(value) for value in long] == [0, 5000, 10000]


@ranks(3)
def test_gather_to_one_rank():
    rank = collectives.rank()
    gathered = collectives.gather_to("x" * (5000 * rank), "values", target=1)
    assert [len(value) for value in gathered] == ([0, 5000, 10000] if rank == 1 else [])


@ranks(3)
def test_scatter_gives_each_rank_its_own():
    values = [{"mine": torch.arange(3000 * rank), "rank": rank} for rank in range(3)]
    mine = collectives.scatter(values if collectives.is_rank_zero() else [], "values")
    assert mine["rank"] == collectives.rank()
    assert torch.equal(mine["mine"], torch.arange(3000 * collectives.rank()))


@ranks(2)
def test_broadcast_plain_data_and_tensors():
    mine = {"a": (1, [torch.arange(3)]), 2: None} if collectives.is_rank_zero() else None
    value = collectives.broadcast(mine, "a value")
    assert value["a"][0] == 1
    assert value[2] is None
    assert torch.equal(value["a"][1][0], torch.arange(3))
    tensors = [torch.full((2, 2), float(collectives.rank())), torch.tensor(collectives.rank())]
    collectives.broadcast_tensors(tensors, "tensors")
    assert torch.equal(tensors[0], torch.zeros(2, 2))
    assert tensors[1].item() == 0
    long = collectives.broadcast("x" * 5000 if collectives.is_rank_zero() else "", "long")
    assert long == "x" * 5000


@ranks(2)
def test_what_rank_zero_returns_or_raises_reaches_all():
    zero = collectives.is_rank_zero()
    assert collectives.from_rank_zero(lambda: [collectives.rank(), {}], "a value") == [0, {}]

    def fails():
        raise CheckpointError("no file")

    with pytest.raises(CheckpointError, match="^no file$" if zero else "^Rank 0: no file$") as one:
        collectives.from_rank_zero(fails, "a file")
    assert one.value.secondary is not zero
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]


def garbled(kind, rank):
    """Encodes as always, but on one rank what no version of this package sends."""
    real = wire.Encoded.packed

    def packed(self):
        whole = real(self)
        if collectives.rank() != rank:
            return whole
        if kind == "garbage":
            return torch.full_like(whole, 255)
        if kind == "other dtype":
            text = bytes(whole.tolist()).replace(b"float32", b"save   ")
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return whole[:-3]

    return packed


@ranks(2)
def test_a_message_that_cannot_be_read_names_its_sender_on_all_ranks():
    value = torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("garbage", "other dtype", "cut"):
            patch.setattr(wire.Encoded, "packed", garbled(kind, 1))
            expected = "^What rank 1 sent for a value cannot be read: the message "
            with pytest.raises(DesyncError, match=expected):
                collectives.all_gather(value, "a value")
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]


@ranks(2)
def test_a_length_beyond_the_memory_is_refused_before_it_is_reserved():
    with pytest.MonkeyPatch.context() as patch:
        if collectives.rank() == 0:
            patch.setattr(wire.Encoded, "size", property(lambda self: 2**55))
        with pytest.raises(DesyncError, match=r"rank 0 sent for a value .* the length of the"):
            collectives.broadcast("x", "a value")
    with pytest.MonkeyPatch.context() as patch:
        if collectives.rank() == 1:
            real = framing.message

            def announce(content, size):
                found = real(content, size)
                found[6] = 255
                return found

            patch.setattr(framing, "message", announce)
        with pytest.raises(DesyncError, match=r"rank 1 sent for a value .* its length is"):
            collectives.all_gather("x", "a value")
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]


@pytest.mark.parametrize("name", ["annotations", "__class__", "__loader__", "KeyError", ""])
def test_only_our_own_errors_are_raised_for_another_rank(name):
    with pytest.raises(DistributedError, match=r"^Rank 0: x$"):
        collectives.raise_first([[name, "x"]])
    for odd in (7, [], ["a"], [1, 2], {"a": 1}):
        with pytest.raises(DesyncError, match="What rank 1 sent for an error cannot be read"):
            collectives.raise_first([None, odd])


@ranks(2)
def test_a_value_that_one_rank_cannot_send_is_an_error_on_all():
    odd = object() if collectives.rank() == 1 else 1
    for exchange in (collectives.all_gather, collectives.gather_to):
        with pytest.raises((TypeError, DistributedError), match=r"value is a builtins\.object"):
            exchange(odd, "odd")
    of_rank_zero = object() if collectives.is_rank_zero() else 1
    with pytest.raises((TypeError, DistributedError), match=r"value is a builtins\.object"):
        collectives.broadcast(of_rank_zero, "odd")
    with pytest.raises((TypeError, DistributedError), match=r"value\[1\] is a builtins.object"):
        collectives.from_rank_zero(object, "odd")
    with pytest.raises((TypeError, DistributedError), match=r"value is a builtins.object"):
        collectives.scatter([1, object()] if collectives.is_rank_zero() else [], "odd")
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]


@ranks(2)
def test_every_kind_of_tensor_is_broadcast():
    mine = collectives.rank() + 1
    csr = torch.eye(3) if mine == 1 else torch.ones(3, 3)
    tensors = [
        torch.full((4,), mine).to(torch.float8_e4m3fn),
        torch.full((3,), 65000 + mine).to(torch.uint16),
        torch.full((1,), float(mine)).expand(5),
        torch.full((2, 3), float(mine)).t(),
        torch.full((2,), mine, dtype=torch.complex64).conj(),
        torch.tensor([mine == 1]),
        torch.sparse_coo_tensor([list(range(mine))], torch.full((mine,), float(mine)), (3,)),
        csr.to_sparse_csr(),
    ]
    collectives.broadcast_tensors(tensors, "tensors")
    assert tensors[0].float().tolist() == [1] * 4
    assert tensors[1].tolist() == [65001] * 3
    assert tensors[2].tolist() == [1] * 5
    assert tensors[3].tolist() == [[1, 1]] * 3
    assert tensors[4].tolist() == [1, 1]
    assert tensors[5].tolist() == [True]
    assert tensors[6].to_dense().tolist() == [1, 0, 0]
    assert torch.equal(tensors[7].to_dense(), torch.eye(3))


@ranks(2)
def test_an_action_that_fails_on_one_rank_fails_on_all():
    assert collectives.run_together(collectives.rank, "a rank") == collectives.rank()

    def fails_on_rank_one():
        if collectives.rank() == 1:
            raise KeyError("annotations")

    kind = KeyError if collectives.rank() == 1 else DistributedError
    with pytest.raises(kind, match="annotations"):
        collectives.run_together(fails_on_rank_one, "an action")


@ranks(2)
def test_all_reduce_sums_each_tensor_in_its_own_dtype():
    tensors = [torch.ones(3), torch.ones((), dtype=torch.int64), torch.empty(0)]
    collectives.all_reduce(tensors, "sums")
    assert torch.equal(tensors[0], torch.full((3,), 2.0))
    assert tensors[1].item() == 2


@ranks(2)
def test_agree_names_the_value_and_the_ranks():
    agreement.agree({"steps": 5}, "the plan", "Do this.")
    with pytest.raises(DesyncError, match=r"steps.*5 on rank 0; 6 on rank 1\. Do this"):
        agreement.agree({"steps": 5 + collectives.rank()}, "the plan", "Do this.")
    extra = agreement.agree({"steps": 5}, "the plan", "Do this.", extra=collectives.rank())
    assert extra == [0, 1]
    long = [*range(1000), collectives.rank()]
    with pytest.raises(DesyncError, match=r"names.*\.\.\. on rank 0; .*\.\.\. on rank 1"):
        agreement.agree({"names": long}, "the plan", "Do this.")


@ranks(2)
def test_ranks_that_agree_need_one_exchange():
    group, mine = membership.current(), collectives.rank()
    before = group.sequence
    agreement.agree({"names": [*range(10_000)]}, "the plan", "Do this.")
    assert group.sequence == before + 1
    # Another order of the same values is no difference, but takes a second look.
    agreement.agree({f"{1 - mine}": "a", f"{mine}": "a"}, "the plan", "Do this.")
    assert group.sequence == before + 3


@ranks(2)
def test_a_value_that_cannot_be_sent_is_an_error_of_all_who_agree():
    value = object() if collectives.rank() == 1 else 1
    with pytest.raises((TypeError, DistributedError), match="object"):
        agreement.agree({"it": value}, "the plan", "Do this.")
    collectives.barrier()


@ranks(2)
def test_flags_and_barriers_are_short_messages():
    sizes = []
    gather = exchanges.all_gather

    def noted(group, mine, name):
        sizes.append(len(mine))
        return gather(group, mine, name)

    exchanges.all_gather = noted  # of this rank's process alone, which ends with the test
    collectives.barrier()
    collectives.any_rank(True, "a flag")
    collectives.raise_together(None, "an error")
    assert max(sizes) <= 256
    long = "no good " * 100
    with pytest.raises(DistributedError, match=long.strip()):
        collectives.raise_together(DesyncError(long), "an error")


@ranks(2)
def test_an_error_on_one_rank_is_raised_on_all():
    mine = DesyncError("no good") if collectives.rank() == 1 else None
    with pytest.raises(DesyncError, match="no good"):
        collectives.raise_together(mine, "a thing")
    other = OSError("disk") if collectives.rank() == 1 else None
    with pytest.raises((DistributedError, OSError), match="disk"):
        collectives.raise_together(other, "a thing")


@ranks(2)
def test_ranks_that_wait_for_different_things_all_raise_the_same():
    with pytest.raises(DesyncError, match="rank 0 waits for apples, rank 1 waits for pears"):
        if collectives.rank() == 0:
            collectives.all_gather(1, "apples")
        else:
            collectives.all_reduce([torch.ones(5)], "pears")
    assert collectives.rank() in (0, 1)


@ranks(2)
def test_rank_zero_first_runs_first_and_its_error_is_raised_on_all(tmp_path):
    path = tmp_path / "made"
    with collectives.rank_zero_first():
        if collectives.rank() == 0:
            path.write_text("by rank zero")
        else:
            assert path.read_text() == "by rank zero"
    with pytest.raises((ValueError, DistributedError), match="no data"):
        with collectives.rank_zero_first():
            if collectives.rank() == 0:
                raise ValueError("no data")
    with pytest.raises((SystemExit, DistributedError), match="no licence"):
        with collectives.rank_zero_first():
            assert collectives.rank() == 0
            sys.exit("no licence")


def test_without_a_group_every_function_acts_as_a_world_of_one():
    assert collectives.rank() == 0
    assert collectives.world_size() == 1
    assert collectives.is_rank_zero()
    assert collectives.all_gather("mine", "x") == ["mine"]
    assert collectives.gather_to("mine", "x") == ["mine"]
    assert collectives.scatter(["mine"], "x") == "mine"
    assert collectives.broadcast("mine", "x") == "mine"
    assert collectives.any_rank(True, "x")
    collectives.barrier()
    agreement.agree({"a": 1}, "x", "y")
    with collectives.rank_zero_first():
        pass
    with pytest.raises(KeyError):
        collectives.raise_together(KeyError("k"), "x")


@ranks(2, group_timeout=4)
def test_ranks_that_all_wait_are_all_named():
    group = membership.current()
    group.past_first_step = True
    if collectives.is_rank_zero():
        group.sequence += 1  # as if what rank 1 still waits for had been sent, and lost
    wait = Wait(group, f"something that only rank {collectives.rank()} wants")
    expected = r"^Every rank still waits after 4 s: rank 0 .* rank 0 wants, rank 1 .* rank 1 want"
    with pytest.raises(PeerLost, match=expected):
        complete(threading.Event().wait, wait)


@ranks(2)
def test_exchanges_do_not_depend_on_the_default_device():
    mine, text = collectives.rank(), "x" * 20_000  # more than goes through memory
    tensor, total = torch.full((5,), float(mine + 1)), torch.ones(3)
    with torch.device("meta"):
        assert collectives.all_gather(mine, "ranks") == [0, 1]
        assert collectives.all_gather((mine, text), "texts") == [(0, text), (1, text)]
        assert collectives.broadcast([mine, text], "a text") == [0, text]
        assert collectives.gather_to(mine, "to one") == ([] if mine else [0, 1])
        assert collectives.scatter([10, 11] if mine == 0 else [], "parts") == 10 + mine
        assert collectives.any_rank(mine == 1, "a flag")
        collectives.broadcast_tensors([tensor], "a tensor")
        collectives.all_reduce([total], "a sum")
    assert tensor.tolist() == [1.0] * 5
    assert total.tolist() == [2.0] * 3
