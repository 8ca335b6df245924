"""Messages of a common size: the length of a value, its bytes, and zeros behind them."""

from __future__ import annotations

import torch

from torchbearer_ddp import checked

LENGTH_BYTES = 8


def message(content: torch.Tensor, size: int) -> torch.Tensor:
    """A message of this size: the length of what is sent, and as many of its bytes as fit."""
    found = bytearray(size)
    found[:LENGTH_BYTES] = len(content).to_bytes(LENGTH_BYTES, "little")
    part = content[: size - LENGTH_BYTES]
    found[LENGTH_BYTES : LENGTH_BYTES + len(part)] = part.numpy().tobytes()
    return torch.frombuffer(found, dtype=torch.uint8)


def length(message: torch.Tensor) -> int:
    """The length in front of a message.

    Raises:
        Unexpected: If it is longer than anything that this host could hold.
    """
    size = int.from_bytes(message.numpy()[:LENGTH_BYTES].tobytes(), "little")
    return checked.byte_count(size, "its length")


def with_length(part: torch.Tensor, length: int) -> torch.Tensor:
    """The tensor, cut or padded with zeros to this length."""
    missing = length - len(part)
    return torch.nn.functional.pad(part, (0, missing)) if missing else part
