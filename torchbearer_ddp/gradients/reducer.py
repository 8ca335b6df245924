"""Averages gradients over all ranks: one header, one message per bucket, views and no copies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients import buckets as layout
from torchbearer_ddp.gradients import sparse
from torchbearer_ddp.gradients.exchange import Exchange, Options, Trained
from torchbearer_ddp.gradients.header import Header, RankReport, StepSummary, bits
from torchbearer_ddp.gradients.hooks import ChangedGradients, EarlyCopies, EarlySends, Marks
from torchbearer_ddp.gradients.timing import Timing, clock_for
from torchbearer_ddp.gradients.transports.choose import choose
from torchbearer_ddp.gradients.transports.compression import Compression
from torchbearer_ddp.gradients.weights import Average, Weights, counts_nothing
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait

_is_sparse, _dtype = operator.attrgetter("is_sparse"), operator.attrgetter("dtype")


class Reducer:
    """Exchanges the gradients of a fixed set of parameters.

    A step is :meth:`begin`, then backward (which may send full buckets on its own), then
    :meth:`reduce`.

    Args:
        group: The group of all ranks.
        trained: What is trained, the same on every rank, in the order of their gradients.
        options: How to exchange them.
        weights: How much each rank counts.
        marks: Which gradients are new; shared with the reducer before this one.
    """

    def __init__(
        self,
        group: Group,
        trained: Sequence[Trained],
        options: Options,
        weights: Weights | None = None,
        marks: Marks | None = None,
    ) -> None:
        member = group.member
        self._group = group
        self.weights = weights or Weights(member.world_size)
        self._marks = marks or Marks()
        self._parameters = [each.parameter for each in trained]
        self._groups = [each.group for each in trained]
        self._sparse = [index for index, each in enumerate(trained) if each.is_sparse]
        self._stepped = [index for index, each in enumerate(trained) if each.is_stepped]
        dense = {i: each.parameter for i, each in enumerate(trained) if not each.is_sparse}
        header = Header.size(member.world_size, len(trained))
        self._buckets = layout.plan(dense, self._groups, options.bucket_bytes, header)
        compression = Compression.of(options.compress)
        self._memory = None if compression.describe() is None else compression.memory
        self._transport, self.choice = choose(group, options.transport, self._buckets, compression)
        self._tensors = self._transport.tensors
        placed = layout.place(self._buckets, self._tensors, dense)
        self._placed = list(placed.values())
        self._views = [placed.get(index) for index in range(len(trained))]
        self._header = Header(self._tensors[-1][-header:], member.rank, member.world_size)
        self._identities = {
            group: frozenset(id(each.parameter) for each in trained if each.group == group)
            for group in {0, *self._groups}
        }
        self._every_identity = frozenset(map(id, self._parameters))
        self._kinds = self._current_kinds()
        self._header_first = layout.is_alone(
            self._groups, [parameter.dtype for parameter in self._parameters]
        )
        self._sends_early = self._transport.overlaps and not self._header_first
        self._takes_all_at_once = (
            len(self._buckets) == 1
            and self._transport.applies_weight
            and self._buckets[0].indices == [*range(len(trained))]
        )
        self._begun = False
        self._hooks = self._make_hooks()
        self._step, self.timing = 0, Timing()
        self._clock = clock_for(self._buckets[-1].device)

    def _make_hooks(self) -> ChangedGradients:
        watched = (self._parameters, self._views, self._marks)
        if len(self._buckets) == 1:
            # The gradients are still in cache after backward; copying early would cost more.
            return ChangedGradients(*watched)
        if self._sends_early:
            return EarlySends(*watched, self._buckets)
        return EarlyCopies(*watched)

    @property
    def without_views(self) -> list[torch.Tensor]:
        """The parameters whose gradients are in no bucket: the sparse ones."""
        return [self._parameters[index] for index in self._sparse]

    @property
    def is_sending(self) -> bool:
        """True if buckets may be under way: an exchange was begun and not completed."""
        return self._begun

    @property
    def is_outdated(self) -> bool:
        """True once parameters were converted, or a view was moved out of its bucket.

        Converting a module replaces the memory under the views: ``parameter.grad is view`` stays
        true, though the view no longer lies in the bucket.
        """
        return self._current_kinds() != self._kinds

    def _current_kinds(self) -> tuple[list[torch.dtype], list[int]]:
        # At every step, so without Python's own loops.
        places = list(map(torch.Tensor.data_ptr, self._placed))
        return list(map(_dtype, self._parameters)), places

    def has_new_gradient(self, identities: set[int] | frozenset[int]) -> bool:
        """True if any of these parameters has a gradient that was not averaged."""
        marks = self._marks
        if marks.averaged is self._every_identity and not marks.changed:
            return False  # as after most exchanges
        if identities <= marks.averaged and identities.isdisjoint(marks.changed):
            return False
        return any(
            id(parameter) in identities and marks.needs_average(parameter, view)
            for parameter, view in zip(self._parameters, self._views, strict=True)
        )

    def close(self) -> None:
        """Removes the hooks, and copies out the gradients that lie in the buckets."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if view is not None and parameter.grad is view:
                # A converted parameter has no use for a gradient of another kind.
                same = (view.dtype, view.device) == (parameter.dtype, parameter.device)
                parameter.grad = view.clone() if same else None
        self._hooks.close()

    def reopen(self, weights: Weights, marks: Marks) -> None:
        """Begins anew after :meth:`close`, in the same buckets."""
        self.weights, self._marks = weights, marks
        self._hooks = self._make_hooks()
        self._clock, self.timing = clock_for(self._buckets[-1].device), Timing()

    def begin(self, average: Average, weight: float) -> None:
        """Announces a backward pass: from here on gradients are copied or sent as they appear."""
        if self._sends_early:
            if self._begun and all(parameter.grad is None for parameter in self._parameters):
                if self._hooks.sent:
                    self._abandon()
                self._begun = False
            if not self._begun:
                self._begin_memory(average, weight)
            self._begun = True
        if self._hooks.act:
            factor, empty = self.weights.of(average, weight), counts_nothing(average, weight)
            self._hooks.arm(lambda index: self._start(index, factor, empty))

    def reduce(
        self,
        report: RankReport,
        average: Average = Average.WEIGHTED,
        only: frozenset[int] | None = None,
    ) -> StepSummary:
        """Replaces every new gradient by its average over all ranks.

        A parameter that no rank used keeps its ``grad``; where only some ranks used it, the others
        count as zero. The step, the time and the groups are filled into the report here; with
        ``only`` no parameters but these are averaged.

        Raises:
            DesyncError: If the ranks are not at the same step.
        """
        report.step, report.seconds = self._step, self._clock.begin_exchange()
        sent, report.again = self._hooks.disarm()
        self._begun = True
        usual = self._usual_gradients(only)
        used = [True] * len(usual) if usual else self._find_new(report, only)
        # A backward pass that failed has sent a part of its gradients, and nothing is left of them.
        report.failed = sent > 0 and all(each.grad is None for each in self._parameters)
        layouts = sparse.layouts(self._parameters, self._views, used) if report.regroup else None
        exchange = Exchange(report, used, average, counts_nothing(average, report.weight), usual)
        exchange.empty |= report.failed or exchange.is_skipped
        summary = self._exchange(exchange, sent)
        if summary.again:
            # Backward ran more than once, so the buckets sent during the first were incomplete.
            self._sends_early = False
            self._hooks.close()
            self._hooks = self._make_hooks()
            summary = self._exchange(exchange)
        self._hand_out(summary, exchange)
        if summary.regroup:
            sparse.restore_layouts(
                self._parameters, layouts or sparse.layouts(self._parameters, self._views, used)
            )
        self._begun = False
        self._group.past_first_step = True
        self.timing = self._clock.end_exchange(summary.slowest)
        return summary

    def _usual_gradients(self, only: frozenset[int] | None) -> list[torch.Tensor]:
        """All gradients, in the usual case: one group, all of them new and dense."""
        marks = self._marks
        usual = only is None and len(self._identities) == 1 and not marks.mixed
        if usual and self._every_identity <= marks.changed:
            gradients: list[Any] = [parameter.grad for parameter in self._parameters]
            try:
                return [] if any(map(_is_sparse, gradients)) else gradients
            except AttributeError:  # one is None
                return []
        return []

    def _find_new(self, report: RankReport, only: frozenset[int] | None) -> list[bool]:
        """Which parameters have a gradient to average; fills in the groups they are in."""
        marks = self._marks
        used = []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            new = (only is None or id(parameter) in only) and marks.needs_average(parameter, view)
            if new and view is not None and parameter.grad.is_sparse:  # type: ignore[union-attr]
                report.regroup = True
            used.append(new)
        if len(self._identities) > 1:
            report.groups = bits(g for g, new in zip(self._groups, used, strict=True) if new)
        if marks.mixed:
            report.mixed = bits(g for g, i in self._identities.items() if i & marks.mixed)
        return used

    def _keep(self, exchange: Exchange) -> None:
        """Keeps gradients to put back if no rank has a new one in their place."""
        overlaps = self._transport.overlaps
        if exchange.is_full and not overlaps:
            return
        for index in exchange.indices:
            parameter, view, new = self._parameters[index], self._views[index], exchange.used[index]
            gradient = parameter.grad
            if gradient is None or (new and not (overlaps and gradient is view)):
                continue
            if gradient is view:  # the sum overwrites the bucket, and may have to be made again
                gradient = gradient.clone()
            exchange.kept[index] = parameter.grad = self._marks.kept[id(parameter)] = gradient

    def _abandon(self) -> None:
        """Completes the exchange of a backward pass that failed, as every rank does."""
        sent, _ = self._hooks.disarm()
        report = RankReport(step=self._step, weight=0.0, failed=True)
        nothing = [False] * len(self._parameters)
        self._exchange(Exchange(report, nothing, Average.EQUAL, empty=True), sent)
        self._step += 1

    def _start(
        self, index: int, factor: float, empty: bool, usual: list[torch.Tensor] | None = None
    ) -> None:
        """Fills a bucket and sends it; ``usual`` gradients need not be looked at one by one."""
        applied = self._transport.applies_weight
        if usual:
            with torch.no_grad():
                torch._foreach_copy_(self._buckets[index].views, usual)
        else:
            layout.fill(self._buckets[index], self._parameters, 1.0 if applied else factor, empty)
        self._transport.start(index, factor if applied else 1.0)

    def _begin_memory(self, average: Average, weight: float) -> None:
        """Tells what compression remembers how much of a regular step this rank sends."""
        if self._memory is not None:
            part = self.weights.part(average, weight, known=self._header_first)
            self._memory.begin_exchange(part)

    def _exchange(self, exchange: Exchange, sent: int = 0) -> StepSummary:
        report = exchange.report
        if not sent:
            self._begin_memory(exchange.average, report.weight)
        # The timeout starts here: buckets sent during backward do not block.
        wait = Wait(self._group, f"the gradients of exchange {self._step}")
        self._header.write(report, None if exchange.is_full else exchange.used)
        last = len(self._buckets) - 1
        exchange.factor = self.weights.of(exchange.average, report.weight)
        if not self._header_first:
            exchange.indices = range(len(self._parameters))
            self._keep(exchange)
            self._sum(range(last + 1), sent, exchange, wait)
            summary = self._header.read(wait)
            summary.groups = 1
        else:
            self._sum([last], 0, exchange, wait)
            summary = self._header.read(wait)
            if len(self._identities) == 1:
                summary.groups = 1
            exchange.factor = self.weights.share(exchange.average, report.weight, summary.weights)
            chosen = [i for i in range(last) if summary.groups >> self._buckets[i].group & 1]
            exchange.indices = [i for i, g in enumerate(self._groups) if summary.groups >> g & 1]
            self._keep(exchange)
            self._sum(chosen, 0, exchange, wait)
        self._check(summary)
        return summary

    def _sum(self, indices: Sequence[int], sent: int, exchange: Exchange, wait: Wait) -> None:
        usual = exchange.usual if self._takes_all_at_once and not exchange.empty else None
        for index in indices[sent:]:
            # One by one: the first is already being summed while the next is filled.
            self._start(index, exchange.factor, exchange.empty, usual)
        for index in indices:
            self._transport.finish(index, wait)

    def _check(self, summary: StepSummary) -> None:
        if problem := summary.problem(self._step):
            self._group.broken = True
            raise DesyncError(problem)

    def _hand_out(self, summary: StepSummary, exchange: Exchange) -> None:
        correction = 1.0
        if not self._header_first:
            correction = self.weights.correction(exchange.average, summary.weights)
        if self._memory is not None and not summary.failed:
            self._transport.commit()
            self._memory.settle(correction)
        if correction != 1.0:
            for bucket, tensor in zip(self._buckets, self._tensors, strict=True):
                if summary.groups >> bucket.group & 1:
                    tensor[: bucket.numel].mul_(correction)
        # Where every parameter has a new gradient on this rank, the marks need not be read.
        marks = exchange.used if exchange.is_full else summary.used
        in_place = bool(exchange.usual) and not exchange.kept
        if exchange.is_skipped and (any(summary.weights) or any(marks)):
            done = self._marks.averaged
            exchange.drop_old({i for i in self._stepped if id(self._parameters[i]) not in done})
        if not in_place or not all(map(operator.is_, exchange.usual, self._views)):
            self._point_to_views(exchange, marks)
        if self._sparse and (
            sparse_used := [self._parameters[i] for i in self._sparse if marks[i]]
        ):
            factor = exchange.factor * correction
            sparse.reduce(sparse_used, 0.0 if exchange.empty else factor)
        if exchange.is_full:
            self._marks.note_average(self._every_identity)
        else:
            self._marks.note_average(
                frozenset(id(self._parameters[i]) for i in exchange.indices if marks[i])
            )
        self._step += 1

    def _point_to_views(self, exchange: Exchange, marks: Sequence[bool]) -> None:
        """Makes the averages the gradients; where no rank has a new one, puts the old one back."""
        for index in exchange.indices:
            parameter, view = self._parameters[index], self._views[index]
            gradient = view if marks[index] else exchange.kept.get(index)
            if parameter.grad is not gradient and (view is not None or not marks[index]):
                parameter.grad = gradient
