"""Plain copies: what a checkpoint may hold, taken at one moment so that training can go on."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import layouts
from torchbearer_ddp.group.plain_data import PlainDataWalker, type_name


class Snapshot(PlainDataWalker):
    """Copies plain data and tensors to CPU memory that the next copy uses again.

    Fresh memory costs several times what the copying does, so the tensors' copies are kept. A copy
    is therefore valid only until the next one is taken.

    Args:
        borrow: Take tensors on the CPU as they are, for a caller that waits until they are written.
    """

    def __init__(self, *, borrow: bool = False) -> None:
        self._borrow = borrow
        self._buffers: dict[str, torch.Tensor] = {}
        self._shared: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(self, value: dict[str, Any], where: str) -> dict[str, Any]:
        """The value as it is now, on the CPU; ``where`` is its name in error messages."""
        self._shared = {}
        return dict(self.walk(value, where))

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
            copy = torch.empty_like(plain, device="cpu")
            self._buffers[where] = copy
        if tensor.device.type == "cpu":
            # torch would divide the work among threads that other ranks need too, and wait for the
            # last of them: many times slower on a busy machine, little faster on an idle one.
            numpy.copyto(layouts.memory(copy).numpy(), layouts.memory(plain).numpy())
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


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
