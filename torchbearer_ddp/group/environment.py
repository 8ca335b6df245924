"""Variables that torch's backends read: written once, before the first group of a run is made.

Threads of gloo and NCCL read the environment at any time, which is not safe while it is written.
"""

from __future__ import annotations

import os

from torchbearer_ddp.group import network

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
#: Otherwise the thread that watches NCCL ends the process when a kernel of the user has failed,
#: before Python can say which.
_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"

#: gloo connects a rank to another one when the two first exchange something, not to all at once.
_LAZY = "TORCH_GLOO_LAZY_INIT"
#: Up to so many ranks all are connected when they join, which shows at once who cannot be reached.
MESH_RANKS = 64

#: The variables that are not the user's.
_ours: set[str] = set()


def prepare(host: str, backend: str, world_size: int) -> None:
    """Sets what the user has not set; no group may exist.

    gloo is to use the interface that leads to the store, which is loopback on a single host.
    Otherwise it takes the one that the host's name resolves to, which may be another.
    """
    interface = network.interface_of(network.loopback(host) or network.route_to(host))
    wanted = {_GLOO_INTERFACE: interface} if interface else {}
    if world_size > MESH_RANKS:
        wanted[_LAZY] = "1"
    if backend != "gloo":
        wanted[_RETHROW] = "0"
    for name, value in wanted.items():
        is_ours = name not in os.environ or name in _ours
        if is_ours and os.environ.get(name) != value:
            os.environ[name] = value
            _ours.add(name)


def restore() -> None:
    """Removes what :func:`prepare` has set; the group must be closed."""
    while _ours:
        os.environ.pop(_ours.pop(), None)
