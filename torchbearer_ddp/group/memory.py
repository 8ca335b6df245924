"""Memory that a training step frees is kept for the next step, instead of returned to the kernel.

glibc returns large blocks to the kernel as soon as they are free. The next step allocates the same
blocks, and the kernel clears each page again: a fifth of the time of some models.
"""

from __future__ import annotations

import ctypes
import os

_VARIABLE = "TORCHBEARER_DDP_KEEP_MEMORY"
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: Blocks up to this size are kept, and as much at the end of the heap. Larger blocks, for example a
#: data set while it is read, are still returned. (A larger limit took more memory, not less time.)
KEPT_BYTES = 128 * 2**20
#: Older versions refuse a larger threshold.
_MOST_BEFORE_GLIBC_2_35 = 32 * 2**20


def keep_freed() -> None:
    """Makes glibc keep freed memory, unless the user set limits or uses another allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _is_set_by_user():
        return
    if not mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(_M_MMAP_THRESHOLD, _MOST_BEFORE_GLIBC_2_35)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _is_set_by_user() -> bool:
    if os.environ.get(_VARIABLE) == "0":
        return True
    settings = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name in os.environ for name in settings)
