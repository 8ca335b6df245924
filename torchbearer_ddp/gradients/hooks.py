"""Sends full buckets while backward still runs, from hooks on the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchbearer_ddp.gradients.buckets import Bucket

Send = Callable[[Bucket], None]


class EarlySends:
    """Counts the gradients of each bucket as they appear.

    Buckets go in their order, the same on every rank; the last one, with the header, waits for the
    end of backward, when it is known which parameters were used.

    Args:
        parameters: The parameters, by the index that the buckets use.
        buckets: The buckets, in the order in which they are sent.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {i: b for b, bucket in enumerate(buckets) for i in bucket.indices}
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._sent = 0
        self._again = False
        self._send: Send | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if self._bucket_of[index] < len(buckets) - 1
        ]

    def arm(self, send: Send) -> None:
        """Begins to count.

        Args:
            send: Copies a bucket's gradients in and starts it.
        """
        self._missing = [len(bucket.indices) for bucket in self._buckets]
        self._seen.clear()
        self._sent = 0
        self._again = False
        self._send = send

    def disarm(self) -> tuple[int, bool]:
        """Stops counting.

        Returns:
            How many buckets were sent, and whether a gradient has changed since it was sent.
        """
        if self._send is None:
            return 0, False
        self._send = None
        return self._sent, self._again

    def close(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        bucket = self._bucket_of[index]

        def ready(_: torch.Tensor) -> None:
            if self._send is None:
                return
            if index in self._seen:
                self._again = True
                return
            self._seen.add(index)
            self._missing[bucket] -= 1
            last = len(self._buckets) - 1
            while self._sent < last and self._missing[self._sent] == 0:
                self._send(self._buckets[self._sent])
                self._sent += 1

        return ready


class GradientOrder:
    """Notes the order in a backward pass, from hooks on the parameters.

    The order of the layers in a model says little about it: they may be used in another one.

    Args:
        parameters: The parameters, which are told apart by their place here.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._count = len(parameters)
        self._seen: dict[int, None] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def close(self) -> list[int]:
        """Takes the hooks away.

        Returns:
            Every parameter's place: first those with a gradient, as they appeared, then the others,
            last ones first, which is how most models are.
        """
        for hook in self._hooks:
            hook.remove()
        others = [i for i in reversed(range(self._count)) if i not in self._seen]
        return [*self._seen, *others]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def appeared(_: torch.Tensor) -> None:
            self._seen.setdefault(index)

        return appeared


class EarlyCopies:
    """Copies each gradient as soon as it appears, when the core's cache still holds it.

    The gradient then lives in its bucket, and its own memory is free for the next one, so backward
    goes on in memory that the cache holds too. A second backward adds to what lies in the bucket.

    Args:
        parameters: The parameters.
        views: Their places in the buckets.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor]
    ) -> None:
        self._armed = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(view))  # type: ignore[no-untyped-call]
            for parameter, view in zip(parameters, views, strict=True)
        ]

    def arm(self) -> None:
        """From here on a gradient that appears is copied."""
        self._armed = True

    def disarm(self) -> None:
        """From here on it stays where it is."""
        self._armed = False

    def close(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def appeared(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if not self._armed or gradient is None or gradient is view:
                return
            # One that is differentiated again, or has another layout, is left as it is until then.
            if gradient.layout is torch.strided and not gradient.requires_grad:
                view.copy_(gradient)
                parameter.grad = view

        return appeared
