"""What a checkpoint holds of the trial itself, the same for all ranks: collect it, put it back.

The keys at the top are those of torchbearer's own ``Trial.state_dict``, as plain strings, so that
``Trial.load_state_dict`` takes the file without this package. What torchbearer does not know, or
would only take in a form that is not plain data (the states of callbacks), is under
:data:`SECTION`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torchbearer
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torchbearer.callbacks import CallbackList
from torchbearer.callbacks.torch_scheduler import TorchScheduler

from torchbearer_ddp import checked
from torchbearer_ddp.checkpoints import kinds
from torchbearer_ddp.checkpoints.snapshot import Snapshot
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import layouts

SECTION = "torchbearer_ddp"
MODEL, OPTIMIZER, HISTORY = "model", "optimizer", "history"
#: What has a place of its own at the top of the file.
MAIN = (MODEL, OPTIMIZER)
_VERSION = "torchbearer_version"
_NAMED_DIFFERENCES = 4
_MISSING = "(missing)"
#: A trial into which a file is loaded need not save files itself.
_OURS = "Checkpoint"


def collect(state: Any, others: dict[str, Any], snapshot: Snapshot) -> dict[str, Any]:
    """A copy of everything but what each rank has for itself.

    ``others`` are the states of what is trained besides the model.
    """
    callbacks = named_callbacks(state[torchbearer.CALLBACK_LIST])
    live: dict[str, Any] = {
        _VERSION: str(torchbearer.__version__),
        MODEL: model_state(state[torchbearer.MODEL]),
        OPTIMIZER: state[torchbearer.OPTIMIZER].state_dict(),
        HISTORY: state[torchbearer.HISTORY],
        SECTION: {
            "callbacks": {name: callback.state_dict() for name, callback in callbacks.items()},
            "schedulers": {name: s.state_dict() for name, s in schedulers(callbacks).items()},
            "others": {name: held for name, held in others.items() if name not in MAIN},
        },
    }
    return snapshot.copy(live, "checkpoint")


def restore(state: Any, payload: dict[str, Any]) -> None:
    """Puts back what :func:`collect` gave, but for the callbacks; the history in place."""
    load_model(state[torchbearer.MODEL], payload[MODEL])
    restore_optimizer(state, payload)
    state[torchbearer.HISTORY][:] = payload.get(HISTORY, [])


def restore_optimizer(state: Any, payload: dict[str, Any]) -> None:
    """Puts back the optimizer with its learning rates."""
    if OPTIMIZER in payload:
        optimizer = state[torchbearer.OPTIMIZER]
        fitting(lambda: layouts.load_optimizer(optimizer, payload[OPTIMIZER]), "optimizer")


def fitting(load: Any, what: str) -> None:
    """Loads a part; if it does not fit, the message says which."""
    try:
        load()
    except (CheckpointError, OSError):  # a file of the user's own that is gone is no misfit
        raise
    except Exception as error:  # of any kind: classes of the user's own load themselves
        raise CheckpointError(
            f"The checkpoint does not fit this trial's {what} "
            f"({checked.first_line(error)}). Build the same {what} as the run that saved "
            "it, or start afresh in another folder."
        ) from error


@contextlib.contextmanager
def of_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names the file in what is said of its contents."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def named_callbacks(callbacks: Iterable[Any]) -> dict[str, Any]:
    """The callbacks by name: the class, what it wraps, and a number where there are several."""
    return _numbered((_callback_name(callback), callback) for callback in callbacks)


def _numbered(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in pairs:
        taken = sum(other.partition("#")[0] == name for other in named)
        named[f"{name}#{taken + 1}" if taken else name] = value
    return named


def _callback_name(callback: Any) -> str:
    inner = getattr(callback, "callback", None)
    name = type(callback).__name__
    return f"{name}({_callback_name(inner)})" if hasattr(inner, "state_dict") else name


def restore_callbacks(state: Any, payload: dict[str, Any]) -> None:
    """Puts back the states of the callbacks that are still there."""
    callbacks = named_callbacks(state[torchbearer.CALLBACK_LIST])
    states = payload.get(SECTION, {}).get("callbacks", {})
    for name in [each for each in states if each in callbacks]:
        fitting(partial(_load_callback, callbacks[name], states[name]), f"callback {name}")


def restore_schedulers(state: Any, payload: dict[str, Any]) -> None:
    """Puts back the states of the schedulers that callbacks have made by now."""
    states = payload.get(SECTION, {}).get("schedulers", {})
    callbacks = named_callbacks(state[torchbearer.CALLBACK_LIST])
    for name, scheduler in schedulers(callbacks).items():
        if name in states:
            load_scheduler(scheduler, states[name], name)


def _load_callback(callback: Any, saved: Any) -> None:
    if type(callback).__module__.startswith("torchbearer."):
        kinds.check_numbers(callback.state_dict(), saved, "its state", owner=callback)
    callback.load_state_dict(saved)


def load_scheduler(scheduler: Any, saved: Any, callback: str) -> None:
    """Loads a state into the scheduler of a callback; one that does not fit is refused."""

    def load() -> None:
        live = scheduler.state_dict()
        kinds.check_scheduler(live, saved, "its state", owner=scheduler)
        scheduler.load_state_dict(kinds.like(live, saved))

    fitting(load, f"scheduler of {callback}")


def warn_of_changed_callbacks(state: Any, payload: dict[str, Any]) -> None:
    """Names the saved callbacks that are gone, and those that are new."""
    saved = payload.get(SECTION, {}).get("callbacks", {})
    live = named_callbacks(state[torchbearer.CALLBACK_LIST])
    missing = [name for name in saved if name not in live and not name.startswith(_OURS)]
    extra = [name for name in live if name not in saved and not name.startswith(_OURS)]
    parts = [f"no longer there: {', '.join(missing)}"] if missing else []
    parts += [f"new, starting without a saved state: {', '.join(extra)}"] if extra else []
    if parts:
        warnings.warn(
            f"The callbacks are not those of the checkpoint ({'; '.join(parts)}). The others "
            "continue where they were.",
            stacklevel=2,
        )


def schedulers(callbacks: dict[str, Any]) -> dict[str, Any]:
    """The schedulers inside torchbearer's callbacks, which save nothing of them."""
    return {
        name: callback._scheduler
        for name, callback in callbacks.items()
        if isinstance(callback, TorchScheduler) and callback._scheduler is not None
    }


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile."""
    while (name := _inner_name(model)) is not None:
        model = getattr(model, name)
    return model


def without_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """A model with the modules inside its wrappers in place of these, at any depth."""
    for name, child in model.named_children():
        setattr(model, name, without_wrappers(unwrapped(child)))
    return model


def _inner_name(module: Any) -> str | None:
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return "_orig_mod" if "_orig_mod" in getattr(module, "_modules", ()) else None


def plain_name(model: torch.nn.Module, name: str) -> str:
    """A key of a model's state dict without the names of the wrappers on its path."""
    kept: list[str] = []
    module: Any = model
    for part in name.split("."):
        if part != _inner_name(module):
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state dict under plain names."""
    return {plain_name(model, name): value for name, value in model.state_dict().items()}


def load_model(model: torch.nn.Module, saved: dict[str, Any], what: str = "model") -> None:
    """Loads a state dict into a model, both wrapped or not; one that does not fit is refused."""
    live = model.state_dict()
    if all(name.startswith("module.") for name in saved) and set(saved) != set(live):
        saved = {name.removeprefix("module."): value for name, value in saved.items()}
    here = {plain_name(model, name): _shape(value) for name, value in live.items()}
    there = {name: _shape(value) for name, value in saved.items()}
    differences = [
        f"{name} has shape {there.get(name, _MISSING)} there and {here.get(name, _MISSING)} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name, _MISSING) != there.get(name, _MISSING)
    ]
    if differences:
        more = "; ..." if len(differences) > _NAMED_DIFFERENCES else ""
        raise CheckpointError(
            f"The checkpoint is not of this {what}: {'; '.join(differences[:_NAMED_DIFFERENCES])}"
            f"{more}. Build the {what} that saved it, or start afresh in another folder."
        )
    for name, buffer in model.named_buffers():
        if (plain := plain_name(model, name)) in saved:  # load_state_dict cannot write into all
            fitting(partial(layouts.overwrite, buffer, saved[plain]), f"{what}'s buffer {name}")
    fitting(
        lambda: model.load_state_dict({name: saved[plain_name(model, name)] for name in live}), what
    )


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


#: What torchbearer saves of its callbacks.
_LISTED = checked.record(
    {
        CallbackList.CALLBACK_TYPES: checked.items(checked.kind(type, "a class")),
        CallbackList.CALLBACK_STATES: checked.items(checked.anything),
    }
)


def from_torchbearer(loaded: Any, where: str) -> dict[str, Any]:
    """Brings a ``Trial.state_dict``, or that of a model alone, into our form, as plain data.

    Raises:
        Unexpected: If it is neither.
    """
    checked.kind(dict, "a dict")(loaded, where)
    payload: dict[str, Any] = {str(key): value for key, value in loaded.items()}
    if MODEL not in payload:
        payload = {MODEL: payload}
    name = str(torchbearer.CALLBACK_LIST)
    if (listed := payload.pop(name, None)) is not None:
        _LISTED(listed, f"{where}[{name!r}]")
        kinds = [kind.__name__ for kind in listed[CallbackList.CALLBACK_TYPES]]
        states = listed[CallbackList.CALLBACK_STATES]
        checked.items(checked.anything, len(kinds))(states, f"the states in {where}[{name!r}]")
        payload[SECTION] = {"callbacks": _numbered(zip(kinds, states, strict=True))}
    return as_plain_data(payload)


def as_plain_data(payload: dict[str, Any]) -> dict[str, Any]:
    """What was loaded, as it can be sent to other ranks; its tensors are not copied."""
    return Snapshot(borrow=True).copy(payload, "checkpoint")
