"""Run a torchbearer callback on rank zero only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchbearer.callbacks import Callback

from torchbearer_ddp.callbacks.callback_order import OrderedCallback
from torchbearer_ddp.callbacks.hooks import define_hooks
from torchbearer_ddp.callbacks.torchbearer_callbacks import stand_in
from torchbearer_ddp.group import collectives, local_work


class RankZeroOnly(Callback):  # type: ignore[misc]
    """Runs a callback on rank zero, and takes its place in the list on the other ranks.

    Give it to every rank, so that callback lists and their states have the same positions on all
    ranks. It is for callbacks of your own that write: files, logs, a console. torchbearer's own are
    called on rank zero without it. A callback that changes gradients or parameters must run on
    every rank instead.

    What happens inside is rank zero's alone: steps of an optimizer there are not averaged. If the
    callback requests a stop, :class:`.SyncGradients` stops all ranks.

    Example: ::

        >>> import torchbearer
        >>> from torchbearer import Trial
        >>> from torchbearer.callbacks import on_end_epoch
        >>> from torchbearer_ddp import RankZeroOnly, data_parallel
        >>> @on_end_epoch
        ... def show(state):
        ...     print(state[torchbearer.METRICS])
        >>> trial = Trial(None, callbacks=[*data_parallel(), RankZeroOnly(show)])

    Args:
        callback: The callback; or a function without arguments that returns it, which is called on
            rank zero only. Use a function if the constructor of the callback has side effects, for
            example if it opens a file.

    Attributes:
        callback: The callback; None on the other ranks if it was given as a function.
    """

    def __init__(self, callback: Callback | Callable[[], Callback]) -> None:
        super().__init__()
        self._state: dict[str, Any] = {}
        self.callback: Callback | None = None
        given: Any = callback
        if not isinstance(callback, Callback) and callable(callback):
            if not collectives.is_rank_zero():
                return
            given = callback()
        if not isinstance(given, Callback):
            raise ValueError(
                f"RankZeroOnly was given {given!r}: give it a torchbearer callback, or a function "
                "without arguments that returns one."
            )
        if isinstance(given, OrderedCallback):
            raise ValueError(
                f"{type(given).__name__} exchanges data with the other ranks, so on rank zero "
                "alone it would wait forever. Put it into the list without RankZeroOnly."
            )
        self.callback = given

    def state_dict(self) -> dict[str, Any]:
        """The callback's own state; without a callback, the state that was loaded last."""
        state: dict[str, Any] = self.callback.state_dict() if self.callback else self._state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> RankZeroOnly:
        """Loads the callback's state; without a callback, keeps it for the next save.

        Args:
            state_dict: What :meth:`state_dict` returned, on rank zero.
        """
        self._state = state_dict
        if self.callback:
            self.callback.load_state_dict(state_dict)
        return self

    def _call(self, hook: str, state: Any) -> None:
        if self.callback is not None and collectives.is_rank_zero():
            with local_work.local():  # the other ranks do not take the steps that it may take
                getattr(stand_in(self.callback), hook)(state)


define_hooks(RankZeroOnly, RankZeroOnly._call)
