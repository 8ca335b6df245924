"""GPUs that only exist for the functions of ``torch.cuda`` that count, name and select them.

Nothing can be computed on them: for code that decides by the devices of a process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

#: Methods of an optimizer that look for a graph under capture, in older and newer versions.
_ASK_THE_DRIVER = (
    "_cuda_graph_capture_health_check",
    "_accelerator_graph_capture_health_check",
)


class CudaDevices:
    """The GPUs of this process.

    Args:
        uuids: The UUID of each visible GPU.

    Attributes:
        states: The state of the random generator of each GPU.
        selected: The index of the current GPU, which is a setting of each thread.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids = list(uuids)
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(len(uuids))]
        self._selected = threading.local()

    @property
    def selected(self) -> int:
        """The current GPU of this thread: the first, unless another was set."""
        return getattr(self._selected, "index", 0)

    def set_device(self, device: Any) -> None:
        """Selects a GPU."""
        index = device if isinstance(device, int) else torch.device(device).index
        assert 0 <= index < len(self.uuids), "CUDA error: invalid device ordinal"
        self._selected.index = index

    def get_device_properties(self, device: Any) -> Any:
        """Names a GPU."""
        return SimpleNamespace(uuid=self.uuids[device], name="stand-in")

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.selected if index is None else index

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        """Reads the generator of a GPU."""
        return self.states[self._index(device)].clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = "cuda") -> None:
        """Sets the generator of a GPU."""
        self.states[self._index(device)] = state.clone()


@contextlib.contextmanager
def visible(*uuids: str) -> Iterator[CudaDevices]:
    """Lets this process see these GPUs."""
    found = CudaDevices(uuids)
    with contextlib.ExitStack() as stack:
        for name, replaced in {
            "device_count": lambda: len(uuids),
            "is_available": lambda: bool(uuids),
            "is_initialized": lambda: bool(uuids),
            "current_device": lambda: found.selected,
            "set_device": found.set_device,
            "get_device_properties": found.get_device_properties,
            "get_rng_state": found.get_rng_state,
            "get_rng_state_all": lambda: [state.clone() for state in found.states],
            "set_rng_state": found.set_rng_state,
            "set_rng_state_all": lambda states: [
                found.set_rng_state(state, index) for index, state in enumerate(states)
            ],
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replaced))
        for name in _ASK_THE_DRIVER:
            if hasattr(torch.optim.Optimizer, name):
                patch = mock.patch.object(torch.optim.Optimizer, name, return_value=None)
                stack.enter_context(patch)
        yield found
