"""Every exception of the package; messages say what was found, what was expected and what to do."""

from __future__ import annotations


class DistributedError(RuntimeError):
    """The base of every error of this package.

    Attributes:
        secondary: True if another rank's failure caused this error. The launcher shows errors that
            are not secondary first.
    """

    secondary = False


class LaunchError(DistributedError):
    """The ranks could not be started, or did not find each other."""


class DesyncError(DistributedError):
    """The ranks have different settings or parameters, or run different steps."""


class CheckpointError(DistributedError):
    """A checkpoint could not be written or read, or does not belong to this run."""


class WorkerError(DistributedError):
    """A rank failed; the message carries that rank's own traceback.

    Args:
        message: The text of the error.
        rank: The rank that failed first, if it is known.
        host: The host that rank ran on, if it is known.
        exitcode: Its exit code (negative: the signal that ended it), if it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        exitcode: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exitcode = exitcode


class PeerLost(WorkerError):
    """Another rank failed, ended or did not answer while this one waited for it."""

    secondary = True


def class_named(name: str) -> type[DistributedError]:
    """The error of this name, or the base of all for a name that is none of ours."""
    known = globals().get(name)
    if isinstance(known, type) and issubclass(known, DistributedError):
        return known
    return DistributedError
