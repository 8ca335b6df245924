"""Which transport carries the gradients, and the one line that says why."""

from __future__ import annotations

import torch

from torchbearer_ddp.process_group import Group
from torchbearer_ddp.reducer.collective import CollectiveTransport
from torchbearer_ddp.reducer.transport import Transport


def choose(group: Group, requested: str, device: torch.device) -> tuple[Transport, str]:
    """Chooses a transport; collective, and the same choice on every rank."""
    name = "nccl" if device.type == "cuda" else "gloo"
    return CollectiveTransport(group, name), f"gradients travel through {name}"
