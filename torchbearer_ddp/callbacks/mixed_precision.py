"""Mixed precision: forward and loss in half precision where torch considers it safe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torchbearer

from torchbearer_ddp.callbacks.autocast_region import AutocastRegion
from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback, of_kind
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.data.batch import map_tensors
from torchbearer_ddp.gradients.accumulation import closure_decides
from torchbearer_ddp.gradients.loss_scaling import LossScaling
from torchbearer_ddp.gradients.optimizer_steps import OptimizerSteps
from torchbearer_ddp.group import collectives, trained
from torchbearer_ddp.log import announce

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision(OrderedCallback):
    """Runs forward and loss under ``torch.autocast``, and scales the loss where fp16 needs it.

    Parameters, gradients and the optimizer stay in single precision. It works in one process and
    on many ranks, on CPUs and GPUs, at any place in the list of callbacks. Callbacks that clip see
    the average of all ranks, unscaled. The loss in the state and in the metrics is never scaled;
    predictions are in single precision once the loss is computed.

    With ``fp16`` a step whose averaged gradients are not finite is skipped, on every rank alike,
    and the scale becomes smaller. The metrics ``skipped_steps`` (in this epoch) and ``loss_scale``
    show it, and a line at the end of the epoch. The scale is part of every checkpoint.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import MixedPrecision, data_parallel
        >>> trial = Trial(None, callbacks=[*data_parallel(), MixedPrecision('bf16')])

    Args:
        dtype: ``'bf16'``, or ``'fp16'`` with a scaled loss.
        init_scale: The first scale of ``fp16``.
        growth_interval: After so many steps without an infinity the scale of ``fp16`` doubles.

    State Requirements:
        - :attr:`torchbearer.state.MODEL`: Its device is the one of autocast
        - :attr:`torchbearer.state.OPTIMIZER`: The optimizer whose gradients are unscaled
        - :attr:`torchbearer.state.BACKWARD_ARGS`: Get the scale; a closure must pass them on
        - :attr:`torchbearer.state.LOSS`: Not changed
        - :attr:`torchbearer.state.Y_PRED`: Becomes single precision after the loss
        - :attr:`torchbearer.state.METRICS`: With ``fp16`` two more
    """

    only_once: ClassVar[bool] = True
    # The loss is examined under autocast, and every callback that adds to it has done so. Gradients
    # are unscaled right after the average, before a callback clips them.
    order: ClassVar[Mapping[str, int]] = {
        "on_start": LAST + 2,
        "on_start_training": LAST + 1,
        "on_criterion": LAST + 1,
        "on_backward": FIRST,
        "on_step_training": FIRST - 1,
        "on_end_training": FIRST,
        "on_sample_validation": LAST + 1,
        "on_forward_validation": LAST + 1,
        "on_criterion_validation": LAST + 1,
    }

    def __init__(
        self, dtype: str = "bf16", *, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: it is one of {', '.join(map(repr, DTYPES))}.")
        if init_scale <= 0 or growth_interval < 1:
            raise ValueError(
                f"init_scale is {init_scale} and growth_interval is {growth_interval}: the scale "
                "must be above 0, and the interval at least 1 step."
            )
        self.dtype = dtype
        self.skipped_steps = 0
        self._region = AutocastRegion(DTYPES[dtype])
        self._scaling = (
            LossScaling(init_scale=init_scale, growth_interval=growth_interval)
            if dtype == "fp16"
            else None
        )
        self._steps = OptimizerSteps(self._before_closure, self._before_update)
        self._state: Any = None
        self._averaging: list[SyncGradients] = []
        self._own_arguments: Any = None
        self._has_seen_closure = False

    def enter(self, method: str) -> None:
        """Begins to count anew, also after a run that failed in the middle of an epoch."""
        self.skipped_steps = 0

    def on_start(self, state: Any) -> None:
        """After SyncGradients, so that what is exchanged before a step is unscaled after it."""
        if self._state is not None:  # an evaluation inside of a run
            return
        device = _device(state)
        self._region.device = device.type
        if self._scaling is not None:
            self._scaling.begin(device)
        self._steps.watch()

    def on_start_training(self, state: Any) -> None:
        """In each epoch anew: layers may have been added or replaced in between."""
        self._state, self._averaging = state, of_kind(state, SyncGradients)
        self._region.watch(trained.modules(state).values())
        if self._scaling is not None:
            self._check(state)
            optimizers = trained.optimizers(state).values()
            self._scaling.watch(state[torchbearer.OPTIMIZER], optimizers)

    def on_sample(self, state: Any) -> None:
        """The first hook of a step."""
        self._has_seen_closure = False

    def on_criterion(self, state: Any) -> None:
        """Right before backward, which runs without autocast: its dtypes are those of forward."""
        self._region.leave()
        if self._scaling is not None:
            self._restore_arguments(state)  # after a backward pass that failed and was caught
            self._own_arguments = given = state[torchbearer.BACKWARD_ARGS]
            state[torchbearer.BACKWARD_ARGS] = self._scaling.arguments(
                given, state.get(torchbearer.LOSS), _device(state)
            )

    def on_backward(self, state: Any) -> None:
        """Right after the average: a callback that clips must see unscaled gradients."""
        self._restore_arguments(state)
        if self._scaling is not None:
            self._scaling.unscale()

    def on_step_training(self, state: Any) -> None:
        """The metrics of the step are there, and no callback has read them yet."""
        if not self._has_seen_closure:
            raise ValueError(
                f"{type(state[torchbearer.OPTIMIZER]).__name__} calls no hooks before its step, so "
                "MixedPrecision cannot act. Derive the optimizer from torch.optim.Optimizer."
            )
        self._show(state)

    def on_end_training(self, state: Any) -> None:
        """The epoch's metrics are complete; the history takes them from here."""
        if self._scaling is None:
            return
        self._show(state)
        if self.skipped_steps:
            announce(
                f"MixedPrecision skipped {self.skipped_steps} steps in epoch "
                f"{state[torchbearer.EPOCH]}, whose gradients were not finite; the loss scale is "
                f"now {self._scaling.scale:g}"
            )

    def on_checkpoint(self, state: Any) -> None:
        """The epoch is over, and Checkpoint has not saved it yet."""
        self.skipped_steps = 0

    def on_sample_validation(self, state: Any) -> None:
        """The last hook before a forward pass of validation, evaluate or predict."""
        self._region.enter()

    def on_forward_validation(self, state: Any) -> None:
        """Without targets there is no loss, and predictions are collected right after this hook."""
        if torchbearer.Y_TRUE not in state:
            self._end_forward(state)

    def on_criterion_validation(self, state: Any) -> None:
        """The first hook after the loss: metrics are computed in single precision."""
        self._end_forward(state)

    def leave(self) -> None:
        """Ends what a run has changed for the whole process, also after an exception."""
        self._region.close()
        self._steps.close()
        if self._scaling is not None:
            self._scaling.close()
            self._set_unit(1.0)
        self._state = self._own_arguments = None
        self._averaging = []

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, and the steps skipped in this epoch; nothing with bf16."""
        if self._scaling is None:
            return {}
        return {"scaler": self._scaling.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> MixedPrecision:
        """Takes back what :meth:`state_dict` gave.

        Args:
            state_dict: What :meth:`state_dict` returned.
        """
        if self._scaling is not None:
            self._scaling.load_state_dict(state_dict.get("scaler", {}))
            self.skipped_steps = int(state_dict.get("skipped_steps", 0))
        return self

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by; 1 with bf16."""
        return 1.0 if self._scaling is None else self._scaling.scale

    def _check(self, state: Any) -> None:
        """Refuses what cannot be trained with a scaled loss."""
        optimizer = state[torchbearer.OPTIMIZER]
        if closure_decides(optimizer):
            raise ValueError(
                "MixedPrecision('fp16') does not work with LBFGS, which compares losses of several "
                "calls of its closure and cannot skip one. Use MixedPrecision('bf16')."
            )
        own = trained.parameters_of(optimizer)
        if any(parameter.dtype is torch.float16 for parameter in own):
            raise ValueError(
                "MixedPrecision('fp16') keeps parameters in single precision, but some of the "
                "optimizer's are float16. Leave the model as it is, without half()."
            )
        averaging = of_kind(state, SyncGradients)
        local = [p for s in averaging for each in s.skip for p in trained.parameters_of(each)]
        if collectives.world_size() > 1 and any(s.compression.is_powersgd for s in averaging):
            raise ValueError(
                "MixedPrecision('fp16') finds its scale by steps that overflow, but PowerSGD adds "
                "what a step has lost to the next, and would never be finite again. Use "
                "MixedPrecision('bf16'), or another compress."
            )
        every = max((s.every for s in averaging), default=1)
        if collectives.world_size() > 1 and every > 1:
            raise ValueError(
                "MixedPrecision('fp16') skips a step on all ranks or on none, but SyncGradients's "
                f"every is {every}, so each rank steps by itself. Use MixedPrecision('bf16')."
            )
        if collectives.world_size() > 1 and set(map(id, own)) & set(map(id, local)):
            raise ValueError(
                "MixedPrecision('fp16') skips a step on all ranks or on none, but "
                "SyncGradients(skip=...) leaves gradients of this optimizer to each rank. Use "
                "MixedPrecision('bf16'), or another optimizer for what is skipped."
            )

    def _before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins the closure of a training step under autocast."""
        if self._state is not None and optimizer is self._state[torchbearer.OPTIMIZER]:
            self._has_seen_closure = True
            self._region.enter()
            self._region.in_closure = True
            if self._scaling is not None:
                self._scaling.begin_closure()
                self._set_unit(self._scaling.scale)

    def _before_update(self, optimizer: torch.optim.Optimizer, result: Any) -> Any:
        """Ends the closure: gradients are averaged by now, whether it called on_backward or not."""
        state = self._state
        if state is None:
            return result
        if optimizer is state[torchbearer.OPTIMIZER]:
            self._end_forward(state)
            self._restore_arguments(state)
            if self._scaling is not None:
                exchanged = any(each.has_counted for each in self._averaging)
                released = any(each.accumulation.ends_window(state) for each in self._averaging)
                self.skipped_steps += self._scaling.end_closure(
                    exchanged=exchanged, released=released
                )
        elif self._scaling is not None:
            self._scaling.check_other(optimizer, type(optimizer).__name__)
        return result

    def _set_unit(self, unit: float) -> None:
        """What compression has lost of a step is added to the next one, in the same unit."""
        for each in self._averaging:
            each.compression.memory.set_unit(unit)

    def _end_forward(self, state: Any) -> None:
        self._region.in_closure = False
        self._region.leave()
        if torchbearer.Y_PRED in state:
            state[torchbearer.Y_PRED] = map_tensors(_single, state[torchbearer.Y_PRED])

    def _restore_arguments(self, state: Any) -> None:
        if self._own_arguments is not None:
            state[torchbearer.BACKWARD_ARGS], self._own_arguments = self._own_arguments, None

    def _show(self, state: Any) -> None:
        if self._scaling is not None:
            state[torchbearer.METRICS]["skipped_steps"] = self.skipped_steps
            state[torchbearer.METRICS]["loss_scale"] = self._scaling.scale


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor


def _device(state: Any) -> torch.device:
    """The device of the model; one without parameters runs where its data is."""
    first = next(iter(state[torchbearer.MODEL].parameters()), None)
    return torch.device(state[torchbearer.DEVICE]) if first is None else first.device
