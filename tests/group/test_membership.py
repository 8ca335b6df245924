"""Which group a process belongs to: ours, one that the user made with torch, or none."""

import logging
import os
import sys

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from torchbearer_ddp import log
from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.join import join_single, leave
from torchbearer_ddp.group.membership import Member, adopted, current


class Records(logging.Handler):
    """Collects the ranks and messages of log records."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append((record.rank, record.getMessage()))


def what_is_logged():
    records = Records()
    log.logger.addHandler(records)
    log.announce("once")
    log.logger.warning("by every rank")
    log.logger.removeHandler(records)
    return records.found


@ranks(2)
def test_only_rank_zero_announces_and_records_have_the_rank():
    mine = (collectives.rank(), "by every rank")
    assert what_is_logged() == ([(0, "once")] if collectives.is_rank_zero() else []) + [mine]


@ranks(2)
def test_a_group_that_the_user_made_is_adopted(tmp_path):
    rank = collectives.rank()
    leave()
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    file = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
    assert collectives.all_gather(rank, "ranks") == [0, 1]
    assert (collectives.rank(), collectives.world_size(), collectives.local_rank()) == (
        rank,
        2,
        rank,
    )
    assert what_is_logged()[-1] == (rank, "by every rank")
    # The user closes it, and makes another one later.
    dist.barrier()
    dist.destroy_process_group()
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    assert collectives.all_gather(rank, "ranks") == [rank]
    again = f"file://{tmp_path}/again"
    dist.init_process_group("gloo", init_method=again, rank=1 - rank, world_size=2)
    assert collectives.rank() == 1 - rank
    assert collectives.all_gather(rank, "ranks") == [1, 0]


def test_a_run_of_one_rank_has_a_device_and_no_group():
    assert join_single(Member(device="cpu", seed=7)) == 7
    assert collectives.device() == torch.device("cpu")
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    leave()


@ranks(2)
def test_channels_that_are_closed_with_a_script_may_be_of_other_ranks(tmp_path):
    rank = collectives.rank()
    leave()
    file = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
    group = adopted() or current()
    first, both = group.channel_between([0]), group.channel_between([0, 1], 1)
    dist.barrier()
    group.close_channels()
    with pytest.raises(ValueError, match="group"):
        dist.get_backend(both)
    assert (first == dist.GroupMember.NON_GROUP_MEMBER) == (rank == 1)
    dist.destroy_process_group()


@ranks(2)
def test_a_process_that_is_forked_from_a_rank_of_the_users_group_is_no_rank(tmp_path):
    rank = collectives.rank()
    leave()
    file = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
    child = os.fork()  # before anything of this package has asked for the group
    if not child:
        try:
            known = collectives.rank(), collectives.world_size()
            collectives.all_gather("of the child", "ranks")
        except DistributedError as error:
            sys.excepthook(type(error), error, None)  # as if nobody had caught it
            os._exit(7 if "is not a rank" in str(error) and known == (rank, 2) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert collectives.all_gather(rank, "ranks") == [0, 1]
    dist.barrier()
    dist.destroy_process_group()
