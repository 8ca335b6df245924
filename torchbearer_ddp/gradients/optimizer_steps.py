"""A hook before every optimizer's step, wherever it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchbearer_ddp.group import local_work

#: Called with the optimizer.
BeforeClosure = Callable[[torch.optim.Optimizer], None]
#: Called with the optimizer, and with what its closure returned if it has one; what it returns is
#: the closure's result.
BeforeUpdate = Callable[[torch.optim.Optimizer, Any], Any]


class OptimizerSteps:
    """Calls a function right before any optimizer of this process uses its gradients.

    An optimizer that is given a closure calls it inside its step, often more than once: then the
    function is called after each call of the closure. What one rank does for itself, inside
    RankZeroOnly, is left out.
    """

    def __init__(self, before_closure: BeforeClosure, before_update: BeforeUpdate) -> None:
        self._before_closure = before_closure
        self._before_update = before_update
        self._handle: Any = None

    def watch(self) -> None:
        """Begins to watch."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._hook)

    def close(self) -> None:
        """Ends it."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hook(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if local_work.inside():
            return None
        # torch passes the optimizer itself as the first argument.
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._before_update(optimizer, None)
            return None

        def closure_and_average() -> Any:
            self._before_closure(optimizer)
            return self._before_update(optimizer, closure())

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_and_average}
        return (args[0], closure_and_average, *args[2:]), kwargs
