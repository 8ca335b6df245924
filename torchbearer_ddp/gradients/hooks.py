"""Hooks on parameters, called during backward whenever a gradient is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchbearer_ddp.gradients.buckets import GradientBucket
from torchbearer_ddp.log import announce

#: Copies the gradients of the bucket with this index into it, and starts its sum.
Send = Callable[[int], None]
Hook = Callable[[torch.Tensor], None]


@dataclass
class Marks:
    """Which gradients must be averaged before an optimizer uses them; parameters by identity.

    Attributes:
        changed: Backward has written the gradient since it was averaged.
        averaged: The gradient was averaged in this step. A callback may have replaced it since, by
            a clipped one.
        mixed: Backward has added to an average.
        before: Gradients at the start of the step, noted for a loss that sums.
        kept: Gradients that were put back where no rank had a new one, outside of the buckets.
        left: What the last step has left where nothing else tells an old gradient from a new one,
            with its version.
    """

    changed: set[int] = field(default_factory=set)
    averaged: frozenset[int] = frozenset()
    mixed: set[int] = field(default_factory=set)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    left: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def needs_average(self, parameter: torch.Tensor, view: torch.Tensor | None = None) -> bool:
        """True if the gradient is new; ``view`` is where the last average was handed out."""
        if parameter.grad is None:
            return False
        if id(parameter) in self.changed:
            return True
        if parameter.grad is view or parameter.grad is self.kept.get(id(parameter)):
            return False
        return id(parameter) not in self.averaged and not is_old(parameter, self.left)

    def begin_step(self) -> None:
        """Begins a step, of which nothing is known yet."""
        self.averaged = frozenset()
        self.before.clear()

    def note_left(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notes gradients that are no batch's of the coming step."""
        self.left = versions(parameters)

    def note_before(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notes the gradients at the start of a step."""
        self.before.update((id(p), p.grad) for p in parameters if p.grad is not None)

    def note_mixed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Marks gradients that were there at the start of the step, if no hook could do it."""
        self.mixed.update(
            id(p)
            for p in parameters
            if p.grad is self.before.get(id(p), self) and not is_old(p, self.left)
        )

    def note_average(self, identities: frozenset[int]) -> None:
        """Marks gradients as averaged."""
        self.changed -= identities
        self.mixed -= identities
        self.averaged = self.averaged | identities if self.averaged else identities
        if self.kept:
            self.kept = {key: each for key, each in self.kept.items() if key not in identities}


def versions(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, int]]:
    """The gradients there are, by parameter, each with its version."""
    return {id(p): (p.grad, p.grad._version) for p in parameters if p.grad is not None}


def is_old(parameter: torch.Tensor, known: dict[int, tuple[torch.Tensor, int]]) -> bool:
    """True if the gradient is one of :func:`versions`, as it was or zeroed since."""
    gradient, (before, version) = parameter.grad, known.get(id(parameter), (None, 0))
    if gradient is None or gradient is not before:
        return gradient is None
    return gradient._version == version or is_zero(gradient)


def is_zero(gradient: torch.Tensor) -> bool:
    """True if all of a gradient is zero."""
    return not bool((gradient._values() if gradient.is_sparse else gradient).any())


class GradientHooks:
    """One hook on each of some parameters, until it is closed."""

    #: How many buckets were sent during this backward.
    sent = 0
    _send: Send | None = None

    def __init__(self, hooks: Iterable[tuple[torch.Tensor, Hook]] = ()) -> None:
        self._handles: list[Any] = [_register(parameter, hook) for parameter, hook in hooks]

    def arm(self, send: Send) -> None:
        """Begins to act on gradients that appear."""
        self._send = send

    def disarm(self) -> tuple[int, bool]:
        """Stops acting; returns how many buckets were sent, and if a sent gradient has changed."""
        self._send = None
        return 0, False

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _register(parameter: torch.Tensor, hook: Hook) -> Any:
    """Registers a hook also on a parameter that is frozen now: it may be thawed later."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    return handle


class GradientOrder(GradientHooks):
    """Records the order in which the gradients of a backward pass appear.

    The order of the layers in a model is no guide: it may use them in another one.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._count = len(parameters)
        self._seen: dict[int, None] = {}
        super().__init__((p, self._hook(i)) for i, p in enumerate(parameters) if p.requires_grad)

    @property
    def indices(self) -> list[int]:
        """All parameters: those with a gradient as they appeared, then the others, last first."""
        others = [i for i in reversed(range(self._count)) if i not in self._seen]
        return [*self._seen, *others]

    def _hook(self, index: int) -> Hook:
        return lambda _: self._seen.setdefault(index)


