"""Buckets through a communication hook written for DistributedDataParallel.

A hook gets a bucket and returns a Future of the mean over all ranks. The header travels by itself:
it must arrive exactly as it was sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from torchbearer_ddp.gradients.transports.compression import (
    Compression,
    Hook,
    hook_name,
    keeps_order,
    powersgd_hook,
)
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.gradients.transports.sums import Sum, settled
from torchbearer_ddp.gradients.transports.torch_dist import channel_of
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait, complete

#: After so many steps PowerSGD begins: it knows nothing of the gradients before.
_START_STEPS = 10
#: The channels of our own hooks are used for nothing else.
_LANE = 2
#: Keeps a column without any gradient from a division by zero.
_EPSILON = 1e-8


class HookBucket:
    """What a hook sees of a bucket, with the methods of torch's ``GradBucket``.

    Args:
        index: The number of the bucket.
        tensor: Its numbers, without the header.
        parameters: The parameters whose gradients are in it.
        is_last: True if it is the last one of a step.
    """

    def __init__(
        self,
        index: int,
        tensor: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        is_last: bool,
    ) -> None:
        self._index = index
        self._tensor = tensor
        self._parameters = parameters
        self._is_last = is_last

    def index(self) -> int:
        """The number of the bucket; lower ones come earlier."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients in one flat tensor."""
        return self._tensor

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the flat tensor, for example by one of another dtype."""
        self._tensor = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients one by one, cut from the current buffer, each as its parameter lies."""
        parts = torch.split(self._tensor, [each.numel() for each in self._parameters])
        return [
            part.as_strided(p.size(), torch.empty_like(p, device="meta").stride())
            for part, p in zip(parts, self._parameters, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the gradients, in their order."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """True for the last bucket of a step."""
        return self._is_last


class HookCalls:
    """Calls a hook for one bucket after another.

    A hook may start further exchanges from the callbacks of its Future. Those of two buckets would
    have no common order on all ranks, so the next call waits for the end of the one before; except
    for hooks that are known to start all they need at once.
    """

    def __init__(self, hook: Hook, state: Any) -> None:
        self._hook = hook
        self._state = state
        self._together = keeps_order(hook)
        self._waiting: deque[HookBucket] = deque()
        self._running: Any = None
        self._futures: dict[int, Any] = {}

    def add(self, bucket: HookBucket) -> None:
        """Calls the hook for a bucket, now or when it is its turn."""
        self._waiting.append(bucket)
        self.advance()

    def advance(self) -> None:
        """Makes the calls whose turn it is."""
        while self._waiting and (self._together or self._running is None or self._running.done()):
            bucket = self._waiting.popleft()
            future = self._hook(self._state, bucket)
            if not isinstance(future, torch._C.Future):
                raise TypeError(
                    f"The hook {hook_name(self._hook)} returned {type(future).__name__}: a "
                    "communication hook returns a torch.futures.Future of the averaged buffer."
                )
            self._futures[bucket.index()] = self._running = future

    def result(self, index: int, wait: Wait) -> Any:
        """Waits for the mean of a bucket."""
        while index not in self._futures:
            settled(self._running, wait)
            self.advance()
        value = settled(self._futures.pop(index), wait)
        self.advance()
        return value


class HookedSum(Sum):
    """Sums a slice over the hosts by a hook that treats each number alone."""

    def __init__(self, channel: Any, tensor: torch.Tensor, hook: Hook) -> None:
        super().__init__(channel, tensor)
        self._hook = hook
        self._members = dist.get_world_size(channel)

    def start(self) -> None:
        """Calls the hook, which makes a mean over the hosts of what is to be added up over them."""
        scale_for_mean(self._tensor, 1.0, self._members)
        self._work = self._hook(self._channel, HookBucket(0, self._tensor, [], True))

    def finish(self, wait: Wait) -> None:
        """Waits for the hook's Future."""
        put_into(self._tensor, settled(self._work, wait))
        self._work = None


class HookedBuckets:
    """Averages the buckets of a step by a hook; their headers are summed by the backend."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        tensors: Sequence[torch.Tensor],
        channel: Callable[[Bucket], Any],
        hook: Hook,
        state: Any,
    ) -> None:
        last = last_of_groups(buckets)
        self.bodies = [t[: b.numel] for t, b in zip(tensors, buckets, strict=True)]
        self._sums = {
            index: Sum(channel(bucket), tensors[index][bucket.numel :])
            for index, bucket in enumerate(buckets)
            if bucket.header
        }
        self._shown = [
            HookBucket(index, body, buckets[index].parameters, index in last)
            for index, body in enumerate(self.bodies)
        ]
        self.calls = HookCalls(hook, state)

    def start(self, index: int) -> None:
        """Calls the hook, or notes that it is to be called."""
        if index in self._sums:
            self._sums[index].start()
        if self.bodies[index].numel():
            self._shown[index].set_buffer(self.bodies[index])
            self.calls.add(self._shown[index])

    def finish(self, index: int, wait: Wait) -> None:
        """Waits for the hook's Future."""
        if self.bodies[index].numel():
            put_into(self.bodies[index], self.calls.result(index, wait))
        if index in self._sums:
            self._sums[index].finish(wait)


class HookTransport:
    """Averages every bucket by a hook on all ranks; the header is summed by the backend."""

    name = "hook"
    overlaps = True
    applies_weight = True

    def __init__(self, group: Group, buckets: Sequence[Bucket], compression: Compression) -> None:
        self._world_size = group.member.world_size
        self.tensors = [torch.zeros(b.size, dtype=b.dtype, device=b.device) for b in buckets]
        hook, state = hook_for(compression, group, range(self._world_size))
        compression.memory.begin(buckets, state)
        channel = partial(channel_of, group)
        self._hooked = HookedBuckets(buckets, self.tensors, channel, hook, state)

    def start(self, index: int, weight: float = 1.0) -> None:
        """Calls the hook, or notes that it is to be called."""
        scale_for_mean(self._hooked.bodies[index], weight, self._world_size)
        self._hooked.start(index)

    def finish(self, index: int, wait: Wait) -> None:
        """Waits for the hook's Future."""
        self._hooked.finish(index, wait)

    def commit(self) -> None:
        """Nothing: a hook has changed its state already."""


def hook_for(compression: Compression, group: Group, ranks: Sequence[int]) -> tuple[Hook, Any]:
    """The hook and its state; one of ours talks to some ranks alone, on a channel of its own.

    Collective for our own: the channel is made by all ranks. What a hook sends from the callbacks
    of its Future must not meet other messages.
    """
    if compression.hook is not None:
        return compression.hook, compression.hook_state
    wait = Wait(group, "the channel of compressed gradients")
    channel = complete(partial(group.channel_between, list(ranks), _LANE), wait)
    return powersgd_hook, powersgd_state(compression, channel)


def powersgd_state(compression: Compression, channel: Any) -> PowerSGDState:
    """The state of torch's PowerSGD; the one of an earlier run, if there is one."""
    known = compression.memory.hook_state
    if isinstance(known, PowerSGDState):
        known.process_group = channel
        return known
    return PowerSGDState(
        process_group=channel,
        matrix_approximation_rank=compression.rank or 1,
        start_powerSGD_iter=_START_STEPS,
        use_error_feedback=compression.feedback is not False,
        orthogonalization_epsilon=_EPSILON,
    )


def last_of_groups(buckets: Sequence[Bucket]) -> set[int]:
    """The last bucket of each group of parameters that travel together."""
    return set({b.group: i for i, b in enumerate(buckets) if b.numel}.values())


def scale_for_mean(body: torch.Tensor, weight: float, members: int) -> None:
    """Multiplies a rank's numbers so that the mean over so many members is the weighted sum."""
    factor = weight * members
    if not math.isclose(factor, 1.0, rel_tol=1e-12):
        body.mul_(factor)


def put_into(body: torch.Tensor, result: Any) -> None:
    """Copies what a hook has returned into the bucket, unless it lies there."""
    mean = result[0] if isinstance(result, list | tuple) else result
    if mean.data_ptr() != body.data_ptr() or mean.dtype != body.dtype:
        body.copy_(mean.reshape(-1))
