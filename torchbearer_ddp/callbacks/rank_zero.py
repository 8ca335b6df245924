"""Any torchbearer callback, on rank zero only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchbearer.callbacks import Callback

from torchbearer_ddp.callbacks.callback_order import HOOKS, OrderedCallback
from torchbearer_ddp.group import collectives


class RankZeroOnly(Callback):  # type: ignore[misc]
    """Runs a callback on rank zero, and stands in for it on the others.

    Give it to every rank, so that the callback lists and their states line up. It is meant for
    callbacks that write: files, logs, a console. One that changes gradients or parameters must run
    on every rank instead.

    A stop that the callback asks for is agreed by :class:`.SyncGradients`, like any other.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer.callbacks import Best, CSVLogger
        >>> from torchbearer_ddp import RankZeroOnly, data_parallel
        >>> trial = Trial(None, callbacks=[*data_parallel(), RankZeroOnly(CSVLogger('log.csv')),
        ...                                RankZeroOnly(lambda: Best('runs/a/best.pt'))])

    Args:
        callback: The callback; or a function without arguments that makes it, which is called on
            rank zero only. Take a function where making the callback already does something: those
            of torchbearer that save models make their folder, and ranks that do so at once collide.

    Attributes:
        callback: The callback; None on the other ranks if it was given as a function.
    """

    def __init__(self, callback: Callback | Callable[[], Callback]) -> None:
        super().__init__()
        self._state: dict[str, Any] = {}
        self.callback: Callback | None = None
        if isinstance(callback, Callback):
            self.callback = callback
        elif not callable(callback):
            raise ValueError(_refusal(callback))
        elif collectives.is_rank_zero():
            self.callback = callback()
            if not isinstance(self.callback, Callback):
                raise ValueError(_refusal(self.callback))
        if isinstance(self.callback, OrderedCallback):
            raise ValueError(
                f"{type(self.callback).__name__} exchanges data with the other ranks, so on rank "
                "zero alone it would wait for ever. Put it into the list as it is."
            )

    def state_dict(self) -> dict[str, Any]:
        """The callback's own state; where there is no callback, the last one that was loaded."""
        state: dict[str, Any] = self.callback.state_dict() if self.callback else self._state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> RankZeroOnly:
        """Hands the state on to the callback; where there is none, keeps it for the next save.

        Args:
            state_dict: What :meth:`state_dict` gave, on rank zero.
        """
        self._state = state_dict
        if self.callback:
            self.callback.load_state_dict(state_dict)
        return self


def _refusal(found: Any) -> str:
    return (
        f"RankZeroOnly was given {found!r}: give it a torchbearer callback, or a function without "
        "arguments that makes one."
    )


def _on_rank_zero(hook: str) -> Callable[[RankZeroOnly, Any], None]:
    def call(self: RankZeroOnly, state: Any) -> None:
        if self.callback is not None and collectives.is_rank_zero():
            getattr(self.callback, hook)(state)

    call.__name__ = hook
    call.__doc__ = f"Calls the callback's ``{hook}``, on rank zero."
    return call


for _hook in HOOKS:
    setattr(RankZeroOnly, _hook, _on_rank_zero(_hook))
