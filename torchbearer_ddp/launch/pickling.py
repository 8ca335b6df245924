"""Arguments and results as bytes: tensors travel on the CPU.

A tensor of a GPU would be unpickled onto the GPU of the same number: every rank would take memory
of the launcher's GPU, and a launcher without a GPU could not read the results.
"""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import numpy
import torch


def dumps(value: Any) -> bytes:
    """Pickles a value by cloudpickle, with its tensors on the CPU."""
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def check(value: Any) -> None:
    """Raises as :func:`dumps` does for what cannot be pickled; data of tensors is not read."""
    _Checker(_Nowhere()).dump(value)


def on_cpu(value: Any) -> Any:
    """A result whose tensors are on the CPU; one that cannot be pickled is returned as it is."""
    if not torch.accelerator.is_available():
        return value
    try:
        return cloudpickle.loads(dumps(value))
    except Exception:  # of any kind; whoever sends it then says so
        return value


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        # A parameter is made of its data, which comes here too.
        is_moved = isinstance(obj, torch.Tensor) and type(obj) is not torch.nn.Parameter
        if is_moved and obj.device.type not in ("cpu", "meta"):
            moved: Any = obj.detach().cpu().requires_grad_(obj.requires_grad)
            return moved.__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        return super().reducer_override(obj)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        """Takes the data."""
        return memoryview(data).nbytes


class _Checker(_Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor | numpy.ndarray):
            return bool, ()
        return super().reducer_override(obj)
