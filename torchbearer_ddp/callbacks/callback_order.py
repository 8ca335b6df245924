"""The plugin owns the order: averaging before clipping, agreement after everybody had their say.

torchbearer calls callbacks in the order of the user's list. Gradients must be averaged before a
callback clips them, and a stop can only be agreed once every callback that may ask for one has run,
wherever the user put them. So a callback of ours may declare, per hook, to go first or last; the
positions in the list, which torchbearer's ``state_dict`` depends on, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torchbearer
from torchbearer.callbacks import Callback, CallbackList

from torchbearer_ddp.group import debug

FIRST = -1
LAST = 1

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class OrderedCallback(Callback):  # type: ignore[misc]
    """A callback that may ask to go first or last in some hooks.

    Subclasses that override :meth:`on_init` must call this one.

    Attributes:
        order: The place by hook: :data:`FIRST`, 0 (the place in the list), :data:`LAST`, or a
            number beyond those to come before or after another one that does the same.
    """

    order: ClassVar[Mapping[str, int]] = {}

    def on_init(self, state: Any) -> None:
        """Takes over the list at init: the earliest hook, so that every later one is in order."""
        callbacks = state[torchbearer.CALLBACK_LIST]
        if not isinstance(callbacks, OrderedCallbackList):
            state[torchbearer.CALLBACK_LIST] = OrderedCallbackList.over(callbacks)


class OrderedCallbackList(CallbackList):  # type: ignore[misc]
    """A torchbearer callback list that honours :attr:`OrderedCallback.order`.

    Args:
        callback_list: The callbacks, in the user's order.
    """

    def __init__(self, callback_list: list[Callback]) -> None:
        self._orders: dict[str, tuple[int, list[Callback]]] = {}
        super().__init__(callback_list)

    @classmethod
    def over(cls, callbacks: CallbackList) -> OrderedCallbackList:
        """The same callbacks in the same positions, as this kind of list.

        Args:
            callbacks: The list that torchbearer made; it goes on working on the same callbacks.
        """
        ordered = cls([])
        ordered.callback_list = callbacks.callback_list
        return ordered

    def __copy__(self) -> OrderedCallbackList:
        """Copies as the same kind of list: torchbearer's own copy would lose the order."""
        return OrderedCallbackList(self.callback_list)

    def in_order(self, hook: str) -> list[Callback]:
        """The callbacks in the order in which this hook calls them."""
        # Sorted once: this is on the way of every step. A callback may still be appended later.
        known, ordered = self._orders.get(hook, (-1, []))
        if known != len(self.callback_list):
            ordered = sorted(
                self.callback_list, key=lambda callback: getattr(callback, "order", {}).get(hook, 0)
            )
            self._orders[hook] = (len(ordered), ordered)
        return ordered


def _ordered(hook: str) -> Callable[[OrderedCallbackList, Any], None]:
    def call(self: OrderedCallbackList, state: Any) -> None:
        debug.note_hook(hook, state)
        for callback in self.in_order(hook):
            getattr(callback, hook)(state)

    call.__name__ = hook
    call.__doc__ = f"Calls ``{hook}`` on each callback, in order."
    return call


for _hook in HOOKS:
    setattr(OrderedCallbackList, _hook, _ordered(_hook))