class ChangedGradients(GradientHooks):
    """Marks every gradient that backward writes; subclasses do more with it."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor | None],
        marks: Marks,
    ) -> None:
        self._parameters = parameters
        self._views = views
        self._marks = marks
        super().__init__((p, self._hook(i, id(p))) for i, p in enumerate(parameters))

    def _hook(self, index: int, identity: int) -> Hook:
        view, changed, mixed = self._views[index], self._marks.changed, self._marks.mixed
        before = self._marks.before
        appeared = self._appeared

        def mark(parameter: torch.Tensor) -> None:
            if identity not in changed:
                changed.add(identity)
                gradient = parameter.grad
                if gradient is not None and (gradient is view or gradient is before.get(identity)):
                    mixed.add(identity)
            if appeared is not None and self._send is not None:
                appeared(index, parameter)

        return mark

    #: Called while armed with the index of a parameter and the parameter, if it is there.
    _appeared: Callable[[int, torch.Tensor], None] | None = None

    @property
    def act(self) -> bool:
        """True if they do more with a gradient than to mark it."""
        return self._appeared is not None


class EarlySends(ChangedGradients):
    """Sends each bucket as soon as its gradients are complete.

    Buckets are sent in their order, the same on every rank; the last one, with the header, waits
    for the end of backward, when it is known which parameters were used.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor | None],
        marks: Marks,
        buckets: list[GradientBucket],
    ) -> None:
        self._buckets = buckets[:-1]
        self._bucket_of = {i: number for number, b in enumerate(self._buckets) for i in b.indices}
        #: By bucket the parameters whose gradients have not appeared yet.
        self._missing: list[set[int]] = []
        self._changed = False
        # Backward has a thread for each device, and a model may be on several.
        self._lock = threading.Lock()
        super().__init__(parameters, views, marks)

    def arm(self, send: Send) -> None:
        """Begins to send, unless backward would add to gradients while they are sent."""
        if all(parameter.grad is None for parameter in self._parameters):
            self._missing = [
                {i for i in bucket.indices if self._parameters[i].requires_grad}
                for bucket in self._buckets
            ]
            super().arm(send)

    def disarm(self) -> tuple[int, bool]:
        """Stops sending."""
        done = self.sent, self._changed
        self.sent, self._changed, self._send = 0, False, None
        return done

    def _appeared(self, index: int, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of.get(index)
        if bucket is not None:
            with self._lock:
                self._note(index, bucket)

    def _note(self, index: int, bucket: int) -> None:
        if bucket < self.sent or index not in self._missing[bucket]:
            self._changed = True
            return
        self._missing[bucket].remove(index)
        while self.sent < len(self._missing) and not self._missing[self.sent]:
            self._send(self.sent)  # type: ignore[misc]
            self.sent += 1


class EarlyCopies(ChangedGradients):
    """Copies each gradient to its bucket as soon as it appears, while the cache still holds it.

    The gradient then lives in its bucket, and its own memory is free for the next one, so backward
    goes on in memory that the cache holds too. A second backward adds to what lies in the bucket.
    """

    def _appeared(self, index: int, parameter: torch.Tensor) -> None:
        gradient, view = parameter.grad, self._views[index]
        if gradient is None or view is None or gradient is view:
            return
        # One that is differentiated again, or has another layout, is copied after backward.
        if gradient.layout is torch.strided and not gradient.requires_grad:
            view.copy_(gradient)
            parameter.grad = view


def name_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Says that hooks of the script act before the average: nothing can come before them."""
    for name, parameter in named:
        if parameter._backward_hooks:
            announce(
                f"{name} has a hook of the script (register_hook): it acts on each rank's own "
                "gradient, before the average. Clip in a callback instead, which sees the average"
            )
            return
