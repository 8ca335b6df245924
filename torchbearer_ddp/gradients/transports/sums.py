"""The sum of one tensor over the ranks of a channel: as it is, or in fewer bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchbearer_ddp.gradients.transports.codecs import Codec
from torchbearer_ddp.gradients.transports.memory import Residual
from torchbearer_ddp.group.waiting import POLL_SECONDS, Wait, waiter

#: The first is the newer name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: How torch begins the message of an error in a callback of a Future, and words of the network.
_IN_CALLBACK = "error when running the callback"
_NETWORK = ("gloo", "onnection", "NCCL", "imed out")


class Sum:
    """Sums one tensor over the ranks of a channel in place: start, advance and finish, in order."""

    def __init__(self, channel: Any, tensor: torch.Tensor) -> None:
        self._channel = channel
        self._tensor = tensor
        self._wait_for = waiter(channel)
        self._work: Any = None

    def start(self) -> None:
        """Sends this rank's numbers."""
        self._work = dist.all_reduce(self._tensor, group=self._channel, async_op=True)

    def advance(self, wait: Wait) -> None:
        """Sends what depends on the numbers of other ranks: nothing, the backend does all of it."""

    def finish(self, wait: Wait) -> None:
        """Waits until the tensor holds the sum."""
        self._wait_for(self._work, wait)
        self._work = None

    def commit(self) -> None:
        """Says that the sum counts."""


