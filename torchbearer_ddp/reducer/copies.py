"""Copies gradients to their buckets while backward still runs, from hooks on the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


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
