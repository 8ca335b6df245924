"""What travels instead of the gradients themselves, as the user has chosen it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from torchbearer_ddp.gradients.transports.memory import Memory

#: What travels instead of single precision, by the name that users give it.
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INT8, POWERSGD = "int8", "powersgd"
#: What is summed in a code of fewer bytes.
CODED = (*HALVES, INT8)
KINDS = (*CODED, POWERSGD)

#: A communication hook as DistributedDataParallel takes it.
Hook = Callable[[Any, Any], Any]
#: Hooks that treat each number alone, so a slice of the gradients will do, and whose only exchange
#: is started by the call itself, so several may be under way.
NUMBER_BY_NUMBER: tuple[Hook, ...] = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)


@dataclass(frozen=True)
class Compression:
    """How gradients are made smaller, and what that remembers from step to step.

    Attributes:
        kind: One of :data:`KINDS`; None if numbers travel as they are, or through a hook.
        rank: The rank of PowerSGD's matrices.
        feedback: Whether what was lost in a step is added to the next; None for what suits the
            kind.
        hook: A communication hook of the user.
        hook_state: What the hook is called with.
        memory: Residuals and the states of hooks.
    """

    kind: str | None = None
    rank: int | None = None
    feedback: bool | None = None
    hook: Hook | None = None
    hook_state: Any = None
    memory: Memory = field(default_factory=Memory)

    @classmethod
    def of(cls, choice: str | Compression | None) -> Compression:
        """A choice that may be given by its name."""
        return choice if isinstance(choice, Compression) else cls(choice)

    @property
    def feeds_back(self) -> bool:
        """True if what rounding loses is added to the next step; halves lose little."""
        return self.kind == INT8 if self.feedback is None else self.feedback

    @property
    def is_powersgd(self) -> bool:
        """True for PowerSGD, also as a hook of the user; its module takes long to import."""
        return self.kind == POWERSGD or type(self.hook_state).__name__ == "PowerSGDState"

    @property
    def may_drift(self) -> bool:
        """True if the ranks' averages may differ in their last bits."""
        if self.hook is not None:
            return not keeps_order(self.hook)
        return self.kind == POWERSGD

    @property
    def fits_slices(self) -> bool:
        """True for a hook of torch that may be given a slice, and a group to average it over."""
        return self.hook in NUMBER_BY_NUMBER and self.hook_state is None

    def describe(self) -> str | None:
        """What must be the same on every rank."""
        if self.hook is not None:
            return f"the hook {hook_name(self.hook)}"
        if self.kind is None:
            return None
        rank = f" of rank {self.rank or 1}" if self.kind == POWERSGD else ""
        feedback = "" if self.feedback is None else f", error_feedback={self.feedback}"
        return f"{self.kind}{rank}{feedback}"

    def check(self, transport: str) -> None:
        """Refuses what does not go together.

        Raises:
            ValueError: If it does not.
        """
        self._check_hook(transport)
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(
                f"compress is {self.kind!r}: it is one of {', '.join(map(repr, KINDS))}, or None."
            )
        if self.rank is not None and self.kind != POWERSGD:
            raise ValueError(f"rank is {self.rank}: it is an option of compress='powersgd' alone.")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank is {self.rank}: the matrices of PowerSGD have at least rank 1.")
        if self.feedback is not None and self.kind is None:
            raise ValueError(
                f"error_feedback is {self.feedback} without compress: nothing is lost that could "
                "be added to the next step. A hook has an error feedback of its own, or none."
            )

    def _check_hook(self, transport: str) -> None:
        if self.hook is None:
            if self.hook_state is not None:
                raise ValueError("hook_state is given without a hook: give the hook that uses it.")
            return
        if not callable(self.hook):
            raise ValueError(
                f"hook is {self.hook!r}: give a function hook(state, bucket) that returns a "
                "Future, as DistributedDataParallel.register_comm_hook takes it."
            )
        if transport in ("shm", "hierarchical"):
            raise ValueError(
                f"transport is {transport!r} and hook is {hook_name(self.hook)}: a hook sends "
                "gradients itself, through its own process group. Leave transport as it is."
            )
        if self.kind is not None:
            raise ValueError(
                f"compress is {self.kind!r} and hook is {hook_name(self.hook)}: a hook decides "
                "itself what travels. Give one of the two; torch's fp16_compress_wrapper and "
                "bf16_compress_wrapper make a hook smaller."
            )


def keeps_order(hook: Hook) -> bool:
    """True if a hook's exchanges keep their order with several buckets under way."""
    return hook in NUMBER_BY_NUMBER or bool(getattr(hook, "in_order", False))


def hook_name(hook: Any) -> str:
    """The name of a hook, for messages."""
    return str(getattr(hook, "__qualname__", None) or repr(hook)).rpartition(".")[2]


#: torch's own PowerSGD, which ``compress='powersgd'`` uses.
powersgd_hook: Hook = powerSGD_hook
