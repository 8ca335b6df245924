"""Open files: a process may have only so many, and each connection is one."""

from __future__ import annotations

import contextlib
import resource

from torchbearer_ddp.errors import LaunchError

#: The connections of each rank to the store.
_TO_STORE = 2
#: What a process has open besides.
_OTHERS = 64


def allow(world_size: int, *, holds_store: bool) -> None:
    """Lets this process be connected to so many ranks.

    Raises:
        LaunchError: If it holds the store, and the system does not allow so many open files.
    """
    needed = _TO_STORE * world_size + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        if not holds_store:  # it talks to few of them at most times
            needed = hard
        else:
            raise LaunchError(
                f"{world_size} ranks need {needed} open files in the process that holds the store "
                f"of the run, and this system allows {hard}. Raise the limit before the start: "
                "ulimit -n in a shell as root, LimitNOFILE of a service, or --ulimit nofile of a "
                "container."
            )
    with contextlib.suppress(OSError, ValueError):  # it then serves as many as it can
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
