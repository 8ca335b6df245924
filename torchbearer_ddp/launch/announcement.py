"""What rank zero says about the launch before it starts."""

from __future__ import annotations

import os

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.group.join import cores_per_rank, usable_cores
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.log import logger

#: With more ranks than this the machine is busy with switching between them.
_RANKS_PER_CORE = 4


def announce(plan: Plan) -> None:
    """Shows which ranks run, why, and how many threads each has."""
    if plan.member.rank:
        return
    logger.info(plan.describe(threads_of(plan)))
    local, cores = plan.member.local_world_size, usable_cores()
    if local > _RANKS_PER_CORE * cores and plan.member.device == "cpu":
        logger.warning(
            f"{local} ranks share {cores} usable core{'s' * (cores > 1)} of this host: they take "
            "turns, so fewer ranks are faster"
        )


def threads_of(plan: Plan) -> int:
    """The CPU threads of each rank: the user's choice, or an equal share of the cores."""
    if plan.member.world_size == 1 and plan.launcher != "spawn":
        return torch.get_num_threads()
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if checked.is_number(chosen) else cores_per_rank(plan.member)
