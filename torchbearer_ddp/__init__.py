"""Data-parallel training for torchbearer: add callbacks to a Trial, start it on many ranks."""

from typing import TYPE_CHECKING, Any

from torchbearer_ddp.callbacks.checkpoint import Checkpoint
from torchbearer_ddp.callbacks.data import ShardData, shard
from torchbearer_ddp.callbacks.flatten import Flatten
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.metrics import SyncMetrics
from torchbearer_ddp.callbacks.mixed_precision import MixedPrecision
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.callbacks.parallel import data_parallel
from torchbearer_ddp.callbacks.rank_zero import RankZeroOnly
from torchbearer_ddp.errors import (
    CheckpointError,
    DesyncError,
    DistributedError,
    LaunchError,
    WorkerError,
)
from torchbearer_ddp.gradients.transports.int8_hook import Int8State, int8_hook
from torchbearer_ddp.group import membership as _membership
from torchbearer_ddp.group import unsynchronised as _unsynchronised
from torchbearer_ddp.group.collectives import (
    barrier,
    device,
    is_rank_zero,
    local_rank,
    rank,
    rank_zero_first,
    world_size,
)
from torchbearer_ddp.group.stop_request import CUT_SHORT
from torchbearer_ddp.launch import auto_join as _auto_join
from torchbearer_ddp.launch.flags import add_arguments
from torchbearer_ddp.launch.run import run_distributed
from torchbearer_ddp.launch.submission import submit_slurm
from torchbearer_ddp.version import __version__ as __version__

if TYPE_CHECKING:
    from torchbearer_ddp.callbacks.tensorboard import TensorBoard

_membership.register(_auto_join.join_by_itself, _auto_join.report_errors)
_unsynchronised.watch_under_torchrun()

__all__ = [
    "CUT_SHORT",
    "Checkpoint",
    "CheckpointError",
    "DesyncError",
    "DistributedError",
    "Flatten",
    "Int8State",
    "LaunchError",
    "MixedPrecision",
    "RankZeroOnly",
    "ShardData",
    "SyncGradients",
    "SyncMetrics",
    "SyncModel",
    "TensorBoard",
    "WorkerError",
    "add_arguments",
    "barrier",
    "data_parallel",
    "device",
    "int8_hook",
    "is_rank_zero",
    "local_rank",
    "rank",
    "rank_zero_first",
    "run_distributed",
    "shard",
    "submit_slurm",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Imports tensorboardX only when it is used: the import takes a tenth of a second."""
    if name == "TensorBoard":
        from torchbearer_ddp.callbacks.tensorboard import TensorBoard

        return TensorBoard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
