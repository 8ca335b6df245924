"""Hooks on parameters, called during backward whenever a gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchbearer_ddp.gradients.buckets import GradientBucket

#: Copies the gradients of the bucket with this index into it, and starts its sum.
Send = Callable[[int], None]
Hook = Callable[[torch.Tensor], None]


class GradientHooks:
    """One hook on each of some parameters, until it is closed; without any it does nothing."""

    #: How many buckets were sent during this backward.
    sent = 0
    _send: Send | None = None

    def __init__(self, hooks: Iterable[tuple[torch.Tensor, Hook]] = ()) -> None:
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for parameter, hook in hooks
        ]

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


class EarlySends(GradientHooks):
    """Sends each bucket as soon as its gradients are complete.

    Buckets are sent in their order, the same on every rank; the last one, with the header, waits
    for the end of backward, when it is known which parameters were used.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], buckets: list[GradientBucket]) -> None:
        self._parameters = parameters
        self._buckets = buckets[:-1]
        #: By bucket the parameters whose gradients have not appeared yet.
        self._missing: list[set[int]] = []
        self._changed = False
        super().__init__(
            (parameters[index], self._hook(index, number))
            for number, bucket in enumerate(self._buckets)
            for index in bucket.indices
        )

    def arm(self, send: Send) -> None:
        """Begins to send, unless backward would add to gradients while they are sent."""
        self.disarm()  # after a backward that failed
        if all(parameter.grad is None for parameter in self._parameters):
            self._missing = [set(bucket.indices) for bucket in self._buckets]
            super().arm(send)

    def disarm(self) -> tuple[int, bool]:
        """Stops sending."""
        done = self.sent, self._changed
        self.sent, self._changed, self._send = 0, False, None
        return done

    def _hook(self, index: int, bucket: int) -> Hook:
        def appeared(_: torch.Tensor) -> None:
            if self._send is None:
                return
            if index not in self._missing[bucket]:
                self._changed = True
                return
            self._missing[bucket].remove(index)
            while self.sent < len(self._missing) and not self._missing[self.sent]:
                self._send(self.sent)
                self.sent += 1

        return appeared


class EarlyCopies(GradientHooks):
    """Copies each gradient to its bucket as soon as it appears, while the cache still holds it.

    The gradient then lives in its bucket, and its own memory is free for the next one, so backward
    goes on in memory that the cache holds too. A second backward adds to what lies in the bucket.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        super().__init__((p, self._hook(v)) for p, v in zip(parameters, views, strict=True))

    def _hook(self, view: torch.Tensor) -> Hook:
        def appeared(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if self._send is None or gradient is None or gradient is view:
                return
            # One that is differentiated again, or has another layout, is copied after backward.
            if gradient.layout is torch.strided and not gradient.requires_grad:
                view.copy_(gradient)
                parameter.grad = view

        return appeared