class Turns:
    """Lets what several threads make ready happen in one order, the same on every rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given = self._next = 0
        self._ready: dict[int, Callable[[], None]] = {}

    def take(self) -> int:
        """The next number."""
        self._given += 1
        return self._given - 1

    def ready(self, number: int, action: Callable[[], None]) -> None:
        """Runs the action when it is its turn: now, or in the thread that makes it possible."""
        with self._lock:
            self._ready[number] = action
            while self._next in self._ready:
                self._ready.pop(self._next)()
                self._next += 1


@dataclass
class Lanes:
    """Channels of the same ranks.

    Attributes:
        first: For what is sent first.
        second: For what depends on the numbers of other ranks, sent from other threads; None if it
            is sent on the first channel, by the thread that waits.
        turns: The order of what is sent on the second channel.
    """

    first: Any
    second: Any = None
    turns: Turns = field(default_factory=Turns)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.first)


def works_by_itself(channel: Any) -> bool:
    """True if a channel has threads of its own, in which the end of an exchange can be handled."""
    return str(dist.get_backend(channel)) == "gloo"


class CodedSum(Sum):
    """Fewer bytes: numbers travel in a code, but are added in single precision.

    Two ranks send each other all of their numbers. More ranks, if they have a second channel, get
    one slice from every other rank, add it up and send its sum to all, in the same code. Every rank
    takes the coded numbers, its own too, so the replicas stay equal. What the code loses can be
    added to the next step.

    With gloo all of it runs while backward goes on: the threads of the channel add and send.
    """

    def __init__(
        self,
        lanes: Lanes,
        tensor: torch.Tensor,
        codec: Codec,
        residual: Callable[[str, torch.Tensor], Residual] | None = None,
    ) -> None:
        super().__init__(lanes.first, tensor)
        self._lanes = lanes
        self._codec = codec
        ranks = lanes.size
        self._is_direct = ranks <= 2 or (works_by_itself(lanes.first) and lanes.second is None)
        step = tensor.numel() if self._is_direct else -(-tensor.numel() // ranks)
        self._step = step = -(-step // codec.block) * codec.block
        #: The slices of the tensor; the last ones may be shorter, or empty.
        self._slices = self._cut(tensor, step)
        self._received = torch.zeros(
            ranks, codec.size(step), dtype=torch.uint8, device=tensor.device
        )
        self._sent = torch.zeros_like(self._received[:1] if self._is_direct else self._received)
        self._me = dist.get_rank(lanes.first)
        own = self._slices[self._me]
        #: The sum of this rank's slice, and what another rank adds to it.
        self._total = torch.zeros_like(own)
        self._scratch = torch.zeros_like(tensor if self._is_direct else own)
        self._lost = residual("sent", tensor) if residual else None
        self._lost_sum = residual("summed", own) if residual and not self._is_direct else None
        self._future: Any = None

    def _cut(self, tensor: torch.Tensor, step: int) -> list[torch.Tensor]:
        return [tensor[i * step : (i + 1) * step] for i in range(self._lanes.size)]

    def bind(self, tensor: torch.Tensor) -> bool:
        """Sums this tensor from now on; False if it is not like the one before."""
        before = self._tensor
        if (tensor.numel(), tensor.device) != (before.numel(), before.device):
            return False
        self._tensor, self._slices = tensor, self._cut(tensor, self._step)
        return True

    def start(self) -> None:
        """Sends this rank's numbers; where the channel has threads, these do the rest."""
        if works_by_itself(self._channel):
            self._future = self.future()
        else:
            self._send()

    def advance(self, wait: Wait) -> None:
        """Adds up this rank's slice, and sends the sum to all, if no other thread does it."""
        if self._future is None and not self._is_direct:
            self._wait_for(self._work, wait)
            self._add_slice()
            self._work = self._send_sum(self._channel)

    def finish(self, wait: Wait) -> None:
        """Waits until the tensor holds the sum."""
        if self._future is not None:
            settled(self._future, wait)
            self._future = None
        else:
            super().finish(wait)
            self._take()

    def commit(self) -> None:
        """Says that the sum counts: what it has lost is added to the next one."""
        for each in (self._lost, self._lost_sum):
            if each is not None:
                each.commit()

    def future(self) -> Any:
        """Sends this rank's numbers, and returns a Future of the sum."""
        if not works_by_itself(self._channel):  # a GPU keeps the order by itself
            self._send()
            return self._work.get_future().then(self._rest_of_stream)
        devices: Any = None if self._tensor.device.type == "cpu" else [self._tensor.device]
        result: Any = torch.futures.Future(devices=devices)
        turn = None if self._is_direct else self._lanes.turns.take()
        self._send()

        def on_first(done: Any) -> None:
            with _errors_go_to(result):
                done.wait()
                if turn is not None:
                    self._add_slice()
                    self._lanes.turns.ready(turn, send_sum)
                    return
                self._take()
                result.set_result(self._tensor)
                return
            if turn is not None:  # it failed: the next ones must not wait for it
                self._lanes.turns.ready(turn, lambda: None)

        def send_sum() -> None:
            with _errors_go_to(result):
                work = self._send_sum(self._lanes.second)
                work.get_future().add_done_callback(on_second)

        def on_second(done: Any) -> None:
            with _errors_go_to(result):
                done.wait()
                self._take()
                result.set_result(self._tensor)

        self._work.get_future().add_done_callback(on_first)
        return result

    def _rest_of_stream(self, _: Any) -> torch.Tensor:
        if not self._is_direct:
            self._add_slice()
            self._send_sum(self._channel).get_future().wait()
        self._take()
        return self._tensor

    def _send(self) -> None:
        if self._lost is not None:
            self._lost.add_to(self._tensor)
        numbers = [self._tensor] if self._is_direct else self._slices
        for part, row in zip(numbers, self._sent, strict=True):
            self._codec.encode(part, row)
        if self._is_direct:
            self._work = _all_gather(
                self._received.view(-1), self._sent.view(-1), group=self._channel, async_op=True
            )
        else:
            self._work = dist.all_to_all_single(
                self._received.view(-1), self._sent.view(-1), group=self._channel, async_op=True
            )
        if self._lost is not None:
            lost, at = self._lost.next, 0
            for part, row in zip(numbers, self._sent, strict=True):
                self._note_loss(part, row, lost[at : at + len(part)])
                at += len(part)
            self._lost.note_next()

    def _add_slice(self) -> None:
        self._add_rows(self._total)
        if self._lost_sum is not None:
            self._lost_sum.add_to(self._total)
        self._codec.encode(self._total, self._sent[0])
        if self._lost_sum is not None:
            self._note_loss(self._total, self._sent[0], self._lost_sum.next)
            self._lost_sum.note_next()

    def _send_sum(self, channel: Any) -> Any:
        return _all_gather(self._received.view(-1), self._sent[0], group=channel, async_op=True)

    def _take(self) -> None:
        if self._is_direct:
            self._add_rows(self._tensor)
            return
        for part, row in zip(self._slices, self._received, strict=True):
            self._codec.decode(row, part)

    def _add_rows(self, total: torch.Tensor) -> None:
        """Adds up what all ranks have sent, in the order of the ranks."""
        first, *others = self._received
        self._codec.decode(first, total)
        for row in others:
            self._codec.decode(row, self._scratch)
            total.add_(self._scratch)

    def _note_loss(self, numbers: torch.Tensor, row: torch.Tensor, lost: torch.Tensor) -> None:
        self._codec.decode(row, lost)
        torch.sub(numbers, lost, out=lost)
        # A number that is not finite is lost; to look first would wait for the device.
        lost.nan_to_num_(0.0, 0.0, 0.0)


@contextlib.contextmanager
def _errors_go_to(future: Any) -> Iterator[None]:
    """Gives an exception to a Future instead of raising it in a thread that nobody watches."""
    try:
        yield
    except Exception as error:
        future.set_exception(error)


def settled(future: Any, wait: Wait) -> Any:
    """Waits for a Future, not longer than any other wait, and returns its value."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    while not done.wait(min(POLL_SECONDS, wait.timeout)):
        wait.poll()
    try:
        return future.wait()
    except RuntimeError as error:
        text = str(error)
        if _IN_CALLBACK in text and not any(word in text for word in _NETWORK):
            raise  # of the hook itself
        raise wait.connection_error(error) from error
