"""Averages the gradients of everything a run trains, wherever an optimizer steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients import drift
from torchbearer_ddp.gradients.exchange import Options, Trained
from torchbearer_ddp.gradients.header import MAX_GROUPS, MODULUS, RankReport, StepSummary
from torchbearer_ddp.gradients.hooks import GradientOrder, Marks, name_hooks
from torchbearer_ddp.gradients.known_optimizers import KnownOptimizers
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.gradients.spare import Spare
from torchbearer_ddp.gradients.weights import Average, Weights
from torchbearer_ddp.group import agreement, layouts, replicas, trained
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.group.waiting import Wait, complete
from torchbearer_ddp.log import announce

_WRAPPED = "the model is wrapped in DistributedDataParallel, which averages the gradients"


class Averager:
    """Keeps a reducer for what is trained, and makes it anew when that changes."""

    def __init__(self, options: Options, skip: Iterable[Any] = ()) -> None:
        self._options = options
        self.skip = list(skip)
        self._marks = Marks()
        self._parameters: trained.Named = []
        self._optimizers = KnownOptimizers()
        #: All parameters, and those of them that are left to each rank or to torch's DDP.
        self._known: set[int] = set()
        self._left_out: frozenset[int] = frozenset()
        #: The group of what an optimizer trains, by the optimizer's number.
        self._groups: dict[int, int] = {}
        self._order = GradientOrder([])
        #: Which parameters require a gradient, and a checksum of it.
        self._flags: list[bool] = []
        self._frozen = 0
        self._outside: list[torch.nn.Parameter] = []
        #: Parameters that no callback has made equal on all ranks.
        self._strangers: trained.Named = []
        #: Optimizers, by number, whose own step has made an exchange.
        self._at_step: set[int] = set()
        #: Optimizers that have made a step, and those averaged since their last one.
        self._stepped, self._done = set[int](), set[int]()
        #: Groups whose gradients are a sum on top of a sum.
        self._mixed = 0
        self._kinds: list[Any] = []
        #: The weight of a regular batch, the same on every rank; 0 as long as it is not known.
        self.regular = 0.0
        #: The batch size of the loader, if it is known: the first batch may be a short one.
        self.expected = 0.0
        self._is_current = False
        #: True if messages of a backward pass that failed are still under way.
        self._failed = False
        self._announced = False
        self._spare = Spare()
        self._trained: list[Trained] = []
        #: None until the first exchange, and after :meth:`close`.
        self.reducer: Reducer | None = None

    def track(self, state: Any) -> None:
        """Sets what is trained from here on; a reducer for something else is closed."""
        wrapped = trained.averaged_by_torch(state)
        if wrapped and not self._announced:
            announce(_WRAPPED)
        found = trained.parameters(state, [*self.skip, *wrapped])
        optimizers = trained.optimizers(state)
        kinds: list[Any] = [(name, *_kind(parameter)) for name, parameter in found]
        kinds += map(id, optimizers.values())
        if kinds != self._kinds:
            before = self._known
            self.forget()
            self._kinds = kinds
            self._parameters = found
            if before:  # in this run: each rank has made them with its own random numbers
                self._strangers = [(name, p) for name, p in found if id(p) not in before]
            self._optimizers = KnownOptimizers(optimizers)
            left_out = [p for each in [*self.skip, *wrapped] for p in trained.parameters_of(each)]
            self._left_out = frozenset(map(id, left_out))
            self._known = {*self._left_out, *(id(parameter) for _, parameter in found)}
            self._order = GradientOrder([parameter for _, parameter in found])

    def name_of(self, optimizer: torch.optim.Optimizer) -> str:
        """The name of an optimizer, for messages."""
        return self._optimizers.name(self._optimizers.number(optimizer))

    def begin_step(self, *, sums: bool) -> None:
        """Begins a step: an average of the step before is no average of this one."""
        self._marks.begin_step()
        everything = [p for _, p in self._parameters] if sums or self.reducer is None else []
        self._marks.note_left(everything if self.reducer is None else self.reducer.without_views)
        if sums:  # backward must not add to them without a word
            self._marks.note_before(everything)

    def begin(self, average: Average, weight: float) -> None:
        """Announces a backward pass, whose gradients may travel while it runs."""
        if self.reducer is not None and self.reducer.is_outdated:
            self.close()  # before anything is sent
        if self.reducer is not None:
            self.reducer.begin(average, weight)
            self._is_current = True

    def needs_average(self, optimizer: torch.optim.Optimizer, *, is_main: bool) -> bool:
        """True if an optimizer is about to step on gradients that were not averaged.

        The same on every rank where all ranks step: an optimizer other than the Trial's makes an
        exchange at its first step, and at every step after one that it has made, also on a rank
        that has no gradient for it this time; unless the Trial's backward has averaged them.
        """
        number = self._optimizers.number(optimizer)
        done = number in self._done
        self._done.discard(number)
        own = self._take_in(optimizer)
        if not own:
            return False
        expected = number in self._at_step or (not is_main and number not in self._stepped)
        self._stepped.add(number)
        needed = self.has_new_gradient(own) or (expected and not done)
        if needed:
            self._at_step.add(number)
        return needed

    def has_new_gradient(self, own: frozenset[int]) -> bool:
        """True if any of these parameters has a gradient that was not averaged."""
        if self.reducer is None:
            return any(self._marks.needs_average(p) for _, p in self._parameters if id(p) in own)
        return self.reducer.has_new_gradient(own) or any(
            self._marks.needs_average(parameter)
            for parameter in self._outside
            if id(parameter) in own
        )

    def reduce(
        self,
        group: Group,
        report: RankReport,
        average: Average,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> StepSummary:
        """Replaces every new gradient by its average over all ranks.

        ``optimizer`` is the one that is about to step; None after a backward of the Trial.
        """
        self._order.close()  # after the first backward the order is known
        report.site = 0 if optimizer is None else self._optimizers.number(optimizer) + 1
        only = None if optimizer is None else self._take_in(optimizer)
        flags = [parameter.requires_grad for _, parameter in self._parameters]
        if flags != self._flags:
            self._flags, self._frozen = flags, zlib.crc32(bytes(flags)) % MODULUS
        report.frozen = self._frozen
        if self.reducer is None or (not self._is_current and self.reducer.is_outdated):
            # No hook has seen this backward: it may have added to what the run before has left.
            self._marks.note_mixed(parameter for _, parameter in self._parameters)
            self._remake(group, report)
        self._is_current = False
        if self._outside:
            report.regroup = any(
                self._marks.needs_average(each)
                for each in self._outside
                if only is None or id(each) in only
            )
        summary = self._reduce(group, report, average, only)
        if summary.regroup:
            self._remake(group, report)
            report.regroup = False
            summary = self._reduce(group, report, average, only)
        for number in range(len(self._optimizers)):
            if number != report.site - 1 and summary.groups >> self._group(number) & 1:
                self._done.add(number)
        return summary

    def combine(self, average: Average, losses: Sequence[float], weights: Sequence[float]) -> float:
        """The loss that one process would have."""
        return Weights(len(losses), self.regular).combine(average, losses, weights)

    def check_mixed(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises, on every rank, if an optimizer is about to step on a sum of sums."""
        if self._mixed and any(
            self._mixed >> self._group(self._optimizers.owner(parameter)) & 1
            for parameter in trained.parameters_of(optimizer)
            if parameter.grad is not None
        ):
            raise DesyncError(
                f"The loss is a sum, and {type(optimizer).__name__} is about to step on gradients "
                "to which backward added after they were summed over the ranks, so the first part "
                "would count once for each rank. Call zero_grad(set_to_none=True), as is the "
                "default, before each backward pass, and freeze what no optimizer trains; "
                "SyncGradients(accumulate=...) adds up batches."
            )

    def rest(self, group: Group | None) -> None:
        """Ends a run: its buckets are kept for the next one, unless an exchange was cut short."""
        if self.reducer is not None and group is not None:
            self._spare.keep(self.reducer, group, self._parameters, self._trained)
        self.forget()

    def forget(self) -> None:
        """Drops all of it, also after a run that failed; the gradients stay valid."""
        self._order.close()
        self._failed |= self.reducer is not None and self.reducer.is_sending
        self.close()
        self._marks = Marks()
        self._kinds, self._parameters, self._outside, self._strangers = [], [], [], []
        self._known, self._groups, self._optimizers = set(), {}, KnownOptimizers()
        self._at_step, self._stepped, self._done, self._mixed = set(), set(), set(), 0

    def close(self) -> None:
        """Releases the buckets; the gradients stay valid, in memory of their own."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None

    def _take_in(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        """Adds parameters of an optimizer that are not known yet; returns all that are averaged."""
        identities = self._optimizers.identities(optimizer)
        if not identities <= self._known:
            own = trained.parameters_of(optimizer)
            number = self._optimizers.number(optimizer)
            name = self._optimizers.name(number)
            new = [parameter for parameter in own if id(parameter) not in self._known]
            named = [(f"{name}, parameter {index}", each) for index, each in enumerate(new)]
            self._parameters = [*self._parameters, *named]
            self._outside = [*self._outside, *new]
            self._strangers += named
            self._known |= identities
            self._optimizers.set_owner(number, new)
            announce(
                f"averaging {len(new)} more parameters, which {name} trains: they were not in the "
                "state of the Trial or on a callback when this epoch began"
            )
        return identities - self._left_out if self._left_out else identities

    def _group(self, number: int) -> int:
        """The group of an optimizer's parameters; what none of them trains is in the first."""
        return self._groups.get(number, 0)

    def _reduce(
        self, group: Group, report: RankReport, average: Average, only: frozenset[int] | None
    ) -> StepSummary:
        assert self.reducer is not None
        summary = self.reducer.reduce(report, average, only)
        self._check(group, summary)
        if max(summary.weights) > self.regular:
            # A larger one than any so far, perhaps after a first batch that was short.
            self.regular = max(summary.weights)
            self.reducer.weights = Weights(group.member.world_size, self.regular)
        self._mixed &= ~summary.groups
        if average is Average.SUM:
            self._mixed |= summary.mixed
        return summary

    def _check(self, group: Group, summary: StepSummary) -> None:
        """Raises, on every rank, if the ranks are at different places of the program."""
        if summary.together:
            return
        if len(set(summary.sites)) > 1 or len(set(summary.batches)) > 1:
            pairs = enumerate(zip(summary.sites, summary.batches, strict=True))
            places = [
                f"rank {r} {self._place(int(site))} in batch {batch:.0f}"
                for r, (site, batch) in pairs
            ]
            group.broken = True
            raise DesyncError(
                f"The ranks exchanged gradients at different places: {'; '.join(places)}. Every "
                "rank must take the same backward passes and optimizer steps: look for a batch "
                "or a step that only some ranks skip."
            )
        if len(set(summary.frozen)) > 1:
            self._agree_on_frozen()

    def _place(self, site: int) -> str:
        name = self._optimizers.name(site - 1)
        return f"before the step of {name}" if site else "after a backward pass"

    def _agree_on_frozen(self, **extra: Any) -> list[dict[str, Any]]:
        return agreement.agree(
            {
                name: f"{layouts.described(parameter)}, requires_grad={parameter.requires_grad}"
                for name, parameter in self._parameters
            },
            "what is trained",
            "Train, freeze and unfreeze the same parameters, in one memory format, on every rank.",
            extra=extra,
        )

    def _remake(self, group: Group, report: RankReport) -> None:
        """Makes the reducer for every parameter that has, or may get, a gradient on any rank."""
        indexed = list(enumerate(parameter for _, parameter in self._parameters))
        everyone = self._agree_on_frozen(
            failed=self._failed,
            order=self._order.indices,
            active=[i for i, p in indexed if p.requires_grad or p.grad is not None],
            sparse=[i for i, p in indexed if p.grad is not None and p.grad.is_sparse],
            strangers=replicas.fingerprint(self._strangers),
            weight=report.weight,
            expected=self.expected,
            regular=self.regular,
            spare=self._spare.is_ready(group, self._parameters),
        )
        if not all(each["spare"] for each in everyone):
            self._spare.drop()
        if any(each["failed"] for each in everyone):
            complete(group.renew_gradients, Wait(group, "a new channel for gradients"))
        self._failed = False
        drift.align_strangers(self._strangers, [each["strangers"] for each in everyone])
        self._strangers = []
        weights = [max(each["weight"], each["expected"]) for each in everyone]
        self.regular = max(each["regular"] for each in everyone) or max(weights) or 1.0
        active = {index for each in everyone for index in each["active"]}
        sparse = {index for each in everyone for index in each["sparse"]}
        first = everyone[0]["order"]  # rank zero's order for all
        known = set(first)
        order = [*first, *(i for i, _ in indexed if i not in known)]
        wanted = [index for index in order if index in active]
        self.close()
        self._outside = [parameter for i, parameter in indexed if i not in active]
        owners = {i: self._optimizers.owner(parameter) for i, parameter in indexed if i in active}
        self._groups = {
            owner: min(number, MAX_GROUPS - 1)
            for number, owner in enumerate(sorted(set(owners.values())))
        }
        self._trained = [
            Trained(p, self._groups[owners[i]], i in sparse, self._optimizers.trains(p))
            for i, p in [(i, self._parameters[i][1]) for i in wanted]
        ]
        rule = Weights(group.member.world_size, self.regular)
        self.reducer = self._spare.take(self._trained)
        if self.reducer is None:
            self.reducer = Reducer(group, self._trained, self._options, rule, self._marks)
        else:
            self.reducer.reopen(rule, self._marks)
        if not self._announced:
            name_hooks(self._parameters)
            announce(self.reducer.choice)
            self._announced = True


def _kind(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    """What buckets depend on; a parameter at rest is frozen, with no gradient left to average."""
    rests = not parameter.requires_grad and parameter.grad is None
    layout = parameter.dtype, parameter.device, parameter.shape, parameter.stride()
    return id(parameter), *layout, rests
