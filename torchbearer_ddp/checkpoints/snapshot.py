"""Plain copies: what a checkpoint may hold, taken at one moment so that training can go on."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torchbearer.state import StateKey

from torchbearer_ddp.errors import CheckpointError


class Snapshot:
    """Copies plain data and tensors to memory that the next copy uses again.

    Fresh memory costs several times what the copying does, so the tensors' copies are kept. A copy
    is therefore valid only until the next one is taken.

    Args:
        borrow: Take tensors on the CPU as they are, for a caller who waits until they are written.
    """

    def __init__(self, *, borrow: bool = False) -> None:
        self._borrow = borrow
        self._buffers: dict[str, torch.Tensor] = {}
        self._shared: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(self, value: Any, where: str) -> Any:
        """The value as it is now, on the CPU.

        Args:
            value: None, numbers, strings, bytes, tensors; lists, tuples, sets and dicts of them.
            where: What it is, as an error message would name it.

        Raises:
            CheckpointError: If it holds anything else; the message says what and where.
        """
        self._shared = {}
        try:
            return self._copy(value, where)
        finally:
            self._shared = {}

    def _copy(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, where)
        if isinstance(value, dict):
            return {_key(k, where): self._copy(v, f"{where}[{str(k)!r}]") for k, v in value.items()}
        for kind in (list, tuple, set):
            if isinstance(value, kind):
                return kind(self._copy(v, f"{where}[{i}]") for i, v in enumerate(value))
        if isinstance(value, StateKey):
            return str(value)
        if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
            return value.item()
        for scalar in (int, float, str):  # their subclasses: an enum, say
            if isinstance(value, scalar):
                return scalar(value)
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
            "cannot hold. It must load without running code, so only None, numbers, strings, "
            "bytes, tensors, and lists, tuples, sets and dicts of these can be saved: convert it "
            "in that object's state_dict, and back in its load_state_dict."
        )

    def _copy_tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        tensor = tensor.detach()
        if self._borrow and tensor.device.type == "cpu":
            return tensor
        # Tied parameters have several names; one copy serves them all.
        place = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in self._shared:
            return self._shared[place]
        copy = self._buffers.get(where)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._buffers[where] = copy
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            # torch would share the work out to threads that other ranks need too, and wait for
            # the last of them: many times slower on a busy machine, little faster on an idle one.
            numpy.copyto(_bytes(copy), _bytes(tensor))
        else:
            copy.copy_(tensor)
        self._shared[place] = copy
        return copy


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


def _key(key: Any, where: str) -> Any:
    if isinstance(key, StateKey):
        return str(key)
    if key is None or isinstance(key, bool | int | float | str):
        return key
    raise CheckpointError(
        f"{where} has a key of type {type(key).__qualname__}, which a checkpoint cannot hold. Use "
        "strings or numbers as keys."
    )
