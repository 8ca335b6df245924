"""Averages gradients over all ranks: one header, one message per bucket, views and no copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients import buckets as layout
from torchbearer_ddp.gradients.header import Header, RankReport, StepSummary
from torchbearer_ddp.gradients.hooks import EarlyCopies, EarlySends, GradientHooks
from torchbearer_ddp.gradients.transports.choose import choose
from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait

#: The parts of a sparse gradient: its indices and values.
Sparse = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Timing:
    """Where the time of one step went, in seconds.

    Attributes:
        compute: This rank's own work since the last exchange.
        waiting: Until the slowest rank was done with its own.
        moving: The exchange itself.
    """

    compute: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0


@dataclass(frozen=True)
class Options:
    """How gradients are exchanged.

    Attributes:
        transport: The name of the transport, or ``auto``.
        weighted: True to weight each rank by its batch size.
        bucket_bytes: The size of a bucket, or None for what suits the device.
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
        member = group.member
        self._group = group
        self._weighted = options.weighted
        self._dense = [p for p in parameters if id(p) not in sparse]
        self._sparse = [p for p in parameters if id(p) in sparse]
        header = Header.size(member.world_size, len(self._dense))
        self._buckets = layout.plan(self._dense, options.bucket_bytes, header)
        self._transport, self.choice = choose(
            group, options.transport, self._buckets, options.compress
        )
        self._tensors = self._transport.tensors
        self._views = layout.place(self._buckets, self._tensors, self._dense)
        self._header = Header(self._tensors[-1][-header:], member.rank, member.world_size)
        self._hooks = self._make_hooks()
        self._step = 0
        self._since = time.perf_counter()
        self.timing = Timing()

    def _make_hooks(self) -> GradientHooks:
        if len(self._buckets) == 1:
            # The gradients are still in cache after backward; hooks would only add overhead.
            return GradientHooks()
        if self._transport.overlaps:
            return EarlySends(self._dense, self._buckets)
        return EarlyCopies(self._dense, self._views)

    @property
    def parameters(self) -> int:
        """The number of parameters whose gradients are exchanged."""
        return len(self._dense) + len(self._sparse)

    @property
    def buckets_sent(self) -> int:
        """The number of buckets that the running backward has sent so far."""
        return self._hooks.sent

    def close(self) -> None:
        """Removes the hooks, and copies out the gradients that lie in the buckets."""
        for parameter, view in zip(self._dense, self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
        self._hooks.close()

    def begin(self, batch_size: int) -> None:
        """Announces a backward pass: from here on gradients are copied or sent as they appear."""
        weight = self._weight(batch_size)
        self._hooks.arm(lambda index: self._start(index, weight))

    def reduce(self, report: RankReport) -> StepSummary:
        """Replaces every gradient by its average over all ranks.

        A parameter that no rank used keeps ``grad is None``; where only some ranks used it, the
        others count as zero. The step and the time are filled into the report here.

        Raises:
            DesyncError: If the ranks are not at the same step.
        """
        started = time.perf_counter()
        report.step, report.seconds = self._step, started - self._since
        sent, report.again = self._hooks.disarm()
        used = [parameter.grad is not None for parameter in self._dense]
        activity = f"the gradients of exchange {self._step}"
        summary = self._exchange(report, used, activity, sent)
        if summary.again:
            # Backward ran more than once, so the buckets sent during the first were incomplete.
            self._hooks.close()
            summary = self._exchange(report, used, f"{activity}, again")
        self._hand_out(summary, used)
        if self._sparse:
            samples = max(summary.samples, 1.0) if self._weighted else 1.0
            self._reduce_sparse(self._weight(report.batch_size) / samples)
        self._step += 1
        self._group.past_first_step = True
        self._since = time.perf_counter()
        waiting = max(0.0, summary.slowest - report.seconds)
        self.timing = Timing(report.seconds, waiting, max(0.0, self._since - started - waiting))
        return summary

    def _weight(self, batch_size: int) -> float:
        """The weight of this rank; the sum of batch sizes is only known from the header."""
        return batch_size if self._weighted else 1.0 / self._group.member.world_size

    def _start(self, index: int, weight: float) -> None:
        applied = self._transport.applies_weight
        self._fill(self._buckets[index], 1.0 if applied else weight)
        self._transport.start(index, weight if applied else 1.0)

    @torch.no_grad()
    def _fill(self, bucket: layout.GradientBucket, weight: float) -> None:
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
        self, report: RankReport, used: list[bool], activity: str, sent: int = 0
    ) -> StepSummary:
        # The timeout starts here: buckets sent during backward do not block.
        wait = Wait(self._group, activity)
        self._header.write(report, None if all(used) else used)
        weight = self._weight(report.batch_size)
        for index in range(sent, len(self._buckets)):
            # One by one: the first is already being summed while the next is filled.
            self._start(index, weight)
        for index in range(len(self._buckets)):
            self._transport.finish(index, wait)
        summary = self._header.read()
        if not summary.in_step(self._step):
            self._group.broken = True
            steps = "; ".join(f"rank {r} at {step}" for r, step in enumerate(summary.steps))
            raise DesyncError(
                f"The ranks exchanged gradients of different steps: {steps}. Every rank must run "
                "the same number of backward passes: look for a step that only some ranks take."
            )
        return summary

    def _hand_out(self, summary: StepSummary, used: list[bool]) -> None:
        if self._weighted:
            for bucket, tensor in zip(self._buckets, self._tensors, strict=True):
                tensor[: bucket.numel].mul_(1.0 / max(summary.samples, 1.0))
        # Where every parameter has a gradient on this rank, the marks need not be read.
        marks = used if all(used) else summary.used.tolist()
        for parameter, view, somewhere in zip(self._dense, self._views, marks, strict=True):
            gradient = view if somewhere else None
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _reduce_sparse(self, weight: float) -> None:
        """Gathers the sparse gradients: summing them densely would cost the whole table."""
        mine = [_scaled(parameter.grad, weight) for parameter in self._sparse]
        everyone = collectives.all_gather(mine, "the sparse gradients")
        for parameter, *parts in zip(self._sparse, *everyone, strict=True):
            present = [part for part in parts if part is not None]
            parameter.grad = _combine(present, parameter) if present else None


def _scaled(gradient: torch.Tensor | None, weight: float) -> Sparse | None:
    """A gradient in parts, weighted, if there is one."""
    if gradient is None:
        return None
    sparse = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
    return sparse.indices(), sparse.values() * weight


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient as a dense tensor: an operation may give a sparse one unasked."""
    gradient: torch.Tensor = parameter.grad  # type: ignore[assignment]
    return gradient.to_dense() if gradient.is_sparse else gradient


def _combine(parts: list[Sparse], parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.cat([i for i, _ in parts], dim=1).to(parameter.device)
    values = torch.cat([v for _, v in parts]).to(parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()
