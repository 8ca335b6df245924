"""Which average suits the loss: decided once, on the first batch, alike on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
import torchbearer
from torchbearer.bases import base_closure

from torchbearer_ddp import checked
from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.gradients.loss import KINDS, Verdict, classify, combine, divisor, is_value_of
from torchbearer_ddp.gradients.target_weights import EarlyTotal, class_targets, is_class_loss
from torchbearer_ddp.gradients.weights import Average, as_sent
from torchbearer_ddp.group import collectives
from torchbearer_ddp.log import announce

CHOICES = ("mean", "sum", "coupled")
#: The loss of torchbearer's own closure is the criterion's, even if callbacks have added to it.
_STANDARD_CLOSURE = base_closure.__qualname__ + ".<locals>.closure"
#: How many batches are looked at where one cannot tell.
_TRIES = 3
#: Kinds that do not depend on what callbacks and closures add to a loss.
_KEPT = ("mean", "weighted")
_OWN_KEY = Verdict("unknown", "the closure keeps it under a key of its own")
_SKIPPED = Verdict("unknown", "the closure has skipped the batch", later=True)
_PAGE = "See the page on losses in the documentation."
_LINES = {
    "sum": "the loss is a sum over its samples, so the gradients of all ranks are added",
    "weighted": "the loss divides by the weights of its targets, so gradients are weighted by them",
    "coupled": "the loss couples the samples of a batch: {ranks} ranks compute {ranks} losses, "
    "each of its own batch, and average their gradients, which is not the loss of one process. "
    + _PAGE
    + " SyncGradients(loss='coupled') accepts it without this line",
    "unknown": "it cannot be told whether the loss is a mean or a sum over its samples ({reason}); "
    "it is taken for a mean. " + _PAGE + " SyncGradients(loss='mean') or loss='sum' decides it",
}
_CHANGED = (
    "the kind of the loss is {later!r} on this batch, but was {known!r} on the first one, by which "
    "the gradients of all ranks are combined. " + _PAGE + " SyncGradients(loss=...) decides it"
)


class LossVerdicts:
    """What is known of the losses of a run: one for each backward pass of a step.

    Args:
        loss: One of :data:`CHOICES`, or None to find out.
        weight: Called with the state: what the loss of its batch divides by. Or None.
        weighted: False to count all ranks equally.
    """

    def __init__(
        self, loss: str | None, weight: Callable[[Any], float] | None, weighted: bool | None
    ) -> None:
        if loss is not None and loss not in CHOICES:
            raise ValueError(
                f"loss is {loss!r}: it is one of {', '.join(map(repr, CHOICES))}, or None to find "
                "out at the first step."
            )
        self._chosen = "mean" if weight is not None and loss is None else loss
        self._weight = weight
        self._equal = weighted is False
        self.clear()

    def clear(self) -> None:
        """Forgets what was found."""
        #: What the run before has found and may hold for this one: kinds, criteria and closure.
        self._before: tuple[list[str], list[tuple[Any, str | None]], Any] | None = None
        #: The closure of the Trial that computes the losses; None before the first is found.
        self._closure: Any = None
        #: The kinds found so far, in the order of the backward passes of a step.
        self.kinds: list[str] = []
        #: The criterion and reduction of each; a description if found before a restart.
        self._criteria: list[tuple[Any, str | None]] = []
        #: How often each of them was looked at in vain.
        self._tries: dict[int, int] = {}
        self._seen = 0
        #: The epoch and batch of the last look, and the losses that were looked at there.
        self._place = (-1, -1)
        self._looked: set[int] = set()
        self._doubted: set[int] = set()
        self._taken_for_means: set[str] = set()
        self.early_total = EarlyTotal()

    def begin(self) -> None:
        """Begins a run: forgets what was found, unless :meth:`keep` is called.

        A loss of torch that is a mean, weighted or not, in the standard closure stays one, whatever
        callbacks add.
        """
        before = self.kinds, self._criteria, self._closure
        self.clear()
        if _is_standard(before[2]) and all(
            kind in _KEPT and _is_of_torch(criterion)
            for kind, (criterion, _) in zip(*before[:2], strict=True)
        ):
            self._before = before

    def kept(self, state: Any) -> list[list[str]]:
        """What :meth:`keep` would keep: if ranks differ in it, all of them have to look again."""
        kinds, criteria, closure = self._before or ([], [], None)
        now = state.get(torchbearer.CRITERION)
        if _closure_of(state) is not closure or any(
            known is not now or before != _reduction(now) for known, before in criteria
        ):
            self._before = None
            return []
        return [[kind, _describe(each)] for kind, (each, _) in zip(kinds, criteria, strict=True)]

    def keep(self, *, alike: bool) -> None:
        """Keeps what the run before has found, if it is alike on all ranks."""
        if alike and self._before is not None and not self.kinds:
            self.kinds, self._criteria, self._closure = self._before
        self._before = None

    def state_dict(self) -> list[list[str]]:
        """The kinds found so far, and a description of the criterion of each."""
        pairs = zip(self.kinds, self._criteria, strict=True)
        return [[kind, _describe(criterion)] for kind, (criterion, _) in pairs]

    def load_state_dict(self, found: list[list[str]]) -> None:
        """Takes what was found before a restart."""
        where = "what was found out about the losses"
        for kind, _ in checked.items(checked.items(checked.text(), 2))(found, where):
            checked.one_of(*KINDS)(kind, where)
        self.kinds = [kind for kind, _ in found]
        self._criteria = [(description, None) for _, description in found]

    def kind(self, number: int = 0) -> str | None:
        """The kind of one loss of a step; None as long as it is not known."""
        if self._chosen is not None:
            return self._chosen
        return self.kinds[number] if number < len(self.kinds) else None

    def average(self, number: int) -> Average:
        """What the gradients of one loss become."""
        if self.kind(number) == "sum":
            return Average.SUM
        return Average.EQUAL if self._equal else Average.WEIGHTED

    def weight(self, state: Any, number: int) -> float:
        """What one loss divides by at this batch."""
        if self._weight is not None:
            return as_sent(float(self._weight(state)))
        kind = self.kind(number) or "unknown"
        criterion = state.get(torchbearer.CRITERION)
        if kind == "mean" and self._chosen is None and is_class_loss(criterion):
            target = class_targets(state)
            if target is not None and target.dim() > 1:  # it had one for each sample when found
                kind = "weighted"
        return as_sent(divisor(criterion, state, kind, self.early_total.of))

    def of_another_optimizer(self, state: Any, name: str) -> tuple[Average, float]:
        """How the gradients count that an optimizer steps on outside of the Trial's closure.

        Their loss is not known: what the user has decided for all losses holds for it, or it is
        taken for a mean, with a line that names the optimizer.
        """
        if self._chosen is None and name not in self._taken_for_means:
            self._taken_for_means.add(name)
            announce(
                f"{name} steps on a loss of its own, which is taken for a mean over the samples of "
                "the batch; SyncGradients(loss=...) decides it for all losses"
            )
        average = Average.EQUAL if self._equal else Average.WEIGHTED
        if self._chosen == "sum":
            average = Average.SUM
        weight = self._weight(state) if self._weight is not None else batch_size(state)
        return average, as_sent(float(weight))

    def find(self, state: Any, number: int, *, is_skipped: bool = False) -> None:
        """Finds the kind of a loss right after it was computed; collective the first times.

        A rank that has skipped the batch has none to look at.
        """
        if self._chosen is not None:
            return
        loss, criterion = state.get(torchbearer.LOSS), state.get(torchbearer.CRITERION)
        seen, self._seen = self._seen, id(loss)
        closure = _closure_of(state)
        if closure is not self._closure:
            if self._closure is not None:  # what it was before has nothing to do with this one
                self.kinds, self._criteria = [], []
            self._closure = closure
        known = self._is_known(number, criterion)
        if known and not self._is_due(state, number):  # as at nearly every step
            return
        is_new = torch.is_tensor(loss) and loss.requires_grad and id(loss) != seen
        if known:
            # Without an exchange: rank zero tells, and nothing changes.
            if is_new and collectives.is_rank_zero() and self._is_first_look(state, number):
                self._compare(number, _examine(criterion, state))
            return
        mine = _SKIPPED
        if not is_skipped:
            mine = _examine(criterion, state) if is_new else _OWN_KEY
        self._agree(number, criterion, mine)

    def _agree(self, number: int, criterion: Any, mine: Verdict) -> None:
        """Takes the verdict of all ranks, if their batches can tell."""
        everyone = collectives.all_gather(astuple(mine), "the kind of the loss")
        found = [verdict for each in everyone if (verdict := Verdict(*each)) != _SKIPPED]
        if not found:
            del self.kinds[number:], self._criteria[number:]
            return
        agreed = combine(found)
        tries = self._tries[number] = self._tries.get(number, 0) + 1
        if agreed.later and tries < _TRIES:
            del self.kinds[number:], self._criteria[number:]  # what was known of another loss
            if tries == 1:
                announce(
                    f"it cannot be told yet whether the loss is a mean or a sum ({agreed.reason}); "
                    "it is taken for a mean until a later batch tells"
                )
            return
        late = tries > 1 and agreed.kind == "sum"
        del self._tries[number]
        while len(self.kinds) < number:  # a batch could not tell those before it
            self.kinds.append("unknown")
            self._criteria.append((None, None))
        self.kinds[number:] = [agreed.kind]
        self._criteria[number:] = [(criterion, _reduction(criterion))]
        if late:
            announce("the gradients of the steps before were averaged, not added: " + _PAGE)
        if line := _LINES.get(agreed.kind):
            announce(line.format(ranks=collectives.world_size(), reason=agreed.reason))

    def _compare(self, number: int, later: Verdict) -> None:
        """Tells if a later batch shows another kind of loss than the one that the run goes by."""
        known = self.kinds[number]
        if _differs(known, later.kind, self._criteria[number][0]):
            self._doubted.add(number)
            announce(_CHANGED.format(known=known, later=later.kind))

    def _is_due(self, state: Any, number: int) -> bool:
        """True at the first step of an epoch, and in the first epoch at steps 1, 2, 4, 8 and so on.

        The first batch may not show it: a term has a weight of 0 that grows, a mask keeps as much
        of each part, or all samples have the same loss because the last layer is all zeros. A loss
        of torch is what it is.
        """
        batch = state.get(torchbearer.BATCH) or 0
        if batch & (batch + 1) or number in self._doubted:
            return False
        epoch = state.get(torchbearer.EPOCH) or 0
        return not (batch and epoch) and not _is_of_torch(self._criteria[number][0])

    def _is_first_look(self, state: Any, number: int) -> bool:
        """True once for each loss of a step: LBFGS calls its closure several times."""
        place = state.get(torchbearer.EPOCH) or 0, state.get(torchbearer.BATCH) or 0
        if place != self._place:
            self._place = place
            self._looked.clear()
        is_first = number not in self._looked
        self._looked.add(number)
        return is_first

    def _is_known(self, number: int, criterion: Any) -> bool:
        """True if the loss of a backward pass was found; it may have changed since."""
        if number >= len(self.kinds):
            return False
        known, before = self._criteria[number]
        reduction = _reduction(criterion)
        if known is criterion:  # as at nearly every step
            return before == reduction
        if isinstance(known, str) and known == _describe(criterion):  # after a restart
            self._criteria[number] = criterion, reduction
            return True
        return False


def _differs(known: str, later: str, criterion: Any) -> bool:
    """True if a later batch shows a loss for which gradients would be combined in another way."""
    if later in ("unknown", known) or known in ("unknown", "coupled"):
        return False
    if (known, later) == ("weighted", "mean"):  # all targets of that batch have one weight
        return False
    # Ignored targets of a later batch do not count as samples anyway.
    return not (is_class_loss(criterion) and (known, later) == ("mean", "weighted"))


def _reduction(criterion: Any) -> str | None:
    """The name of what a criterion does with its samples, as torch's losses have it."""
    found = getattr(criterion, "reduction", None)
    return found if isinstance(found, str) else None


