"""What a run trains besides the model: other modules and optimizers, schedulers, scalers.

Whatever the state, the callbacks or the criterion hold that can save and load itself is saved under
its name. A thing that only some ranks change, or each in its own way (the statistics of another
model's BatchNorm, a probe that is trained locally), is saved for each rank where the ranks differ.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torchbearer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchbearer.callbacks import Callback, CallbackList
from torchbearer.trial import MockOptimizer

from torchbearer_ddp.checkpoints import contents, generators, kinds
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import collectives, layouts, replicas, trained
from torchbearer_ddp.group.plain_data import PlainDataWalker, type_name

States = dict[str, dict[str, Any]]
#: By thing and, of a module, by entry: a checksum of its state.
Digests = dict[tuple[str, str], int]

#: Parameters that an optimizer trains and no module has.
_LOOSE = "parameters outside of modules"
#: What reads the loaders, which are passed over themselves: a resume starts it over.
_DATA = re.compile(r"state\['(iterator|loader)'")
_OF_CALLBACK = re.compile(r"callbacks\[(\d+)\]\.")
#: What has a state_dict and is no part of the training's state.
_NOT_TRAINED = (type, DataLoader, CallbackList, torchbearer.Trial)


def find(state: Any) -> dict[str, Any]:
    """Everything that can save and load itself, but the model, the optimizer and the callbacks."""
    callbacks = contents.named_callbacks(state[torchbearer.CALLBACK_LIST])
    known = {id(each) for each in contents.schedulers(callbacks).values()}
    model: set[int] = set()
    found = {}
    for name, thing in _walk(state):
        if name in contents.MAIN or _DATA.match(name) or id(thing) in known:
            continue
        if not _saves_itself(thing) or isinstance(thing, _NOT_TRAINED):
            continue
        if isinstance(thing, torch.nn.Module):
            tensors = {id(tensor) for tensor in _tensors(thing)}
            model = model or {id(tensor) for tensor in _tensors(state[torchbearer.MODEL])}
            if tensors and tensors <= model:
                continue
        found[name] = thing
    return found


def collect(state: Any) -> States:
    """The states of all that was found, by name; not copied."""
    states = {name: _state_of(thing) for name, thing in find(state).items()}
    loose = {name: parameter.detach() for name, parameter in _loose_parameters(state).items()}
    return {name: held for name, held in {**states, _LOOSE: loose}.items() if held}


class Saveable:
    """Leaves out what is not plain data, and names it in a warning the first time."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._has_looked = False

    def collect(self, state: Any, has_local_parts: bool) -> tuple[States, Digests]:
        """The states of what can be saved, and with several ranks their checksums.

        With local parts (what SyncGradients skips) those of the model and the optimizer too.
        """
        states: States = {}
        digests: Digests = {}
        problems = []
        main = _main_states(state) if has_local_parts else {}
        for name, held in {**collect(state), **main}.items():
            try:
                digests |= _digests(name, held)
            except (CheckpointError, RecursionError) as error:
                holds = f"{name} holds " * isinstance(error, RecursionError)
                problems.append(f"{holds}{error}")
            else:
                states[name] = held
        self._warn(
            problems,
            "Let its state_dict return None, numbers, strings, bytes, tensors, and lists, tuples, "
            "sets and dicts of these.",
        )
        if not self._has_looked:
            self._has_looked = True
            remedy = "Use a generator of torch or numpy, or a random.Random."
            self._warn(generators.problems(state), remedy)
        return states, digests

    def _warn(self, problems: list[str], remedy: str) -> None:
        new = [each for each in problems if each not in self._named]
        self._named.update(new)
        if new and collectives.is_rank_zero():
            warnings.warn(
                f"Not in the checkpoints, so it will start anew after a restart: {'; '.join(new)}. "
                f"{remedy}",
                stacklevel=2,
            )


def differing(states: States, mine: Digests, everyone: Sequence[Digests]) -> States:
    """This rank's part of the states, where the ranks that have a thing differ in it."""
    found: States = {}
    for name, entry in mine:
        if len({theirs[name, entry] for theirs in everyone if (name, entry) in theirs}) > 1:
            held = states[name]
            found.setdefault(name, {}).update({entry: held[entry]} if entry else held)
    return found


def restore(state: Any, saved: States, own: States) -> None:
    """Puts back what is there by now; ``own`` is this rank's part, where there is one."""
    if contents.MODEL in own:
        model = state[torchbearer.MODEL]
        contents.load_model(model, {**contents.model_state(model), **own[contents.MODEL]})
    for name, thing in find(state).items():
        if name in saved:
            _load(thing, name, {**saved[name], **own.get(name, {})})
    loose = _loose_parameters(state)
    values = {**saved.get(_LOOSE, {}), **own.get(_LOOSE, {})}
    for name in [each for each in loose if each in values]:
        contents.fitting(lambda n=name: layouts.overwrite(loose[n], values[n]), name)


def own_optimizer(own: States) -> States:
    """This rank's state of the optimizer, where it is not that of all."""
    return {name: held for name, held in own.items() if name == contents.OPTIMIZER}


