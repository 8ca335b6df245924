"""What compression remembers from step to step: residuals, and the states of hooks.

It is each rank's own, fits one layout of the buckets, and is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.log import announce

#: Less than this is a matter of rounding.
_ROUNDING = 1e-9
#: What PowerSGD remembers by bucket, and what else of it changes.
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_COUNTERS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


class Residual:
    """What rounding has lost of some numbers; the next step adds it.

    A new one is valid only once the exchange is known to count: one that has to be repeated, or
    whose backward pass failed, leaves the residual as it was.

    It has the unit of the average. In a step with fewer samples numbers are smaller when they are
    sent, and the sum is multiplied by a correction. So a share of the residual is sent, and what
    was lost is corrected too; what is left of the old residual stays.

    Attributes:
        current: What is to be added.
        next: What was lost in the running exchange.
        share: How much of it is sent in this step.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.current = torch.zeros_like(like)
        self.next = torch.zeros_like(like)
        self.share = 1.0
        self._is_new = False
        self._is_committed = False

    def begin(self, share: float) -> None:
        """Begins an exchange; one that was committed and not settled is undone."""
        if self._is_committed:
            self.current, self.next = self.next, self.current
        self.share, self._is_new, self._is_committed = share, False, False

    def add_to(self, numbers: torch.Tensor) -> None:
        """Adds the share of this step to numbers that are about to be sent."""
        if self.share:
            numbers.add_(self.current, alpha=self.share)

    def note_next(self) -> None:
        """Says that :attr:`next` is filled."""
        self._is_new = True

    def commit(self) -> None:
        """Makes the new residual the one to add."""
        if self._is_new:
            self.current, self.next = self.next, self.current
            self._is_new, self._is_committed = False, True

    def settle(self, correction: float) -> None:
        """Brings what was committed into the unit of the average, and adds what was not sent."""
        if self._is_committed:
            self.current = _settled(self.current, self.next, self.share, correction)
            self._is_committed = False


def _settled(
    lost: torch.Tensor, before: torch.Tensor | None, share: float, correction: float
) -> torch.Tensor:
    """What is to be added next: what was lost, and what was not sent of the one before."""
    if correction != 1.0:
        lost.mul_(correction)
    left = 1.0 - share * correction
    return lost if before is None or abs(left) < _ROUNDING else lost.add_(before, alpha=left)


@runtime_checkable
class HasUnit(Protocol):
    """The state of a hook that knows the unit of what it remembers."""

    def set_unit(self, unit: float) -> None:
        """From the next step on gradients are this many times as large as without a loss scale."""


