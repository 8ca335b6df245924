"""Plain copies: what a checkpoint may hold, taken at one moment so that training can go on."""

from __future__ import annotations

import codecs
import contextlib
from typing import Any

import numpy
import torch

from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import layouts, own_device
from torchbearer_ddp.group.plain_data import DEEPEST, PlainDataWalker, type_name

#: Devices that copy while the host goes on.
_ASYNCHRONOUS = ("cuda", "xpu")
#: The largest number that ``weights_only=True`` loads has so many bits.
_LARGEST_BITS = 8 * 255 - 1


class _EmptyBytes(bytes):
    """Empty bytes as ``weights_only=True`` loads them: Python's own pickle of them it refuses."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


class Snapshot(PlainDataWalker):
    """Copies plain data and tensors to CPU memory that the next copy uses again.

    Fresh memory costs several times what the copying does, so the tensors' copies are kept. A copy
    is therefore valid only until the next one is taken. Copies from a GPU take place in the order
    of its stream, into pinned memory, while this process goes on; :meth:`wait` waits for them.

    Args:
        borrow: Take tensors on the CPU as they are, for a caller that waits until they are written.
    """

    def __init__(self, *, borrow: bool = False) -> None:
        self._borrow = borrow
        self._buffers: dict[str, torch.Tensor] = {}
        self._shared: dict[tuple[Any, ...], torch.Tensor] = {}
        #: For each device with copies under way, the event that they are done.
        self._events: dict[torch.device, Any] = {}

    def copy(self, value: dict[str, Any], where: str) -> dict[str, Any]:
        """The value as it is now, on the CPU; ``where`` is its name in error messages."""
        self._shared = {}
        self._events = {}
        try:
            copied = dict(self.walk(value, where))
        except RecursionError:
            raise CheckpointError(
                f"{where} holds something that holds itself, or more than {DEEPEST} lists or dicts "
                "in each other, which a checkpoint cannot hold. Make it flatter."
            ) from None
        for device, event in self._events.items():
            event.record(torch.accelerator.current_stream(device))
        return copied

    def wait(self) -> None:
        """Waits until the copies of the last value are complete; for a thread of its own."""
        for device, event in self._events.items():
            own_device.select(device)  # the first GPU otherwise, which is another rank's
            event.synchronize()

    def scalar(self, value: Any) -> Any:
        """The value itself, which must load again."""
        if type(value) is int and value.bit_length() > _LARGEST_BITS:
            raise CheckpointError(
                f"A whole number of {value.bit_length()} bits is larger than a checkpoint can hold "
                f"({_LARGEST_BITS} bits). Save it as a string."
            )
        return _EmptyBytes() if type(value) is bytes and not value else value

    def tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The copy of a tensor."""
        tensor = tensor.detach()
        if (parts := layouts.sparse_parts(tensor)) is not None:
            copies = [self.tensor(part, f"{where}<{i}>") for i, part in enumerate(parts)]
            coalesced = layouts.is_coalesced(tensor)
            return layouts.from_sparse_parts(
                tensor.layout, copies, tensor.shape, coalesced=coalesced
            )
        if not layouts.is_strided(tensor):
            return tensor.cpu().clone() if tensor.is_quantized else self.other(tensor, where)
        if self._borrow and tensor.device.type == "cpu":
            return tensor
        # Tied parameters have several names; one copy serves them all.
        place = (*_kind(tensor), tensor.device, tensor.data_ptr(), tensor.is_conj())
        if tensor.numel() and place in self._shared:
            return self._shared[place]
        plain = layouts.dense(tensor)
        copy = self._buffers.get(where)
        if copy is None or _kind(copy) != _kind(plain):
            copy = self._buffers[where] = _host_memory(plain)
        if tensor.device.type == "cpu":
            # torch would divide the work among threads that other ranks need too, and wait for the
            # last of them: many times slower on a busy machine, little faster on an idle one.
            numpy.copyto(layouts.memory(copy).numpy(), layouts.memory(plain).numpy())
        elif tensor.device.type in _ASYNCHRONOUS:
            copy.copy_(plain, non_blocking=True)
            if tensor.device not in self._events:
                self._events[tensor.device] = torch.Event(tensor.device)
        else:
            copy.copy_(plain)
        self._shared[place] = copy
        return copy

    def other(self, value: Any, where: str) -> Any:
        """Refuses what would need code to load."""
        raise CheckpointError(
            f"{where} is a {type_name(value)}, which a checkpoint cannot hold. It must load "
            "without running code, so only None, numbers, strings, bytes, tensors, and lists, "
            "tuples, sets and dicts of these can be saved: convert it in that object's "
            "state_dict, and back in its load_state_dict."
        )


def _host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a copy; a device can write into pinned memory by itself."""
    if tensor.device.type in _ASYNCHRONOUS:
        with contextlib.suppress(RuntimeError):  # not enough memory that can be pinned
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
