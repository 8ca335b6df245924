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

    def __init__(self, hooks: Iterable[tuple[torch.Tensor, Hook]] = ()) -> None:
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for parameter, hook in hooks
        ]

    def arm(self, send: Send) -> None:
        """Begins to act on gradients that appear."""

    def disarm(self) -> tuple[int, bool]:
        """Stops acting; returns how many buckets were sent, and if a sent gradient has changed."""
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
        self._counts = [len(bucket.indices) for bucket in buckets[:-1]]
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._changed = False
        self._send: Send | None = None
        super().__init__(
            (parameters[index], self._hook(index, number))
            for number, bucket in enumerate(buckets[:-1])
            for index in bucket.indices
        )

    def arm(self, send: Send) -> None:
        """Begins to count, unless backward would add to gradients while they are sent."""
        self.disarm()  # after a backward that failed
        if all(parameter.grad is None for parameter in self._parameters):
            self._missing = self._counts.copy()
            self._send = send

    def disarm(self) -> tuple[int, bool]:
        """Stops counting."""
        done = self.sent, self._changed
        self.sent, self._changed, self._send = 0, False, None
        self._seen.clear()
        return done

    def _hook(self, index: int, bucket: int) -> Hook:
        def appeared(_: torch.Tensor) -> None:
            if self._send is None:
                return
            if index in self._seen:
                self._changed = True
                return
            self._seen.add(index)
            self._missing[bucket] -= 1
            while self.sent < len(self._missing) and self._missing[self.sent] == 0:
                self._send(self.sent)
                self.sent += 1

        return appeared


class EarlyCopies(GradientHooks):
    """Copies each gradient to its bucket as soon as it appears, while the cache still holds it.

    The gradient then lives in its bucket, and its own memory is free for the next one, so backward
    goes on in memory that the cache holds too. A second backward adds to what lies in the bucket.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        self._armed = False
        super().__init__((p, self._hook(v)) for p, v in zip(parameters, views, strict=True))

    def arm(self, send: Send) -> None:
        """From here on a gradient that appears is copied."""
        self._armed = True

    def disarm(self) -> tuple[int, bool]:
        """From here on it stays where it is."""
        self._armed = False
        return 0, False

    def _hook(self, view: torch.Tensor) -> Hook:
        def appeared(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if not self._armed or gradient is None or gradient is view:
                return
            # One that is differentiated again, or has another layout, is copied after backward.
            if gradient.layout is torch.strided and not gradient.requires_grad:
                view.copy_(gradient)
                parameter.grad = view

        return appeared
