"""Where the time of a step goes: this rank's own work, waiting for the slowest, the exchange."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Timing:
    """Where the time of one step went, in seconds.

    Attributes:
        compute: This rank's own work since the last exchange.
        waiting: Until the slowest rank was done with its own.
        moving: The exchange itself.
    """

    compute: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0

    @classmethod
    def of(cls, own: float, exchange: float, slowest: float) -> Timing:
        """The parts of a step: the slowest rank took so long for its own work."""
        waiting = max(0.0, slowest - own)
        return cls(own, waiting, max(0.0, exchange - waiting))


class HostClock:
    """Measures what the processor does."""

    def __init__(self) -> None:
        self._own = 0.0
        self._began = self._ended = time.perf_counter()

    def begin_exchange(self) -> float:
        """Ends this rank's own work; returns its seconds, for the other ranks."""
        self._began = time.perf_counter()
        self._own = self._began - self._ended
        return self._own

    def end_exchange(self, slowest: float) -> Timing:
        """Ends an exchange; ``slowest`` is the largest number that a rank has sent with it."""
        self._ended = time.perf_counter()
        return Timing.of(self._own, self._ended - self._began, slowest)


class DeviceClock:
    """Measures what a device does, which lags behind the host that launches it.

    So the seconds of a step are known one step later: they travel with the next exchange.

    Args:
        device: The device whose current stream computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = 0.0
        self._before = self._began = self._ended = self._mark()

    def begin_exchange(self) -> float:
        """Ends this rank's own work; returns the seconds of the step before."""
        self._before, self._began = self._began, self._mark()
        return self._own

    def end_exchange(self, slowest: float) -> Timing:
        """Ends an exchange; returns the parts of the step before."""
        # The device is past all three events: the header came to the host after them.
        exchange = self._before.elapsed_time(self._ended) / 1000
        timing = Timing.of(self._own, exchange, slowest)
        self._own = self._ended.elapsed_time(self._began) / 1000
        self._ended = self._mark()
        return timing

    def _mark(self) -> Any:
        """An event at this place of the stream."""
        event: Any = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    """The clock for gradients on a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
