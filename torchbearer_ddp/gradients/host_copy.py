"""Copies between a device and the host that do not block the host, so that it can look around."""

from __future__ import annotations

from typing import Any

import torch

from torchbearer_ddp.group.waiting import Wait, poll_until


class HostCopy:
    """Memory on the host that mirrors a tensor on a device.

    A copy from or to ordinary memory would wait for all that the device has to do: for ever, if a
    collective that another rank has not reached is among it.

    Args:
        place: The tensor on the device.
    """

    def __init__(self, place: torch.Tensor) -> None:
        self._place = place
        self._memory = torch.zeros(place.shape, dtype=place.dtype, pin_memory=True, device="cpu")
        self._event: Any = torch.Event(place.device)
        #: The numbers on the host.
        self.values = self._memory.numpy()

    def send(self) -> None:
        """Copies the numbers to the device, in the order of its stream.

        They may change again once something was received.
        """
        self._place.copy_(self._memory, non_blocking=True)

    def begin_receive(self) -> None:
        """Begins to copy the tensor to the host."""
        self._memory.copy_(self._place, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(self._place.device))

    def receive(self, wait: Wait) -> None:
        """Copies the tensor to the host, and looks after the other ranks until it is there."""
        self.begin_receive()
        poll_until(self._event.query, wait)

    def received(self) -> float:
        """The only number of the tensor, once it is there; for what no other rank can delay."""
        self._event.synchronize()
        return float(self.values)