class Memory:
    """The residuals of all sums and the state of a hook, for one layout of the buckets."""

    def __init__(self) -> None:
        self._layout: list[str] | None = None
        self._parameters: list[int] = []
        self._residuals: dict[str, Residual] = {}
        self.hook_state: Any = None
        self._share = 1.0
        #: What a loss is multiplied by, and so the residuals: a loss scale, or 1.
        self._unit = 1.0
        #: PowerSGD's errors before the running exchange.
        self._errors: dict[int, torch.Tensor] | None = None
        #: What was loaded and is not in use yet.
        self._loaded: dict[str, Any] = {}

    def begin(self, buckets: Sequence[Bucket], hook_state: Any = None) -> None:
        """Begins to serve buckets; what belongs to other buckets is dropped."""
        layout = [f"{b.describe()}: {[tuple(p.shape) for p in b.parameters]}" for b in buckets]
        parameters = [id(parameter) for bucket in buckets for parameter in bucket.parameters]
        before = self._layout, self._parameters
        self._undo()
        self._layout, self._parameters, self.hook_state = layout, parameters, hook_state
        if before[0] is not None and before != (layout, parameters):
            self._residuals.clear()
            renew(hook_state)
        if isinstance(hook_state, HasUnit):
            hook_state.set_unit(self._unit)
        self._take_loaded()

    def residual(self, key: str, like: torch.Tensor) -> Residual:
        """The residual of some numbers; ``key`` is their place in the buckets."""
        known = self._residuals.get(key)
        if (
            known is None
            or known.current.shape != like.shape
            or known.current.device != like.device
        ):
            known = self._residuals[key] = Residual(like)
            known.share = self._share
            saved = self._loaded.get("residuals", {}).pop(key, None)
            if saved is not None and saved.shape == like.shape:
                known.current.copy_(saved).mul_(self._unit_of_loaded)
        return known

    def begin_exchange(self, share: float) -> None:
        """Begins an exchange in which this rank sends this share of a regular step.

        One that was begun and not settled is undone.
        """
        self._share = share
        for each in self._residuals.values():
            each.begin(share)
        state = self.hook_state
        if isinstance(state, PowerSGDState):
            self._undo()
            self._errors = dict(state.error_dict)
            if share != 1.0:
                state.error_dict = {i: each * share for i, each in self._errors.items()}
        elif callable(getattr(state, "begin_exchange", None)):
            state.begin_exchange(share)

    def _undo(self) -> None:
        """Takes back what an exchange that was not settled has made of PowerSGD's errors."""
        if self._errors is not None:
            self.hook_state.error_dict, self._errors = self._errors, None

    def settle(self, correction: float) -> None:
        """Ends an exchange that counts, whose sums were multiplied by this."""
        for each in self._residuals.values():
            each.settle(correction)
        state, before, self._errors = self.hook_state, self._errors, None
        if isinstance(state, PowerSGDState) and before is not None:
            for index, lost in state.error_dict.items():
                if lost is not (earlier := before.get(index)):
                    _settled(lost, earlier, self._share, correction)
        elif callable(getattr(state, "settle", None)):
            state.settle(correction)

    def set_unit(self, unit: float) -> None:
        """From the next step on gradients are this many times as large as without a loss scale."""
        factor, self._unit = unit / self._unit, unit
        if factor == 1.0:
            return
        for each in self._residuals.values():
            each.current.mul_(factor)
        if isinstance(self.hook_state, HasUnit):
            self.hook_state.set_unit(unit)
        else:
            self._rescale_hook(factor)

    def _rescale_hook(self, factor: float) -> None:
        if isinstance(self.hook_state, PowerSGDState):
            for error in self.hook_state.error_dict.values():
                error.mul_(factor)
        elif callable(getattr(self.hook_state, "rescale", None)):
            self.hook_state.rescale(factor)

    def drop(self) -> None:
        """Drops all residuals."""
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain data; empty if there is nothing to remember."""
        residuals = {key: each.current for key, each in self._residuals.items()}
        hook = state_of(self.hook_state)
        if not residuals and not hook:
            return {}
        known = {"layout": self._layout, "unit": self._unit}
        return {**known, "residuals": residuals, "hook": hook}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave, as soon as there are buckets of that layout."""
        self._loaded = {**saved, "residuals": dict(saved.get("residuals", {}))}
        if self._layout is not None or saved.get("layout") is None:
            self._take_loaded()

    @property
    def _unit_of_loaded(self) -> float:
        """What is loaded times this is in the unit of now."""
        return self._unit / float(self._loaded.get("unit", self._unit))

    def _take_loaded(self) -> None:
        if not self._loaded:
            return
        if self._loaded.get("layout") != self._layout:
            announce(
                "what compression remembers of earlier steps is not in use: the checkpoint is of "
                "other buckets. It starts anew"
            )
            self._loaded = {}
            return
        for key, each in self._residuals.items():
            saved = self._loaded["residuals"].pop(key, None)
            if saved is not None:
                each.current.copy_(saved).mul_(self._unit_of_loaded)
        if hook := self._loaded.pop("hook", None):
            self._undo()
            load_into(self.hook_state, hook)
            if not isinstance(self.hook_state, HasUnit):  # it has saved its unit itself
                self._rescale_hook(self._unit_of_loaded)
        if not self._loaded["residuals"]:
            self._loaded = {}


def renew(state: Any) -> None:
    """Drops what the state of a hook holds by bucket, as the buckets are others now."""
    if isinstance(state, PowerSGDState):
        for name in _BY_BUCKET:
            getattr(state, name).clear()
    elif callable(getattr(state, "renew_buckets", None)):
        state.renew_buckets()
    elif state_of(state):
        announce(
            "the buckets have changed, and the state of the hook may hold tensors by their index: "
            "give it a method renew_buckets() that drops them"
        )


def state_of(state: Any) -> dict[str, Any]:
    """What the state of a hook remembers, as plain data where it is plain."""
    if state is None or isinstance(state, ProcessGroup):
        return {}
    if isinstance(state, PowerSGDState):
        generator: Any = state.rng
        kind, keys, *numbers = generator.get_state()
        rng = [str(kind), torch.from_numpy(keys.astype(numpy.int64)), *map(float, numbers)]
        return {"rng": rng, **{name: getattr(state, name) for name in (*_COUNTERS, *_BY_BUCKET)}}
    if callable(getattr(state, "state_dict", None)):
        return dict(state.state_dict())
    held = state if isinstance(state, dict) else getattr(state, "__dict__", {})
    return {
        key: value
        for key, value in held.items()
        if not isinstance(value, ProcessGroup) and not callable(value)
    }


def load_into(state: Any, saved: dict[str, Any]) -> None:
    """Gives the state of a hook what :func:`state_of` returned."""
    if not saved or state is None:
        return
    if isinstance(state, PowerSGDState):
        kind, keys, place, has_gauss, cached = saved["rng"]
        numbers = int(place), int(has_gauss), cached
        state.rng.set_state((kind, keys.cpu().numpy().astype(numpy.uint32), *numbers))
        for name in _COUNTERS:
            setattr(state, name, saved[name])
        for name in _BY_BUCKET:
            setattr(state, name, {i: tensor.clone() for i, tensor in saved[name].items()})
    elif callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(saved)
    elif isinstance(state, dict):
        state.update(saved)
    else:
        for key, value in saved.items():
            setattr(state, key, value)