def _closure_of(state: Any) -> Any:
    """The closure of the Trial, which computes the losses."""
    return getattr(state.get(torchbearer.SELF), "closure", None)


def _is_standard(closure: Any) -> bool:
    """True for a closure of torchbearer's own, whose loss is the criterion's."""
    if getattr(closure, "__qualname__", "") != _STANDARD_CLOSURE:
        return False
    # base_closure makes such a function with any keys.
    names = getattr(getattr(closure, "__code__", None), "co_freevars", ())
    cells = getattr(closure, "__closure__", None) or ()  # a wrapper has its name, and no cells
    keys = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
    return (keys.get("crit"), keys.get("loss")) == (torchbearer.CRITERION, torchbearer.LOSS)


def _is_of_torch(criterion: Any) -> bool:
    """True for a loss of torch itself, whose kind depends on its settings alone."""
    if isinstance(criterion, torch.nn.Module):
        return type(criterion).__module__ == torch.nn.MSELoss.__module__
    return getattr(criterion, "__module__", None) == torch.nn.functional.__name__


def _describe(criterion: Any) -> str:
    """A text that changes with the criterion, and not from run to run."""
    if isinstance(criterion, str):
        return criterion
    if isinstance(criterion, torch.nn.Module):
        settings = [getattr(criterion, "reduction", None), getattr(criterion, "ignore_index", None)]
        weight = getattr(criterion, "weight", None)
        if torch.is_tensor(weight) and not isinstance(weight, torch.nn.Parameter):
            settings.append(zlib.crc32(weight.cpu().numpy().tobytes()))
        known = [each for each in settings if each is not None]
        return f"{criterion!r} {known}" if known else repr(criterion)
    return str(getattr(criterion, "__qualname__", type(criterion).__qualname__))


def _examine(criterion: Any, state: Any) -> Verdict:
    """The kind of the criterion, if the loss is the criterion's and not the closure's own."""
    if not _is_standard(_closure_of(state)) and not is_value_of(criterion, state):
        if not torch.isfinite(state[torchbearer.LOSS].detach()).all():
            return Verdict("unknown", "its value is not a finite number on this batch", later=True)
        return Verdict("unknown", "the closure computes another loss than the criterion")
    return classify(criterion, state)
