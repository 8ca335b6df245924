"""The order in which gradients appear: what is ready first is to be sent first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class GradientOrder:
    """Notes the order in a backward pass, from hooks on the parameters.

    The order of the layers in a model says little about it: they may be used in another one.

    Args:
        parameters: The parameters, which are told apart by their place here.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._count = len(parameters)
        self._seen: dict[int, None] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def close(self) -> list[int]:
        """Takes the hooks away.

        Returns:
            Every parameter's place: first those with a gradient, as they appeared, then the others,
            last ones first, which is how most models are.
        """
        for hook in self._hooks:
            hook.remove()
        others = [i for i in reversed(range(self._count)) if i not in self._seen]
        return [*self._seen, *others]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def appeared(_: torch.Tensor) -> None:
            self._seen.setdefault(index)

        return appeared
