"""What a training step frees is kept for the next step, instead of going back to the kernel.

glibc gives large blocks back as soon as they are free. Every step asks for the same blocks again,
and the kernel clears each of their pages anew: a fifth of the time of some models.
"""

from __future__ import annotations

import ctypes
import os

_VARIABLE = "TORCHBEARER_DDP_KEEP_MEMORY"
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: Blocks up to this size are kept, and so much at the heap's end. What is larger, a data set while
#: it is read, say, still goes back. (With more, steps were not faster, and took more memory.)
KEPT_BYTES = 128 * 2**20
#: Older ones refuse more than this.
_MOST_BEFORE_GLIBC_2_35 = 32 * 2**20


def keep_freed() -> None:
    """Lets glibc keep freed memory; another allocator, or what the user chose, is left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _chosen_by_the_user():
        return
    if not mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(_M_MMAP_THRESHOLD, _MOST_BEFORE_GLIBC_2_35)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _chosen_by_the_user() -> bool:
    if os.environ.get(_VARIABLE) == "0":
        return True
    settings = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name in os.environ for name in settings)
