"""The device of a rank: which one it is, what it is called, and selecting it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def visible_gpus(device: str) -> list[str]:
    """The UUID of each GPU that this process can see, if it computes on one; empty if unknown."""
    if torch.device(device).type != "cuda":
        return []
    # This asks the driver, and uses no memory of any GPU.
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [str(getattr(properties, "uuid", "")) for properties in found]


def select(device: str | torch.device) -> None:
    """Makes a device the current one of this thread; before any other call, which would use 0."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    elif place.index is not None and place.type != "cpu":
        torch.accelerator.set_device_index(place)


def adopted_device() -> str:
    """The device in a process group that the user made: a GPU if its backend is for GPUs."""
    if torch.cuda.is_available() and backend_of(dist.group.WORLD, "cuda") != "gloo":
        bound = getattr(dist.group.WORLD, "bound_device_id", None)  # of init_process_group
        return str(bound or torch.device("cuda", torch.cuda.current_device()))
    return "cpu"


def backend_of(channel: Any, device_type: str) -> str:
    """The backend of a channel for tensors of these devices; gloo if it has none."""
    pairs = (each.split(":") for each in dist.get_backend_config(channel).split(","))
    return dict(pairs).get(device_type, "gloo")
