"""Saved values beside the live ones whose place they take: of the same kind, or refused.

What a class would take, and only fail on in a later step, is found before the run goes on.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy
import torch

from torchbearer_ddp import checked
from torchbearer_ddp.group import layouts

_NUMBERS = (bool, int, float, torch.Tensor, numpy.generic, numpy.ndarray)
_LARGEST = 2**63 - 1
_SEQUENCES = (list, tuple, set, deque)
#: Where these classes hold nothing yet, it can only be numbers that they will hold.
_KNOWN = ("torch", "torchbearer", "torchbearer_ddp")
#: What every scheduler of torch counts; without these it would begin anew.
_PLACE = ("last_epoch", "_step_count")


def check(live: Any, saved: Any, where: str, *, owner: Any) -> None:
    """Refuses a value of another kind than the one here, at any depth of dicts.

    What is empty here may become anything, unless its owner is of a known class. All may be None,
    except for the whole numbers of a known class.

    Raises:
        Unexpected: If it is of another kind.
    """
    _check(live, saved, where, known=_is_known(owner))


def check_numbers(live: dict[str, Any], saved: Any, where: str, *, owner: Any) -> None:
    """Refuses what :func:`check` refuses, and None or several numbers in the place of one.

    Raises:
        Unexpected: If it is one of these.
    """
    for key, value in checked.kind(dict, "a dict")(saved, where).items():
        is_number = type(live.get(key)) in (int, float)
        if value is None and is_number:
            raise checked.Unexpected(f"{where}[{key!r}] is None, not a number")
        if is_number and _is_known(owner):
            one_number(value, f"{where}[{key!r}]")
    check(live, saved, where, owner=owner)


def check_scheduler(live: dict[str, Any], saved: Any, where: str, *, owner: Any) -> None:
    """Refuses the state of a scheduler that would fail at a later step, or not know its place.

    Raises:
        Unexpected: If it is one.
    """
    check_numbers(live, saved, where, owner=owner)
    if _is_known(owner):
        for key in [each for each in _PLACE if each in live]:
            checked.whole(-1)(saved.get(key), f"{where}[{key!r}]")
        if "total_steps" in live and "last_epoch" in live:  # torch refuses a step beyond the last
            checked.whole(saved["last_epoch"])(saved.get("total_steps"), f"{where}['total_steps']")
        _check_sizes(live, saved, where)


def _is_known(owner: Any) -> bool:
    return type(owner).__module__.partition(".")[0] in _KNOWN


def _check_sizes(live: Any, saved: Any, where: str) -> None:
    """Refuses lists of other lengths, several numbers in the place of one, and missing values."""
    if isinstance(live, dict):
        for key in [each for each in live if each in checked.kind(dict, "a dict")(saved, where)]:
            _check_sizes(live[key], saved[key], f"{where}[{checked.shown(key)}]")
    elif isinstance(live, list | tuple):
        checked.items(checked.anything, len(live))(saved, where)
        for index, pair in enumerate(zip(live, saved, strict=True)):
            _check_sizes(*pair, f"{where}[{index}]")
    elif isinstance(live, _NUMBERS):
        one_number(saved, where)
    elif live is not None and saved is None:
        raise checked.Unexpected(f"{where} is None")


def _check(live: Any, saved: Any, where: str, *, known: bool) -> None:
    if isinstance(live, deque):
        checked.kind(_SEQUENCES, "a list")(saved, where)
    if saved is None and known and type(live) is int:
        raise checked.Unexpected(f"{where} is None, not a number")
    if saved is None or not (known or _is_filled(live)):
        return
    if isinstance(live, str):
        checked.text()(saved, where)
    elif isinstance(live, dict):
        _check_dict(live, saved, where, known=known)
    elif isinstance(live, _SEQUENCES):
        checked.kind((*_SEQUENCES, *_NUMBERS), "a list or numbers")(saved, where)
        if known and not live and not isinstance(live, set):
            _numbers(saved, where)
    elif isinstance(live, _NUMBERS):
        (one_number if type(live) in (bool, int) else _number)(saved, where)
        if type(live) is float and isinstance(saved, torch.Tensor) and not _is_real(saved):
            raise checked.Unexpected(f"{where} is {checked.shown(saved)}, which takes no fractions")


def _check_dict(live: dict[Any, Any], saved: Any, where: str, *, known: bool) -> None:
    if not live and not isinstance(saved, dict):
        _numbers(saved, where)  # the result of a running metric is a dict before it is of numbers
        return
    for key, value in checked.kind(dict, "a dict")(saved, where).items():
        place = f"{where}[{checked.shown(key)}]"
        if key in live:
            _check(live[key], value, place, known=known)
        elif known:
            _numbers(value, place)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_filled(live: Any) -> bool:
    return not isinstance(live, torch.Tensor | numpy.generic | numpy.ndarray) and bool(live)


def _numbers(value: Any, where: str) -> None:
    if isinstance(value, dict | list | tuple | set):
        for each in value.values() if isinstance(value, dict) else value:
            _numbers(each, where)
    elif value is not None:
        _number(value, where)


def _number(value: Any, where: str) -> None:
    checked.kind(_NUMBERS, "a number")(value, where)
    if type(value) is int and abs(value) > _LARGEST:
        raise checked.Unexpected(f"{where} is {checked.shown(value)}, which fits into no tensor")
    if isinstance(value, torch.Tensor) and not layouts.is_strided(value):
        raise checked.Unexpected(f"{where} is {checked.shown(value)} in another layout")


def one_number(value: Any, where: str) -> None:
    """Refuses what is not one number, which may be a tensor."""
    _number(value, where)
    if (value.numel() if isinstance(value, torch.Tensor) else numpy.size(value)) != 1:
        raise checked.Unexpected(f"{where} is {checked.shown(value)}, not one number")


def like(live: Any, saved: Any) -> Any:
    """Gives saved dicts and deques the kinds that the live ones are, at any depth."""
    if isinstance(saved, dict) and isinstance(live, dict):
        rebuilt = copy.copy(live)
        rebuilt.clear()
        rebuilt.update({key: like(live.get(key), value) for key, value in saved.items()})
        return rebuilt
    if isinstance(live, deque):
        return deque(saved, live.maxlen)
    if isinstance(saved, list) and isinstance(live, list) and len(live) == len(saved):
        return [like(*pair) for pair in zip(live, saved, strict=True)]
    return saved
