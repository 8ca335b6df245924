"""Eight bits a number with error feedback, as a communication hook for any data-parallel loop."""

# Annotations stay objects here: DistributedDataParallel compares those of a hook with its own.

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbearer_ddp.gradients.transports.codecs import BlockCodec
from torchbearer_ddp.gradients.transports.memory import Memory
from torchbearer_ddp.gradients.transports.sums import CodedSum, Lanes, works_by_itself


class Int8State:
    """What :func:`int8_hook` remembers: the process group, and what rounding has lost.

    Every rank of the group must make one, at the same place of the program.

    Example: ::

        >>> from torchbearer_ddp import Int8State, SyncGradients, int8_hook
        >>> callback = SyncGradients(hook=int8_hook, hook_state=Int8State())

    Args:
        process_group: The group of torch over which gradients are averaged; None for all ranks. In
            a group of some ranks on gloo every rank sends all of its numbers to every other.
        error_feedback: Whether what rounding loses in a step is added to the next one.
    """

    def __init__(self, process_group: Any = None, error_feedback: bool = True) -> None:
        self.process_group = process_group
        self.error_feedback = error_feedback
        self._memory = Memory()
        self._lanes: Lanes | None = None
        self._sums: dict[int, CodedSum] = {}

    def state_dict(self) -> dict[str, Any]:
        """What rounding has lost on this rank."""
        return self._memory.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._memory.load_state_dict(state_dict)

    def set_unit(self, unit: float) -> None:
        """From the next step on gradients are this many times as large, by a loss scale."""
        self._memory.set_unit(unit)

    def begin_exchange(self, share: float) -> None:
        """This rank is about to send this share of a regular step, which has fewer samples."""
        self._memory.begin_exchange(share)

    def settle(self, correction: float) -> None:
        """The averages of the exchange were multiplied by this, as its ranks had fewer samples."""
        self._memory.settle(correction)

    def renew_buckets(self) -> None:
        """Drops what is kept for each bucket; called when the buckets have changed."""
        self._sums.clear()
        self._memory.drop()

    def sum_of(self, index: int, numbers: torch.Tensor) -> CodedSum:
        """The sum of a bucket over all ranks, for numbers in this memory."""
        known = self._sums.get(index)
        if known is None or not known.bind(numbers):
            residual = partial(self._residual, index) if self.error_feedback else None
            known = CodedSum(self._connected(), numbers, BlockCodec(), residual)
            self._sums[index] = known
        return known

    def _residual(self, index: int, part: str, like: torch.Tensor) -> Any:
        return self._memory.residual(f"{index} {part}", like)

    def _connected(self) -> Lanes:
        """The channels, of which the second is made at the first bucket of every rank."""
        if self._lanes is None:
            group = self.process_group or dist.group.WORLD
            self._lanes = Lanes(group)
            # Ranks outside of a group would have to help to make another one like it.
            if self._lanes.size > 2 and group is dist.group.WORLD and works_by_itself(group):
                self._lanes.second = dist.new_group()
        return self._lanes


def int8_hook(
    state: Int8State,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in eight bits a number, with a scale for each 256 numbers.

    For :class:`SyncGradients`, or for ``DistributedDataParallel.register_comm_hook``. It works with
    gloo and NCCL, and with several buckets.

    Example: ::

        >>> from torchbearer_ddp import Int8State, SyncGradients, int8_hook
        >>> callback = SyncGradients(hook=int8_hook, hook_state=Int8State())

    Args:
        state: An :class:`Int8State`.
        bucket: The bucket.

    Returns:
        A Future of the mean over all ranks.
    """
    buffer = bucket.buffer()
    numbers = buffer if buffer.dtype == torch.float32 else buffer.float()
    total = state.sum_of(bucket.index(), numbers)
    numbers.div_(dist.get_world_size(state.process_group))

    def hand_out(done: Any) -> torch.Tensor:
        done.wait()
        total.commit()
        if numbers is not buffer:
            buffer.copy_(numbers)
        return buffer  # type: ignore[no-any-return]

    averaged: torch.futures.Future[torch.Tensor] = total.future().then(hand_out)
    return averaged


#: Its exchanges keep their order with several buckets under way.
int8_hook.in_order = True  # type: ignore[attr-defined]
