"""Averages gradients over all ranks: one header, one message per bucket, views, not copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients import buckets as layout
from torchbearer_ddp.gradients.header import Header, RankReport, StepSummary, in_step
from torchbearer_ddp.gradients.hooks import EarlyCopies, EarlySends
from torchbearer_ddp.gradients.transports import choose
from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait


@dataclass
class Timing:
    """Where the time of one step went, in seconds.

    Args:
        compute: This rank's own work since the last exchange.
        waiting: For the slowest rank to be done with its own.
        moving: The exchange itself.
    """

    compute: float
    waiting: float
    moving: float


@dataclass(frozen=True)
class Options:
    """How gradients are exchanged.

    Args:
        transport: The name of the transport, or ``auto``.
        weighted: True to weight each rank by its batch size.
        bucket_bytes: The size of a bucket, or None for what suits the transport.
        compress: ``bf16`` or ``fp16`` on the wire, or None.
    """

    transport: str = "auto"
    weighted: bool = False
    bucket_bytes: int | None = None
    compress: str | None = None


class Reducer:
    """Exchanges the gradients of a fixed set of parameters.

    A step is :meth:`begin`, then backward (which may send full buckets on its own), then
    :meth:`reduce`.

    Args:
        group: The group of all ranks.
        parameters: What is trained, the same on every rank, in the order of their gradients.
        sparse: The parameters (by identity) whose gradients are sparse.
        options: How to exchange them.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[torch.nn.Parameter],
        sparse: set[int],
        options: Options,
    ) -> None:
        world = group.member.world_size
        self._group = group
        self._weighted = options.weighted
        self._dense = [p for p in parameters if id(p) not in sparse]
        self._sparse = [p for p in parameters if id(p) in sparse]
        header = Header.size(world, len(self._dense))
        self._transport, self.choice = choose.choose(
            group,
            options.transport,
            layout.device_of(self._dense),
            sum(p.numel() * p.element_size() for p in self._dense) + 8 * header,
            options.compress,
        )
        self._buckets = layout.plan(
            self._dense, options.bucket_bytes or self._transport.bucket_bytes
        )
        layout.allocate(self._buckets, self._dense, self._transport, header)
        self._header = layout.header_of(self._buckets, group.member.rank, world)
        self._views = layout.views(self._buckets, len(self._dense))
        self._sends = EarlySends(self._dense, self._buckets) if self._transport.overlaps else None
        # What fits one bucket is still in the cache after backward, and a hook has its price too.
        early = not self._transport.overlaps and len(self._buckets) > 1
        self._copies = EarlyCopies(self._dense, self._views) if early else None
        self._step = 0
        self._since = time.perf_counter()
        self.timing = Timing(0.0, 0.0, 0.0)

    def close(self) -> None:
        """Gives back the buckets' memory; gradients that lie in it are copied out first."""
        for parameter, view in zip(self._dense, self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
        self._stop_overlap()
        if self._copies is not None:
            self._copies.close()
        self._transport.close()

    def _stop_overlap(self) -> None:
        if self._sends is not None:
            self._sends.close()
            self._sends = None

    def begin(self, batch_size: int) -> None:
        """Announces a backward pass: from here on gradients are copied or sent as they appear.

        Args:
            batch_size: The number of samples behind the gradients to come.
        """
        if self._copies is not None:
            self._copies.arm()
        if self._sends is None:
            return
        if any(parameter.grad is not None for parameter in self._dense):
            return  # it would be added to in place, perhaps while it is sent
        weight = self._weight(batch_size)

        self._sends.arm(lambda bucket: self._start(bucket, weight))

    def reduce(self, note: RankReport) -> StepSummary:
        """Replaces every gradient by its average over all ranks.

        A parameter that no rank used keeps ``grad is None``; where only some ranks used it, the
        others count as zero.

        Args:
            note: What this rank says; the step and the time are filled in here.

        Raises:
            DesyncError: If the ranks are not at the same step.
        """
        started = time.perf_counter()
        note.step, note.seconds = self._step, started - self._since
        sent, note.again = self._sends.disarm() if self._sends is not None else (0, False)
        if self._copies is not None:
            self._copies.disarm()
        used = [parameter.grad is not None for parameter in self._dense]
        answer = self._exchange(note, used, self._activity(), sent)
        if answer.again:
            # Backward ran more than once, so what was sent on the way was not the whole.
            self._stop_overlap()
            answer = self._exchange(note, used, f"{self._activity()}, again")
        self._hand_out(answer, used)
        if self._sparse:
            self._reduce_sparse(note, answer)
        self._step += 1
        self._group.past_first_step = True
        self._since = time.perf_counter()
        waiting = max(0.0, answer.slowest - note.seconds)
        self.timing = Timing(note.seconds, waiting, max(0.0, self._since - started - waiting))
        return answer

    def _activity(self) -> str:
        return f"the gradients of exchange {self._step}"

    def _weight(self, batch_size: int) -> float:
        """What this rank counts; the sum of batch sizes is only known from the header."""
        return batch_size if self._weighted else 1.0 / self._group.member.world_size

    def _start(self, bucket: layout.Bucket, weight: float) -> None:
        if self._transport.applies_weight:
            self._fill(bucket)
            self._transport.start(bucket.flat, weight)
        else:
            self._fill(bucket, weight)
            self._transport.start(bucket.flat)

    @torch.no_grad()
    def _fill(self, bucket: layout.Bucket, weight: float = 1.0) -> None:
        """Copies the gradients to their places in a bucket; one that is missing counts as zero."""
        sources: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            parameter = self._dense[index]
            if parameter.grad is None:
                view.zero_()
            elif weight != 1.0:
                torch.mul(_gradient(parameter), weight, out=view)
            elif parameter.grad is not view:
                sources.append(_gradient(parameter))
                places.append(view)
        if places:
            torch._foreach_copy_(places, sources)

    def _exchange(
        self, note: RankReport, used: list[bool], activity: str, sent: int = 0
    ) -> StepSummary:
        # Only now: what is sent during backward is no wait, and a rank may yet turn elsewhere.
        wait = Wait(self._group, activity)
        self._header.write(note, None if all(used) else used)
        weight = self._weight(note.batch_size)
        for bucket in self._buckets[sent:]:
            # One by one: the first is on its way while the next is filled.
            self._start(bucket, weight)
        for bucket in self._buckets:
            self._transport.finish(bucket.flat, wait)
        answer = self._header.read()
        if not in_step(answer, self._step):
            self._group.broken = True
            steps = "; ".join(f"rank {r} at {step}" for r, step in enumerate(answer.steps))
            raise DesyncError(
                f"The ranks exchanged gradients of different steps: {steps}. Every rank must run "
                "the same number of backward passes: look for a step that only some ranks take."
            )
        return answer

    def _hand_out(self, answer: StepSummary, used: list[bool]) -> None:
        if self._weighted:
            for bucket in self._buckets:
                bucket.flat[: bucket.numel].mul_(1.0 / max(answer.samples, 1.0))
        if all(used):  # used here, so used: nothing to look up
            for parameter, view in zip(self._dense, self._views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
            return
        for parameter, view, somewhere in zip(
            self._dense, self._views, answer.used.tolist(), strict=True
        ):
            parameter.grad = view if somewhere else None

    def _reduce_sparse(self, note: RankReport, answer: StepSummary) -> None:
        """Sparse gradients are gathered: summing them densely would cost the whole table."""
        weight = self._weight(note.batch_size)
        if self._weighted:
            weight /= max(answer.samples, 1.0)
        mine: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for parameter in self._sparse:
            gradient = parameter.grad
            if gradient is None:
                mine.append(None)
            else:
                gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
                mine.append((gradient.indices(), gradient.values() * weight))
        everyone = collectives.all_gather(mine, "the sparse gradients")
        for parameter, *parts in zip(self._sparse, *everyone, strict=True):
            present = [part for part in parts if part is not None]
            parameter.grad = _combine(present, parameter) if present else None


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient as a dense tensor: an operation may give a sparse one unasked."""
    gradient: torch.Tensor = parameter.grad  # type: ignore[assignment]
    return gradient.to_dense() if gradient.is_sparse else gradient


def _combine(
    parts: list[tuple[torch.Tensor, torch.Tensor]], parameter: torch.Tensor
) -> torch.Tensor:
    indices = torch.cat([i for i, _ in parts], dim=1).to(parameter.device)
    values = torch.cat([v for _, v in parts]).to(parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()
