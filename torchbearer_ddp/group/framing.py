"""Messages of a common size: the length of a value, its bytes, and zeros behind them."""

from __future__ import annotations

import torch

from torchbearer_ddp import checked

LENGTH_BYTES = 8


def length_first(content: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """The length of what is sent, and so many of its bytes."""
    length = bytearray(len(content).to_bytes(LENGTH_BYTES, "little"))
    return torch.cat([torch.frombuffer(length, dtype=torch.uint8), content[:most]])


def length(message: torch.Tensor) -> int:
    """The length in front of a message.

    Raises:
        Unexpected: If it is longer than anything that this host could hold.
    """
    size = int.from_bytes(message[:LENGTH_BYTES].numpy().tobytes(), "little")
    return checked.byte_count(size, "its length")


def with_length(part: torch.Tensor, length: int) -> torch.Tensor:
    """The tensor, cut or padded with zeros to this length."""
    missing = length - len(part)
    return torch.nn.functional.pad(part, (0, missing)) if missing else part
