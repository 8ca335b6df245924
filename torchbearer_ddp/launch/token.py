"""A secret in the names of a run's entries in the store: who does not know it does not meet them.

The ranks that a launcher starts, or a submission, get one of 128 random bits with their task. Ranks
that are started one by one can share one through an environment variable.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group.launcher import TOKEN_VARIABLE

_BYTES = 16
_SHORTEST = 16


def new_token() -> str:
    """A secret that nobody can guess."""
    return secrets.token_hex(_BYTES)


def prefix_with_token(prefix: str, environment: Mapping[str, str]) -> str:
    """The prefix of a run's entries, with the token of the environment if there is one.

    Raises:
        LaunchError: If the token could be guessed.
    """
    given = environment.get(TOKEN_VARIABLE)
    if not given:
        return prefix
    if len(given) < _SHORTEST:  # the value itself is not shown
        raise LaunchError(
            f"{TOKEN_VARIABLE} has {len(given)} characters: a secret needs {_SHORTEST} or more. "
            "Set it on every rank to the same output of 'openssl rand -hex 16'."
        )
    digest = hashlib.sha256(given.encode(errors="surrogateescape")).hexdigest()
    return f"{prefix}/{digest}"
