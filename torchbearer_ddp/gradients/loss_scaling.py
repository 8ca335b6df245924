"""Scales the loss of a half-precision run, and unscales the gradients once they are averaged.

The loss itself stays as it is: backward starts from the scale instead of from 1, which gives the
same gradients as a loss that was multiplied by it. Gradients of the Trial's optimizer are in the
scaled unit from the backward pass to :meth:`LossScaling.unscale`, and in the plain one elsewhere.
"""

from __future__ import annotations

import enum
import types
from collections import UserDict
from collections.abc import Callable, Iterable, KeysView, Mapping
from typing import Any

import torch
from torch.amp import GradScaler

from torchbearer_ddp.gradients.hooks import GradientHooks, Hook
from torchbearer_ddp.group import trained

_CLOSURE = (
    "MixedPrecision('fp16') needs the closure to call on_criterion before "
    "state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS]), and on_backward after "
    "it; MixedPrecision('bf16') scales nothing."
)


class _Phase(enum.Enum):
    """Where a closure is."""

    OUTSIDE = enum.auto()
    #: No backward pass with a scaled loss yet.
    PLAIN = enum.auto()
    #: A scaled backward pass runs, or has run.
    SCALED = enum.auto()
    #: The gradients are unscaled.
    UNSCALED = enum.auto()


class BackwardArguments(UserDict[str, Any]):
    """Arguments of ``backward`` that notice when they are used."""

    def __init__(self, arguments: Mapping[str, Any], on_use: Callable[[], None]) -> None:
        super().__init__(arguments)
        self._on_use = on_use

    def keys(self) -> KeysView[str]:
        """The names; Python asks for them in ``backward(**arguments)``."""
        self._on_use()
        return super().keys()


