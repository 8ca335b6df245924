"""The plan: what every rank must agree on before the first step, compared in one exchange."""

from __future__ import annotations

from typing import Any

import torchbearer

from torchbearer_ddp import collectives, process_group, replicas

_REMEDY = "Start every rank with the same script, arguments, data and packages."


def compare_models(state: Any) -> None:
    """Raises the same error on every rank if their models differ in more than values.

    Args:
        state: The state of the Trial.

    Raises:
        DesyncError: Naming the first parameter or buffer that differs, and what each rank has.
    """
    collectives.agree(_shapes(state), "the model", "Build the same model on every rank.")


def compare(state: Any) -> None:
    """Raises the same error on every rank if the ranks are about to do different things.

    Args:
        state: The state of the running Trial.

    Raises:
        DesyncError: Naming what differs, and what each rank has.
    """
    collectives.agree(
        {
            "the world size": collectives.world_size(),
            "the number of epochs": state[torchbearer.MAX_EPOCHS],
            "the number of epochs done": len(state[torchbearer.HISTORY]),
            "the training steps per epoch": state[torchbearer.SELF].state[torchbearer.TRAIN_STEPS],
            "the callbacks": ", ".join(map(_name, state[torchbearer.CALLBACK_LIST])),
            "the metrics": str(state[torchbearer.METRIC_LIST]),
            "the optimizer": type(state[torchbearer.OPTIMIZER]).__name__,
            **{f"the version of {name}": v for name, v in process_group.versions().items()},
            **_shapes(state),
        },
        "the plan of this run",
        _REMEDY,
    )


def _shapes(state: Any) -> dict[str, str]:
    tensors = replicas.replicated_tensors(state[torchbearer.MODEL], state[torchbearer.OPTIMIZER])
    return {f"the model's {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors}


def _name(callback: Any) -> str:
    # Not what RankZeroOnly wraps: ranks other than zero may not even have it.
    return type(callback).__name__
