"""The backend between devices (NCCL) is connected when a channel is made, within the timeout.

By itself it connects in the first collective on a device: in the middle of a step, for as long as
that takes, and without a word if a rank is missing or the hosts do not reach each other.
"""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DistributedError, LaunchError
from torchbearer_ddp.group import own_device, posts
from torchbearer_ddp.group.bounded import in_background

_POLL_SECONDS = 0.05
#: Where the first rank that could not connect says why; the others wait in vain for it.
_FAILED = "device_backend_failed"
_ADVICE = (
    "Set NCCL_SOCKET_IFNAME to the network interface on which the hosts reach each other; "
    "NCCL_DEBUG=INFO shows what NCCL tries. --backend gloo works without NCCL."
)


def connect(
    channel: Any, rank: int, device: str, store: Store, deadline: float, timeout: float
) -> None:
    """Runs the first collective of a channel; collective, unless the channel uses gloo.

    ``timeout`` is what all of the connecting may take, until the deadline.

    Raises:
        LaunchError: On every rank, if the backend of a rank fails or takes longer.
    """
    if own_device.backend_of(channel, torch.device(device).type) == "gloo":
        return
    where = f"rank {rank} ({socket.gethostname()}, {device})"
    future = in_background(lambda: _first_collective(channel, device))
    while not futures.wait([future], _POLL_SECONDS).done:
        if (failure := _recorded_failure(store)) is not None:
            raise LaunchError(failure)
        if time.monotonic() > deadline:
            message = f"{where} was not connected to all others within {timeout:g} s."
            raise _failure(store, message)
    error = future.exception()
    if error is not None:
        said = " ".join(str(error).split()) or type(error).__name__
        raise _failure(store, f"{where} reports: {said[:1000]}.") from error


def _recorded_failure(store: Store) -> str | None:
    """What another rank has recorded; the process that holds the store may have ended."""
    try:
        found: str | None = posts.read(store, _FAILED, checked.text())
        return found
    except DistributedError:
        raise
    except RuntimeError as error:
        return (
            "The process that holds the store has ended while NCCL connected the ranks. See its "
            f"output. ({str(error).splitlines()[0][:200]})"
        )


def _failure(store: Store, message: str) -> LaunchError:
    """The error that was recorded first."""
    text = f"The ranks could not be connected by NCCL: {message} {_ADVICE}"
    with contextlib.suppress(RuntimeError):  # the store may be gone
        text = posts.first(store, _FAILED, text, checked.text()) or text
    return LaunchError(text)


def _first_collective(channel: Any, device: str) -> None:
    own_device.select(device)  # a setting of each thread
    work = dist.all_reduce(torch.zeros(1, device=device), group=channel, async_op=True)
    # A wait with a timeout would abort NCCL's communicator.
    while not work.is_completed():
        time.sleep(_POLL_SECONDS)
    work.wait()
