"""What the ranks post in the store for each other: JSON of a known form.

Whoever reaches the store can write there. An entry of another form is told as what it is, and not
as the end of a rank.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

# torch.distributed exports these names as well, but its type hints lack them.
from torch._C._distributed_c10d import Store

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError

#: No entry of ours comes near to this.
_LONGEST = 2**20
_REMEDY = (
    ". No rank of this package writes that: another program uses the store of this run. Give the "
    "run a port of its own, and a secret of its own in TORCHBEARER_DDP_TOKEN on every rank."
)


def read(store: Store, key: str, form: checked.Form) -> Any:
    """What is posted under a key, or None.

    Raises:
        DesyncError: If something else is posted there.
    """
    return parse(store.get(key), key, form) if store.check([key]) else None


def parse(content: bytes, key: str, form: checked.Form, longest: int = _LONGEST) -> Any:
    """What an entry of the store says; None if it is empty."""
    with told():
        return checked.from_json(content, form, f"The entry {key!r}", longest) if content else None


def told() -> contextlib.AbstractContextManager[None]:
    """Tells what is unexpected in an entry as what another program has written."""
    return checked.as_error(DesyncError, after=_REMEDY)


def first(store: Store, key: str, value: Any, form: checked.Form, longest: int = _LONGEST) -> Any:
    """Posts a value unless there is one; returns the one that was posted first."""
    return parse(store.compare_set(key, "", json.dumps(value)), key, form, longest)
