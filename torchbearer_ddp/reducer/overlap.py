"""Sends full buckets while backward still runs, from hooks on the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchbearer_ddp.reducer.buckets import Bucket

Send = Callable[[Bucket], None]


class Overlap:
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
