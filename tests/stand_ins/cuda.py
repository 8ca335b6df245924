"""Tensors that say they are on a GPU and compute on the CPU, and a count of what would block.

For the branches that ask for the device. A copy between "device" and host counts as blocking
unless it is asynchronous *and* the memory on the host is pinned; reading a number blocks always.
``backward()`` does not work on these tensors: a test sets the gradients itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
_TO_HOST = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist}
_DEVICE = torch.device("cuda:0")


class Counts:
    """What was done on the device.

    Attributes:
        blocking: Copies and reads for which a host would wait until the device is idle.
        kernels: The operations, in order.
    """

    blocking: list[str] = []  # noqa: RUF012
    kernels: list[str] = []  # noqa: RUF012
    #: The addresses of pinned memory.
    pinned: set[int] = set()  # noqa: RUF012

    @classmethod
    def clear(cls) -> None:
        """Begins to count anew."""
        cls.blocking.clear()
        cls.kernels.clear()


class CudaTensor(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    on_cpu: torch.Tensor
    said: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.said

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor, device: Any = _DEVICE) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            on_cpu.stride(),
            on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device="cpu",  # torch itself must not look for a GPU
            requires_grad=on_cpu.requires_grad,
        )
        made.on_cpu = on_cpu.detach()
        made.said = torch.device(device)
        return made

    def __repr__(self) -> str:
        return f"CudaTensor({self.on_cpu!r}, device={self.device})"

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        devices = {each.device for each in flat if isinstance(each, CudaTensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{func}: tensors are on {devices}, and must be on one device")
        (device,) = devices
        Counts.kernels.append(str(func))
        _count(func, args, kwargs)
        target = torch.device(kwargs.get("device") or device)
        if target.type == "cuda":
            kwargs.pop("device", None)
        result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
        if func is torch.ops.aten.copy_.default:
            return args[0]
        if target.type != "cuda" or not isinstance(result, torch.Tensor | list | tuple):
            return result
        if isinstance(result, torch.Tensor) and args and result is _unwrap(args[0]):
            return args[0]  # in place
        return tree_map(lambda each: _wrap(each, target), result)


def _count(func: Any, args: Any, kwargs: Any) -> None:
    is_blocking = func in _READS
    if func is torch.ops.aten.index.Tensor:  # a mask: how many are chosen must be known
        is_blocking = any(each is not None and each.dtype == torch.bool for each in args[1])
    if func is torch.ops.aten.copy_.default:
        hosts = [each for each in args[:2] if not isinstance(each, CudaTensor)]
        asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        is_blocking = bool(hosts) and not (asynchronous and hosts[0].data_ptr() in Counts.pinned)
    if is_blocking:
        Counts.blocking.append(str(func))


def _unwrap(value: Any) -> Any:
    return value.on_cpu if isinstance(value, CudaTensor) else value


def _wrap(value: Any, device: torch.device) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, CudaTensor)
    return CudaTensor(value, device) if is_plain else value


class _Factories(TorchFunctionMode):
    """Makes tensors on the GPU where a device is named, and remembers pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if func in _TO_HOST and isinstance(args[0], CudaTensor):
            # To torch itself it is on the CPU already.
            Counts.blocking.append(func.__name__)
            return func(args[0].on_cpu.clone(), *args[1:], **kwargs)
        if func is torch.Tensor.to:
            device = device or next(filter(_is_device, args[1:]), None)
            if device is not None:
                return _moved(args[0], torch.device(device))
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            return CudaTensor(func(*args, **kwargs), device)
        result = func(*args, **kwargs)
        if pinned:
            Counts.pinned.add(result.data_ptr())
        return result


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    Counts.blocking.append(f"to {device}")
    copy = _unwrap(tensor).clone()
    return CudaTensor(copy, device) if device.type == "cuda" else copy


class Event:
    """An event of a stream that is always idle."""

    def __init__(self, device: Any, enable_timing: bool = False) -> None:
        self._stream = f"the stream of {device}"
        self._at: float | None = None

    def record(self, stream: Any) -> None:
        assert stream == self._stream
        self._at = time.perf_counter()

    def query(self) -> bool:
        return self._at is not None

    def synchronize(self) -> None:
        assert self._at is not None

    def elapsed_time(self, end: Event) -> float:
        assert self._at is not None
        assert end._at is not None
        return 1000 * (end._at - self._at)


@contextlib.contextmanager
def pretended() -> Iterator[type[Counts]]:
    """Within this there is a GPU, as far as one asks tensors, streams and events."""
    Counts.clear()
    stream = lambda device: f"the stream of {device}"  # noqa: E731
    with (
        mock.patch.object(torch, "Event", Event),
        mock.patch.object(torch.accelerator, "current_stream", stream),
        _Factories(),
    ):
        yield Counts