class LossScaling:
    """A loss scale that follows the gradients, the same on every rank.

    Args:
        options: Passed on to torch's ``GradScaler``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        #: The scale of the next backward pass; known here, so that a GPU need not be asked.
        self.scale = float(options["init_scale"])
        #: None between runs.
        self._scaler: Any = None
        self._saved: dict[str, Any] = {}
        self._own: list[torch.nn.Parameter] = []
        self._hooks = GradientHooks()
        self._watched: list[int] = []
        #: Gradients that were unscaled, by parameter: backward may add to them.
        self._unscaled: dict[torch.nn.Parameter, torch.Tensor] = {}
        #: What was checked for infinities since the last update of the scale.
        self._checked: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._phase = _Phase.OUTSIDE
        #: True if a backward pass without the scale has written a gradient in this closure.
        self._has_plain = False
        #: How many scaled backward passes this closure has made, and how often each gradient of the
        #: Trial's optimizer was written.
        self._passes = 0
        self._writes: dict[int, int] = {}
        #: Gradients in the scaled unit that only other optimizers use, by parameter.
        self._of_others: dict[torch.Tensor, torch.Tensor | None] = {}
        self._unscaled = {}
        self._checked = []

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how long it has not changed."""
        return dict(self._saved if self._scaler is None else self._scaler.state_dict())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; nothing if that was of a run without scale."""
        if not saved:
            return
        self._saved = dict(saved)
        self.scale = float(saved["scale"])
        if self._scaler is not None:
            self._scaler.load_state_dict(saved)

    def begin(self, device: torch.device) -> None:
        """Begins a run with the scale of the run before."""
        self._scaler = GradScaler(device.type, **self._options)
        self.load_state_dict(self._saved)
        # Gradients of other ranks may have to be unscaled before this one has scaled a loss.
        self._scaler.scale(torch.ones((), device=device))

    def watch(self, optimizer: torch.optim.Optimizer, others: Iterable[Any]) -> None:
        """Watches which gradients are written with the scale, and which without it."""
        self._own = trained.parameters_of(optimizer)
        own = set(map(id, self._own))
        rest = [p for each in others for p in trained.parameters_of(each) if id(p) not in own]
        watched = [*map(id, self._own), -1, *map(id, rest)]
        if watched != self._watched:
            self._hooks.close()
            self._clear()
            self._watched = watched
            unique = {id(parameter): parameter for parameter in rest}
            hooks: list[tuple[torch.Tensor, Hook]] = [(p, self._note_own) for p in self._own]
            hooks += [(parameter, self._note_other) for parameter in unique.values()]
            self._hooks = GradientHooks(hooks)

    def close(self) -> None:
        """Ends a run, also one that failed: only plain data is kept."""
        self._saved, self._scaler = self.state_dict(), None
        self._hooks.close()
        self._own, self._watched = [], []
        self._clear()

    def begin_closure(self) -> None:
        """Begins a closure of the Trial's optimizer."""
        self._phase, self._has_plain, self._passes = _Phase.PLAIN, False, 0
        self._writes.clear()

    def arguments(self, given: Mapping[str, Any], loss: Any, device: torch.device) -> Any:
        """The arguments of the coming backward pass, which starts from the scale."""
        self._scale_again()
        start = given.get("gradient")
        if start is None:
            start = torch.ones_like(loss) if _is_loss(loss) else torch.ones((), device=device)
        return BackwardArguments({**given, "gradient": self._scaler.scale(start)}, self._note_use)

    def unscale(self) -> None:
        """Divides the gradients by the scale, after the average and before any callback uses them.

        Raises:
            ValueError: If a backward pass did not start from the scale.
        """
        if self._has_plain or self._phase is _Phase.PLAIN:
            raise ValueError(
                "The closure made a backward pass that does not start from the loss scale, so its "
                f"gradients would be divided by {self.scale:g} for nothing. {_CLOSURE}"
            )
        if self._phase is not _Phase.SCALED:
            return
        self._phase = _Phase.UNSCALED
        found = [parameter for parameter in self._own if parameter.grad is not None]
        self._of_others = {parameter: parameter.grad for parameter in self._of_others}
        if found:  # none while accumulate holds them
            # Not the optimizer itself: torch unscales one only once, and a closure may make
            # several backward passes.
            part: Any = types.SimpleNamespace(param_groups=[{"params": found}])
            self._scaler.unscale_(part)
            self._checked.append(part)
            self._unscaled = {p: p.grad for p in found if p.grad is not None}

    def end_closure(self, *, exchanged: bool, released: bool) -> bool:
        """Decides on the step; True if it must be skipped, for which the gradients are dropped.

        Args:
            exchanged: True if gradients of other ranks have come in.
            released: True if those of earlier batches have, which are in the scaled unit.

        Raises:
            ValueError: If a backward pass did not start from the scale.
        """
        if self._phase is _Phase.SCALED or self._has_plain:
            self.unscale()  # a closure that does not call on_backward
        is_idle = self._phase is _Phase.PLAIN and not self._passes
        if is_idle and released:
            self._phase = _Phase.SCALED
            self.unscale()
        elif is_idle and exchanged and any(p.grad is not None for p in self._own):
            raise ValueError(
                "The closure made no backward pass for this batch on this rank, but other ranks "
                f"made one, with the loss scale. Skip a batch on every rank. {_CLOSURE}"
            )
        self._phase = _Phase.OUTSIDE
        if not self._checked:
            return False
        skips = self._found_inf()
        self._scaler.update()
        self.scale = float(self._scaler.get_scale())
        self._checked = []
        if skips:
            for parameter in self._own:
                parameter.grad = None
        return skips

    def check_other(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Refuses a step of another optimizer on gradients of the scaled loss.

        Raises:
            ValueError: If it is about to make one.
        """
        if any(
            parameter in self._of_others and parameter.grad is not None
            for parameter in (trained.parameters_of(optimizer) if self._of_others else ())
        ):
            raise ValueError(
                "MixedPrecision('fp16') scales the loss for the optimizer of the Trial, but "
                f"{name} beside it is about to step on gradients of a scaled loss. Use "
                "MixedPrecision('bf16'), which needs no scale."
            )

    def _found_inf(self) -> bool:
        found = [
            each
            for part in self._checked
            for each in self._scaler._found_inf_per_device(part).values()
        ]
        return any(float(each) > 0 for each in found)

    def _scale_again(self) -> None:
        """Multiplies what was unscaled and is still there, because backward will add to it."""
        again = [grad for p, grad in self._unscaled.items() if p.grad is grad]
        self._unscaled = {}
        for gradient in again:
            values = gradient._values() if gradient.is_sparse else gradient
            values.mul_(self.scale)

    def _note_use(self) -> None:
        self._phase = _Phase.SCALED
        self._passes += 1

    def _note_own(self, parameter: torch.Tensor) -> None:
        if self._phase in (_Phase.PLAIN, _Phase.SCALED):
            self._writes[id(parameter)] = self._writes.get(id(parameter), 0) + 1
            # A pass writes each gradient once: more writes come of a pass without the scale.
            self._has_plain |= self._writes[id(parameter)] > self._passes

    def _note_other(self, parameter: torch.Tensor) -> None:
        if self._phase is _Phase.SCALED:
            self._of_others[parameter] = parameter.grad
        elif self._of_others.get(parameter) is not parameter.grad:
            self._of_others.pop(parameter, None)


def _is_loss(value: Any) -> bool:
    return torch.is_tensor(value) and value.requires_grad and value.numel() == 1
