"""Averages gradients over all ranks: one header, one message per bucket, views instead of copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchbearer_ddp import collectives
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.process_group import Group
from torchbearer_ddp.reducer import buckets as layout
from torchbearer_ddp.reducer import choice
from torchbearer_ddp.reducer.header import Answer, Header, Note, in_step
from torchbearer_ddp.waiting import Wait


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


class Reducer:
    """Exchanges the gradients of a fixed set of parameters.

    Args:
        group: The group of all ranks.
        parameters: What is trained, with names, the same on every rank.
        sparse: The parameters (by identity) whose gradients are sparse.
        transport: The name of the transport, or ``auto``.
        weighted: True to weight each rank by its batch size.
        bucket_bytes: The size of a bucket.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: set[int],
        *,
        transport: str,
        weighted: bool,
        bucket_bytes: int,
    ) -> None:
        self._group = group
        self._weighted = weighted
        self._names = [name for name, _ in parameters]
        self._parameters = [p for _, p in parameters]
        self._dense = [p for p in self._parameters if id(p) not in sparse]
        self._sparse = [p for p in self._parameters if id(p) in sparse]
        self._buckets = layout.plan(self._dense, bucket_bytes)
        device = self._buckets[-1].device
        self._transport, self.choice = choice.choose(group, transport, device)
        world = group.member.world_size
        layout.allocate(
            self._buckets,
            self._dense,
            self._transport,
            Header.size(world, len(self._dense)),
        )
        self._header = layout.header_of(self._buckets, group.member.rank, world)
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self._dense)
        for bucket in self._buckets:
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                self._views[index] = view
        # The weights' sum is only known from the header, so a weighted sum is scaled afterwards.
        self._scale = 1.0 if weighted else 1.0 / world
        self._step = 0
        self._since = time.perf_counter()
        self.timing = Timing(0.0, 0.0, 0.0)

    def close(self) -> None:
        """Gives back the buckets' memory; gradients that lie in it are copied out first."""
        for parameter, view in zip(self._dense, self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
        self._transport.close()

    def reduce(self, note: Note) -> Answer:
        """Replaces every gradient by its average over all ranks.

        A parameter that no rank used keeps ``grad is None``; where only some ranks used it, the
        others count as zero.

        Args:
            note: What this rank says; the step is filled in here.

        Raises:
            DesyncError: If the ranks are not at the same step.
        """
        started = time.perf_counter()
        note.step, note.seconds = self._step, started - self._since
        wait = Wait(self._group, f"the gradients of exchange {self._step}")
        used = self._fill(note)
        for bucket in self._buckets:
            self._transport.start(bucket.flat, wait, self._scale)
        for bucket in self._buckets:
            self._transport.finish(bucket.flat, wait)
        answer = self._header.read(1.0 / self._scale)
        self._check(answer)
        self._hand_out(answer, used)
        if self._sparse:
            self._reduce_sparse(note, answer)
        self._step += 1
        self._group.warm = True
        self._since = time.perf_counter()
        waiting = max(0.0, answer.slowest - note.seconds)
        self.timing = Timing(note.seconds, waiting, max(0.0, self._since - started - waiting))
        return answer

    def _fill(self, note: Note) -> list[bool] | None:
        """Copies the gradients to their places; returns which there are, or None for all."""
        sources: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        missing = False
        used = []
        for parameter, view in zip(self._dense, self._views, strict=True):
            gradient = parameter.grad
            used.append(gradient is not None)
            if gradient is None:
                missing = True
                view.zero_()
            elif gradient is not view:
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
                places.append(view)
        if places:
            torch._foreach_copy_(places, sources)
        if self._weighted:
            for bucket in self._buckets:
                bucket.flat[: bucket.numel].mul_(note.batch_size)
        marks = used if missing else None
        self._header.write(note, marks)
        return marks

    def _check(self, answer: Answer) -> None:
        if in_step(answer, self._step):
            return
        self._group.broken = True
        steps = "; ".join(f"rank {r} at {step}" for r, step in enumerate(answer.steps))
        raise DesyncError(
            f"The ranks exchanged gradients of different steps: {steps}. Every rank must run the "
            "same number of backward passes: look for a step that only some ranks take."
        )

    def _hand_out(self, answer: Answer, used: list[bool] | None) -> None:
        if self._weighted:
            for bucket in self._buckets:
                bucket.flat[: bucket.numel].mul_(1.0 / self._divisor(answer))
        if used is None:  # used here, so used: nothing to look up
            for parameter, view in zip(self._dense, self._views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
            return
        for parameter, view, somewhere in zip(
            self._dense, self._views, answer.used.tolist(), strict=True
        ):
            parameter.grad = view if somewhere else None

    def _divisor(self, answer: Answer) -> float:
        if not self._weighted:
            return float(self._group.member.world_size)
        return max(answer.samples, 1.0)

    def _reduce_sparse(self, note: Note, answer: Answer) -> None:
        """Sparse gradients are gathered: summing them densely would cost the whole table."""
        weight = (note.batch_size if self._weighted else 1) / self._divisor(answer)
        mine = []
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


def _combine(
    parts: list[tuple[torch.Tensor, torch.Tensor]], parameter: torch.Tensor
) -> torch.Tensor:
    indices = torch.cat([i for i, _ in parts], dim=1).to(parameter.device)
    values = torch.cat([v for _, v in parts]).to(parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()
