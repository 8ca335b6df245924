"""The settings that a user has given, and the checks that each of them must pass."""

from __future__ import annotations

import math
from typing import Any

#: Settings that say which ranks there are; any of them switches detection off.
PLACEMENT_FLAGS = ("rank", "world_size", "nnodes", "node_rank", "nproc_per_node")
_NO_LIMIT = 2**64 - 1


class Settings(dict[str, Any]):
    """The settings that were given, with checks that know the flags' names."""

    def shown(self, name: str) -> str:
        """The setting as it would be written on a command line."""
        return f"{flag(name)} {self[name]}"

    def needed(self, name: str, found: str, meaning: str) -> int:
        """A whole number that cannot be missing, with what was found instead and what it means."""
        value = self.integer(name)
        if value is None:
            raise ValueError(f"{found} but {flag(name)} is missing. Add it: {meaning}.")
        return value

    def host(self, found: str) -> str:
        """The address that every command needs, with what was found that makes it so."""
        if not self.get("host"):
            raise ValueError(
                f"{found} but --host is missing. Add the address of rank 0's host, the same in "
                "every command."
            )
        return str(self["host"])

    def integer(
        self, name: str, default: int | None = None, least: int | None = None, most: int = _NO_LIMIT
    ) -> int | None:
        """A whole number within bounds, or the default if it was not given."""
        value = self.get(name, default)
        return None if value is None else checked_count(flag(name), value, least, most)

    def seconds(self, name: str, default: float) -> float:
        """A time that is neither zero nor endless, or the default if it was not given."""
        value = self.get(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{flag(name)} is {value!r}; it must be seconds, more than 0.")
        return float(value)

    def refuse_several(self, launcher: str, remedy: str) -> None:
        """Complains if any setting asks for more than one rank."""
        for name in PLACEMENT_FLAGS:
            alone = 0 if name in ("rank", "node_rank") else 1
            if self.get(name, alone) != alone:
                raise ValueError(f"{self.shown(name)} is given but --launcher {launcher} {remedy}")


def flag(name: str) -> str:
    """A setting's name on the command line."""
    return f"--{name.replace('_', '-')}"


def checked_count(name: str, value: Any, least: int | None = None, most: int = _NO_LIMIT) -> int:
    """The value, if it is a whole number within bounds."""
    lowest = -(2**63) if least is None else least
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= most:
        bounds = "" if least is None else f" from {least}" + f" to {most}" * (most < _NO_LIMIT)
        raise ValueError(f"{name} is {value!r}; it must be a whole number{bounds}. Correct it.")
    return value
