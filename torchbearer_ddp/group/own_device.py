"""The device of a rank: which one it is, what it is called, and selecting it."""

from __future__ import annotations

import torch
import torch.distributed as dist

_GLOO = "gloo"


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
    if torch.cuda.is_available() and not is_gloo(dist.group.WORLD, "cuda"):
        bound = getattr(dist.group.WORLD, "bound_device_id", None)  # of init_process_group
        return str(bound or torch.device("cuda", torch.cuda.current_device()))
    return "cpu"


def is_gloo(channel: object, device_type: str) -> bool:
    """True if tensors of these devices travel through gloo, or cannot in this channel."""
    config = str(dist.get_backend_config(channel))  # type: ignore[arg-type]
    backends = dict(pair.split(":") for pair in config.split(","))
    return backends.get(device_type, _GLOO) == _GLOO
