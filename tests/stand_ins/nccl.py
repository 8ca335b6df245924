"""A backend for CPU tensors that promises what NCCL promises, and no more.

- A collective takes its input at the start. Until its end the memory holds nothing of use: here it
  is filled with NaN, so code that reads or sends it too early computes NaN.
- Nothing is delivered before ``wait()``.
- ``wait(timeout)`` counts from the start of the collective. When it expires, the communicator is
  aborted, an error is raised, and ``is_completed()`` is true from then on.
- ``wait()`` does not wait for the GPU, and the next copy to the host would block for as long as the
  collective takes: forever, if a rank is dead. So here it is an error before the collective is
  complete.
- A rank that is dead or frozen never completes anything, and breaks no connection.
- Only some dtypes can be sent, fewer can be summed, and tensors must be contiguous.

The numbers travel through a gloo group of its own, so sums are those of gloo. Importing this module
registers the backend.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

#: For tensors on the CPU too, and for those that say they are on a GPU alone, as NCCL is.
NAME, GPU_NAME = "nccl_stand_in", "nccl_stand_in_gpu"
_SUMMED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
}
_SENT = {*_SUMMED, torch.float8_e4m3fn, torch.float8_e5m2}


@dataclass
class Behaviour:
    """How the backend of this process behaves, and what it has done.

    Attributes:
        device_seconds: How long the GPU takes for what comes before a collective.
        start_error: Raised by the next start.
        remote_error: What NCCL reports of another rank while a collective runs.
        device_error: What CUDA reports of this rank's own device, whatever it is asked.
        log: What was started and waited for, in order: ``('start', 'allreduce', 0)``.
    """

    device_seconds: float = 0.0
    start_error: Exception | None = None
    remote_error: str | None = None
    device_error: Exception | None = None
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def reset(self) -> None:
        """Becomes fast and free of errors."""
        vars(self).update(vars(Behaviour()))


behaviour = Behaviour()


class _Work:
    """A collective under way."""

    def __init__(
        self, group: StandIn, name: str, start: Callable[[], Any], deliver: Callable[[], None]
    ) -> None:
        self._group, self._name, self._deliver = group, name, deliver
        self._started = time.monotonic()
        self._number = group.count()
        self._done = threading.Event()
        behaviour.log.append(("start", name, self._number))
        group.stream.put((start(), self._done))

    def is_completed(self) -> bool:
        if behaviour.device_error:
            raise behaviour.device_error
        if self._group.error or behaviour.remote_error:
            return True
        is_early = time.monotonic() < self._started + behaviour.device_seconds
        return self._done.is_set() and not is_early

    def wait(self, timeout: Any = None) -> bool:
        behaviour.log.append(("wait", self._name, self._number))
        if timeout is not None:
            while not self.is_completed():
                if time.monotonic() > self._started + timeout.total_seconds():
                    self._group.error = f"{self._name} timed out in blocking wait."
                time.sleep(0.01)
        assert self.is_completed(), "a copy to the host would block: the collective is not complete"
        if error := self._group.error or behaviour.remote_error:
            raise dist.DistBackendError(error)
        self._deliver()
        return True


class StandIn(dist.ProcessGroup):  # type: ignore[misc]
    """The process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout)
        self._count = 0
        #: What is under way, and the event to set when it is complete; one after the other.
        self.stream: queue.SimpleQueue[tuple[Any, threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run_stream, daemon=True).start()
        #: Why the communicator was aborted.
        self.error: str | None = None

    def count(self) -> int:
        """The number of the next collective."""
        self._count += 1
        return self._count - 1

    def _run_stream(self) -> None:
        while True:
            work, done = self.stream.get()
            try:
                work.wait()
            except RuntimeError:
                return  # a rank has died: with NCCL nothing happens then, and nothing after it
            done.set()

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        self.error = "NCCL communicator was aborted."

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        (tensor,) = tensors
        return self._start("allreduce", tensor, tensor, self._inner.allreduce, opts, _SUMMED)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        (tensor,) = tensors
        return self._start("broadcast", tensor, tensor, self._inner.broadcast, opts)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> _Work:
        return self._start("all_gather", mine, output, self._inner._allgather_base, opts)

    def alltoall_base(
        self, output: torch.Tensor, mine: torch.Tensor, out_splits: Any, splits: Any, opts: Any
    ) -> _Work:
        def exchange(received: torch.Tensor, sent: torch.Tensor, opts: Any) -> Any:
            return self._inner.alltoall_base(received, sent, out_splits, splits, opts)

        return self._start("all_to_all", mine, output, exchange, opts)

    # The names of these two in newer versions of torch.
    all_gather_single = _allgather_base
    all_to_all_single = alltoall_base

    def _start(
        self,
        name: str,
        mine: torch.Tensor,
        output: torch.Tensor,
        collective: Callable[..., Any],
        opts: Any,
        dtypes: set[torch.dtype] = _SENT,
    ) -> _Work:
        if self.error:
            raise dist.DistBackendError(self.error)
        if behaviour.start_error:
            raise behaviour.start_error
        for each in (mine, output):
            if each.dtype not in dtypes:
                raise TypeError(f"Input tensor data type is not supported for NCCL: {each.dtype}")
            if not each.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        in_place = mine is output
        mine, output = _memory(mine), _memory(output)
        sent = mine.clone()
        received = sent if in_place else torch.empty_like(output)
        tensors = ([received],) if in_place else (received, sent)
        kept = sent.clone()
        _poison(mine)
        _poison(output)

        def deliver() -> None:
            output.copy_(received)
            if not in_place:
                mine.copy_(kept)  # the input is only read

        return _Work(self, name, lambda: collective(*tensors, opts), deliver)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU under one that says it is on a GPU."""
    return getattr(tensor, "on_cpu", tensor).detach()


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(0xFF)


def _make(store: Any, rank: int, size: int, timeout: Any) -> StandIn:
    return StandIn(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
dist.Backend.register_backend(GPU_NAME, _make, devices=["cuda"])
