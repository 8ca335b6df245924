"""The settings that a user has given, and the checks that each of them must pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torchbearer_ddp import checked

#: Settings that name the ranks to start; any of them switches detection off.
PLACEMENT_FLAGS = ("rank", "world_size", "nnodes", "node_rank", "nproc_per_node")
#: Settings of the process that starts the ranks of this host, and of no other launcher.
SUPERVISED_FLAGS = ("log_dir", "tee", "quiet_ranks", "max_restarts")
#: What torch takes for a seed.
_LEAST, _MOST = -(2**63), 2**64 - 1


class Settings(dict[str, Any]):
    """The settings that were given, with checks that know how they were given.

    Args:
        given: The settings.
        keywords: Those that were keyword arguments; the others were flags.
    """

    def __init__(self, given: Mapping[str, Any], keywords: Collection[str] = ()) -> None:
        super().__init__(given)
        self._keywords = frozenset(keywords)

    def called(self, name: str) -> str:
        """The setting's name where it was given: that of a flag, or of a keyword argument."""
        return name if name in self._keywords else flag(name)

    def shown(self, name: str) -> str:
        """The setting as it was given."""
        between = "=" if name in self._keywords else " "
        return f"{self.called(name)}{between}{self[name]}"

    def needed(self, name: str, found: str, meaning: str) -> int:
        """A whole number that must be given; ``found`` is what makes it necessary."""
        if self.get(name) is None:
            raise ValueError(f"{found} but {flag(name)} is missing. Add it: {meaning}.")
        return self.integer(name, 0)

    def host(self, found: str) -> str:
        """The address that every command needs; ``found`` is what makes it necessary."""
        if not self.get("host"):
            raise ValueError(
                f"{found} but --host is missing. Add the address of rank 0's host, the same in "
                "every command."
            )
        return self.host_or("")

    def host_or(self, default: str) -> str:
        """The address that was given, or the default."""
        with checked.as_error(ValueError, after=". Correct it."):
            return checked.host(self.get("host", default), self.called("host"))

    def integer(self, name: str, default: int, least: int | None = None, most: int = _MOST) -> int:
        """A whole number within bounds, or the default if it was not given."""
        return checked_count(self.called(name), self.get(name, default), least, most)

    def seconds(self, name: str, default: float) -> float:
        """A time that is neither zero nor endless, or the default if it was not given."""
        value = self.get(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{self.called(name)} is {value!r}; it must be seconds, more than 0.")
        return float(value)

    def refuse(self, why: str, *names: str, unless_single: bool = False) -> None:
        """Raises if one of these was given; ``unless_single`` allows what means a single rank."""
        for name in names:
            single = 0 if name in ("rank", "node_rank") else 1
            if name in self and not (unless_single and self[name] == single):
                raise ValueError(f"{self.shown(name)} {why}")


def flag(name: str) -> str:
    """A setting's name on the command line."""
    return f"--{name.replace('_', '-')}"


def checked_count(name: str, value: Any, least: int | None = None, most: int = _MOST) -> int:
    """The value, if it is a whole number within bounds."""
    lowest = _LEAST if least is None else least
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= most:
        bounds = "" if least is None else f" from {least}" + f" to {most}" * (most < _MOST)
        raise ValueError(f"{name} is {value!r}; it must be a whole number{bounds}. Correct it.")
    return value