def saved_states(section: dict[str, Any]) -> States:
    """The states in a file; one of format 2 has that of the criterion alone."""
    criterion = section.get("criterion")
    found: States = section.get("others", {"criterion": criterion} if criterion else {})
    return found


def warn_of_changes(state: Any, saved: States) -> None:
    """Names what is in the file and not in the trial, and the other way round."""
    here, there = set(collect(state)), set(saved)
    gone = there - here - set(find(state))  # what has nothing to save yet takes what was saved
    parts = [f"only in the checkpoint: {', '.join(sorted(gone))}"] if gone else []
    parts += [f"only in this run: {', '.join(sorted(here - there))}"] if here - there else []
    if parts and collectives.is_rank_zero():
        warnings.warn(
            f"What is trained is not what the checkpoint holds ({'; '.join(parts)}). What only "
            "this run has starts anew.",
            stacklevel=2,
        )


def _walk(state: Any) -> Iterator[tuple[str, Any]]:
    """Every object of the state and the callbacks, on rank zero also inside RankZeroOnly.

    Callbacks are named as their own states are, not by their place in the list.
    """
    callbacks = contents.named_callbacks(state[torchbearer.CALLBACK_LIST])
    names = list(callbacks)
    for name, thing in trained.walk(state):
        yield _OF_CALLBACK.sub(lambda match: f"{names[int(match[1])]}.", name), thing
    for owner, callback in callbacks.items():
        for name, thing in getattr(callback, "local_states", dict)().items():
            yield f"{owner}.{name}", thing
        inner = getattr(callback, "callback", None)
        is_ours = type(callback).__module__.startswith("torchbearer_ddp.")
        if is_ours and isinstance(inner, Callback) and collectives.is_rank_zero():
            for name, thing in trained.walk({torchbearer.CALLBACK_LIST: [inner]}):
                yield _OF_CALLBACK.sub(f"{owner}.", name), thing


def _main_states(state: Any) -> States:
    model = contents.model_state(state[torchbearer.MODEL])
    return {contents.MODEL: model, contents.OPTIMIZER: state[torchbearer.OPTIMIZER].state_dict()}


def _saves_itself(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _state_of(thing: Any) -> dict[str, Any]:
    if isinstance(thing, torch.nn.Module):
        return contents.model_state(thing)
    try:
        held = thing.state_dict()
    except Exception as error:  # whatever a class of the user's own raises
        held = error
    return held if isinstance(held, dict) else {"": held}


def _load(thing: Any, name: str, held: dict[str, Any]) -> None:
    if isinstance(thing, torch.nn.Module):
        contents.load_model(thing, held, name)
    elif isinstance(thing, torch.optim.Optimizer):
        contents.fitting(lambda: layouts.load_optimizer(thing, held), name)
    elif isinstance(thing, LRScheduler):
        contents.load_scheduler(thing, held, name)
    else:
        live = _state_of(thing)
        if type(thing).__module__.startswith(
            "torch."
        ):  # such as a GradScaler; ours check their own
            check = partial(kinds.check_numbers, live, held, "its state", owner=thing)
            contents.fitting(check, name)
        value = held[""] if held.keys() == {""} else kinds.like(live, held)
        contents.fitting(lambda: thing.load_state_dict(value), name)


def _loose_parameters(state: Any) -> dict[str, torch.Tensor]:
    found = dict(_walk(state))
    modules = [each for each in found.values() if isinstance(each, torch.nn.Module)]
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    return {
        f"{name}.param_groups[{g}]['params'][{p}]": parameter
        for name, optimizer in found.items()
        if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, MockOptimizer)
        for g, group in enumerate(optimizer.param_groups)
        for p, parameter in enumerate(group["params"])
        if id(parameter) not in inside
    }


def _digests(name: str, held: dict[str, Any]) -> Digests:
    of_module = all(isinstance(value, torch.Tensor) for value in held.values())
    parts = held if of_module else {"": held.get("", held)}
    return {(name, entry): _Digest().of(part, name) for entry, part in parts.items()}


class _Digest(PlainDataWalker):
    """A checksum of plain data; in one process only whether it is plain."""

    def __init__(self) -> None:
        self._crc = 0
        self._compares = collectives.world_size() > 1

    def of(self, value: Any, where: str) -> int:
        self.walk(value, where)
        return self._crc

    def scalar(self, value: Any) -> Any:
        self._crc = zlib.crc32(repr(value).encode(), self._crc)

    def tensor(self, tensor: torch.Tensor, where: str) -> Any:
        parts = layouts.sparse_parts(tensor) or [tensor]
        if not all(layouts.is_strided(part) for part in parts):
            self.other(tensor, where)
        if self._compares:
            self.scalar(int(replicas.fingerprint([("", tensor)])))

    def sequence(self, kind: type, items: list[Any]) -> Any:
        return None

    def mapping(self, keys: list[Any], values: list[Any]) -> Any:
        return None

    def other(self, value: Any, where: str) -> Any:
        reason = f"raised {value!r}" if isinstance(value, Exception) else f"is a {type_name(value)}"
        raise CheckpointError(f"{where} {reason}")
