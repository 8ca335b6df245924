"""What a run trains: one finder for everything that broadcasts, compares, averages or saves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchbearer
from torch.nn.parallel import DistributedDataParallel

Named = list[tuple[str, torch.nn.Parameter]]

#: The parts of a Trial that messages and checkpoints call by these names.
_MAIN = {
    torchbearer.MODEL: "model",
    torchbearer.OPTIMIZER: "optimizer",
    torchbearer.CRITERION: "criterion",
}
#: Loaders and what goes with them: nothing in them is trained, and a loader may be a list of all
#: batches.
LOADER_KEYS = (
    torchbearer.GENERATOR,
    torchbearer.TRAIN_DATA,
    torchbearer.TRAIN_GENERATOR,
    torchbearer.VALIDATION_DATA,
    torchbearer.VALIDATION_GENERATOR,
    torchbearer.TEST_DATA,
    torchbearer.TEST_GENERATOR,
)
_PASSED_OVER = {torchbearer.SELF, torchbearer.CALLBACK_LIST, torchbearer.HISTORY, *LOADER_KEYS}
_DEPTH = 3


@dataclass(frozen=True)
class Found:
    """What a run trains at one moment: to look for it once is enough for one hook.

    Attributes:
        modules: Every module by its name, the model first.
        optimizers: Every optimizer by its name, the Trial's first.
    """

    modules: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]

    def parameters(self, skip: Iterable[Any] = ()) -> Named:
        """Every parameter once, with its name: those of modules, then others of optimizers.

        Args:
            skip: Modules and parameters that are left out.
        """
        seen = {id(parameter) for each in skip for parameter in parameters_of(each)}
        found: Named = []
        for prefix, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found.append((_full_name(prefix, name), parameter))
        for name, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for p, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        found.append((f"{name}.param_groups[{g}]['params'][{p}]", parameter))
        return found

    def buffers(self, skip: Iterable[Any] = ()) -> list[tuple[str, torch.Tensor]]:
        """Every buffer once, with its name."""
        seen = {id(b) for m in skip if isinstance(m, torch.nn.Module) for b in m.buffers()}
        found: list[tuple[str, torch.Tensor]] = []
        for prefix, module in self.modules.items():
            for name, buffer in module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    found.append((_full_name(prefix, name), buffer))
        return found


def find(state: Any) -> Found:
    """The modules and optimizers in the state and on its callbacks."""
    things = list(walk(state))
    return Found(
        {name: each for name, each in things if isinstance(each, torch.nn.Module)},
        {name: each for name, each in things if isinstance(each, torch.optim.Optimizer)},
    )


def walk(state: Any) -> Iterator[tuple[str, Any]]:
    """Every object in the state and on its callbacks, once, with a name that runs have in common.

    Lists, tuples and dicts are entered. Our own callbacks are not: what is inside RankZeroOnly is
    rank zero's own, and the others hold nothing of the user's.
    """
    seen: set[int] = set()
    others = [key for key in list(state) if key not in _MAIN and key not in _PASSED_OVER]
    for key in [*_MAIN, *others]:
        name = _MAIN.get(key) or f"state[{str(key)!r}]"
        yield from _inside(name, state.get(key), seen, _DEPTH)
    for index, callback in enumerate(state[torchbearer.CALLBACK_LIST]):
        if not _is_ours(callback):
            for name, value in list(vars(callback).items()):
                yield from _inside(f"callbacks[{index}].{name}", value, seen, _DEPTH)


def modules(state: Any) -> dict[str, torch.nn.Module]:
    """Every module by its name, the model first."""
    return find(state).modules


def optimizers(state: Any) -> dict[str, torch.optim.Optimizer]:
    """Every optimizer by its name, the Trial's first."""
    return find(state).optimizers


def averaged_by_torch(state: Any) -> list[torch.nn.Module]:
    """Every DistributedDataParallel, also inside another module."""
    found = [each for module in modules(state).values() for each in module.modules()]
    return [each for each in found if isinstance(each, DistributedDataParallel)]


def parameters(state: Any, skip: Iterable[Any] = ()) -> Named:
    """Every parameter once, with its name; see :meth:`Found.parameters`."""
    return find(state).parameters(skip)


def parameters_of(thing: Any) -> list[torch.nn.Parameter]:
    """The parameters of a module or an optimizer, or a parameter itself."""
    if isinstance(thing, torch.nn.Module):
        return list(thing.parameters())
    if isinstance(thing, torch.optim.Optimizer):
        return [parameter for group in thing.param_groups for parameter in group["params"]]
    return [thing]


def _full_name(prefix: str, name: str) -> str:
    """The model's own tensors keep the names that its ``state_dict`` gives them."""
    return name if prefix == "model" else f"{prefix}.{name}"


def _inside(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, str | bytes | int | float | torch.Tensor) or value is None:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(items) if depth else ():
            yield from _inside(f"{name}[{key!r}]", each, seen, depth - 1)
    else:
        yield name, value


def _is_ours(callback: Any) -> bool:
    return any(kind.__module__.startswith("torchbearer_ddp.") for kind in type(callback).__mro__)
