"""The order of callbacks within a hook, independent of their positions in the user's list.

torchbearer calls callbacks in the order of the user's list. Gradients must be averaged before a
callback clips them, and a stop can be agreed only after every callback that may request one. So our
callbacks declare, per hook, to be called first or last. Their positions in the list do not change:
torchbearer's ``state_dict`` depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torchbearer
from torchbearer.callbacks import Callback, CallbackList

from torchbearer_ddp.callbacks import scoped_trial
from torchbearer_ddp.callbacks.cut_short import RunEnd
from torchbearer_ddp.callbacks.hooks import define_hooks
from torchbearer_ddp.callbacks.torchbearer_callbacks import stand_ins
from torchbearer_ddp.group import debug, membership, stop_request, unsynchronised

_Kind = TypeVar("_Kind")
FIRST = -1
LAST = 1


def of_kind(state: Any, kind: type[_Kind]) -> list[_Kind]:
    """The callbacks of one class in the list of a run."""
    return [each for each in state[torchbearer.CALLBACK_LIST] if isinstance(each, kind)]


class OrderedCallback(Callback):  # type: ignore[misc]
    """A callback that is called first or last in some hooks.

    Subclasses that override :meth:`on_init` must call this one.

    Attributes:
        order: The place by hook: :data:`FIRST`, 0 (as in the list) or :data:`LAST`; a number below
            ``FIRST`` or above ``LAST`` is before or after other callbacks with these.
        only_once: True if a second one of its kind in a list would do its work twice.
    """

    order: ClassVar[Mapping[str, int]] = {}
    only_once: ClassVar[bool] = False

    def on_init(self, state: Any) -> None:
        """Replaces the callback list at init, the earliest hook, so that all others are ordered."""
        found = sum(type(each) is type(self) for each in state[torchbearer.CALLBACK_LIST])
        if self.only_once and found > 1:
            raise ValueError(
                f"{type(self).__name__} is in the list of callbacks {found} times. data_parallel() "
                "contains SyncModel, ShardData, SyncGradients and SyncMetrics: use it once, and "
                "give it the options."
            )
        membership.ensure_joined()
        unsynchronised.watch()
        callbacks = state[torchbearer.CALLBACK_LIST]
        if not isinstance(callbacks, OrderedCallbackList):
            state[torchbearer.CALLBACK_LIST] = OrderedCallbackList.over(callbacks)
        if (trial := state.get(torchbearer.SELF)) is not None:
            scoped_trial.install(trial)

    def enter(self, method: str) -> None:
        """Called when run, evaluate or predict begins, before any hook, with its name."""

    def leave(self) -> None:
        """Called when run, evaluate or predict is left, also by an exception on this rank alone."""


#: No list has so many callbacks.
_UNKNOWN: tuple[int, list[Callback]] = (-1, [])


class OrderedCallbackList(CallbackList):  # type: ignore[misc]
    """A torchbearer callback list that calls its callbacks by :attr:`OrderedCallback.order`."""

    def __init__(self, callback_list: list[Callback]) -> None:
        self._orders: dict[str, tuple[int, list[Callback]]] = {}
        self._run_end = RunEnd()
        super().__init__(callback_list)

    @classmethod
    def over(cls, callbacks: CallbackList) -> OrderedCallbackList:
        """A list of this kind with the same callbacks in the same positions."""
        ordered = cls([])
        ordered.callback_list = callbacks.callback_list
        return ordered

    def __copy__(self) -> OrderedCallbackList:
        """A list of the same kind: torchbearer's own copy would lose the order."""
        return OrderedCallbackList(self.callback_list)

    def in_order(self, hook: str) -> list[Callback]:
        """The callbacks, or what stands in for them, in the order in which this hook calls them."""
        # Sorted once, because each step calls many hooks. A callback may be appended later.
        known, ordered = self._orders.get(hook, _UNKNOWN)
        if known != len(self.callback_list):
            count = len(self.callback_list)
            ordered = sorted(self.callback_list, key=lambda callback: _place(callback, hook))
            ordered = [each for each in stand_ins(ordered) if not _does_nothing(each, hook)]
            self._orders[hook] = (count, ordered)
        return ordered

    def enter(self, trial: torchbearer.Trial, method: str) -> None:
        """Calls ``enter`` of every callback of ours."""
        self._run_end.begin(trial, method)
        for callback in self._ours():
            callback.enter(method)

    def leave(self) -> None:
        """Calls ``leave`` of every callback of ours; nothing polls for a signal any more."""
        stop_request.stop_polling()
        debug.end_steps()
        for callback in self._ours():
            callback.leave()

    def _ours(self) -> list[OrderedCallback]:
        return [each for each in self.callback_list if isinstance(each, OrderedCallback)]

    def _call(self, hook: str, state: Any) -> None:
        debug.note_hook(hook, state)
        if hook in ("on_start", "on_end"):
            self._run_end.note(hook, state)
        known, callbacks = self._orders.get(hook, _UNKNOWN)
        for callback in callbacks if known == len(self.callback_list) else self.in_order(hook):
            getattr(callback, hook)(state)


def _place(callback: Callback, hook: str) -> int:
    """The place in a hook; an attribute ``order`` of a user's callback means something else."""
    return callback.order.get(hook, 0) if isinstance(callback, OrderedCallback) else 0


def _does_nothing(callback: Callback, hook: str) -> bool:
    """True if a callback of ours has nothing to do in a hook, which is then not called."""
    own = getattr(type(callback), hook, None)
    return isinstance(callback, OrderedCallback) and own is getattr(Callback, hook)


define_hooks(OrderedCallbackList, OrderedCallbackList._call)
