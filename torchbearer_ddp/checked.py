"""Shape and type of what this process did not write itself, checked before anything uses it.

Messages of other ranks, entries in the store, checkpoints, reports, environment variables and flags
are read through a *form*: a function of a value and its place that returns the value, or raises
:class:`Unexpected` with a sentence that says what is where. Whoever reads turns that into the error
of their layer (:func:`as_error`). Nothing here takes longer, or more memory, than what was read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchbearer_ddp.errors import DistributedError

#: Returns the value, or raises Unexpected; the second argument is the value's place.
Form = Callable[[Any, str], Any]

#: The longest text that is read as JSON, unless a caller allows more.
LONGEST_JSON = 2**24
_LONGEST_SHOWN = 80
_WHOLE = re.compile(r"-?[0-9]{1,20}")
#: What a damaged value raises in code that expects a good one.
DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)


class Unexpected(DistributedError):
    """What was read does not have the form that it should have."""


@contextlib.contextmanager
def as_error(kind: Callable[[str], Exception], before: str = "", after: str = "") -> Iterator[None]:
    """Raises what is unexpected as an error of this kind, with words before and after it."""
    try:
        yield
    except Unexpected as error:
        raise kind(f"{before}{error}{after}") from error


@contextlib.contextmanager
def damage(where: str) -> Iterator[None]:
    """Raises what a damaged value causes in other code as :class:`Unexpected`."""
    try:
        yield
    except DistributedError:
        raise
    except DAMAGE as error:
        raise Unexpected(f"{where} cannot be used ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """What an error says, short enough to be part of a sentence."""
    text = next(iter(str(error).splitlines()), "")[:200]
    return text if isinstance(error, OSError | RuntimeError) and text else _named(error, text)


def _named(error: BaseException, text: str) -> str:
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: Any) -> str:
    """A value for messages: in full if that is short, else its kind and size."""
    if isinstance(value, str | bytes):
        return repr(value[:_LONGEST_SHOWN]) + "..." * (len(value) > _LONGEST_SHOWN)
    if isinstance(value, int) and value.bit_length() > _LONGEST_SHOWN:
        return "a very large number"  # Python does not even print all of them
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    name = type(value).__name__
    article = "an" if name[:1].lower() in "aeiou" else "a"
    size = f" of {len(value)}" if isinstance(value, list | tuple | dict | set) else ""
    shape = getattr(value, "shape", None)
    return f"{article} {name}{size}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _refuse(value: Any, where: str, expected: str) -> Unexpected:
    return Unexpected(f"{where} is {shown(value)}, not {expected}")


def anything(value: Any, where: str) -> Any:
    """Any value."""
    return value


def whole(least: int | None = None, most: int | None = None) -> Form:
    """A whole number within bounds."""
    low = "" if least is None else f" from {least}"
    words = f"a whole number{low}" + ("" if most is None else f" to {most}")

    def check(value: Any, where: str) -> int:
        if type(value) is not int:
            raise _refuse(value, where, words)
        if (least is not None and value < least) or (most is not None and value > most):
            raise _refuse(value, where, words)
        return value

    return check


def number(value: Any, where: str) -> Any:
    """A number."""
    if type(value) not in (int, float):
        raise _refuse(value, where, "a number")
    return value


def boolean(value: Any, where: str) -> bool:
    """True or False."""
    if type(value) is not bool:
        raise _refuse(value, where, "true or false")
    return value


def text(longest: int | None = None) -> Form:
    """A text."""

    def check(value: Any, where: str) -> str:
        if type(value) is not str:
            raise _refuse(value, where, "a text")
        if longest is not None and len(value) > longest:
            raise _refuse(value, where, f"a text of at most {longest} characters")
        return value

    return check


def kind(expected: type | tuple[type, ...], words: str) -> Form:
    """An instance of a class, or of one of several, which messages call ``words``."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, expected):
            raise _refuse(value, where, words)
        return value

    return check


def one_of(*values: Any) -> Form:
    """One of these values."""

    def check(value: Any, where: str) -> Any:
        if not any(type(value) is type(each) and value == each for each in values):
            raise _refuse(value, where, " or ".join(map(repr, values)))
        return value

    return check


def optional(form: Form) -> Form:
    """None, or what the form allows."""
    return lambda value, where: None if value is None else form(value, where)


def items(form: Form, count: int | None = None) -> Form:
    """A list or tuple of values of one form."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple):
            raise _refuse(value, where, "a list")
        if count is not None and len(value) != count:
            raise _refuse(value, where, f"a list of {count}")
        for index, each in enumerate(value):
            form(each, f"{where}[{index}]")
        return value

    return check


def table(form: Form, key: Form = text()) -> Form:  # noqa: B008 (forms are constants)
    """A dict of values of one form."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, where, "a dict")
        for name, each in value.items():
            key(name, f"a key of {where}")
            form(each, f"{where}[{shown(name)}]")
        return value

    return check


def record(needed: Mapping[str, Form], **more: Form) -> Form:
    """A dict with these entries, those of ``more`` only if they are there; others are let be."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _refuse(value, where, "a dict")
        missing = [name for name in needed if name not in value]
        if missing:
            raise Unexpected(f"{where} has no {missing[0]!r}")
        for name, form in {**needed, **more}.items():
            if name in value:
                form(value[name], f"{where}[{name!r}]")
        return value

    return check


def from_json(data: str | bytes, form: Form, where: str, longest: int = LONGEST_JSON) -> Any:
    """What a text of JSON holds, in this form."""
    if len(data) > longest:
        raise Unexpected(f"{where} has {len(data)} bytes, more than the {longest} that are read")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unexpected(f"{where} is not JSON: {shown(data)} ({first_line(error)})") from error
    return form(value, where)


def integer(given: str, where: str, least: int | None = None, most: int | None = None) -> int:
    """The whole number that a text is, in ASCII digits: ``int`` alone takes much else."""
    if not _WHOLE.fullmatch(given):
        low = "" if least is None else f" from {least}"
        raise _refuse(given, where, f"a whole number{low}")
    return int(whole(least, most)(int(given), where))


def variable(
    environment: Mapping[str, str],
    name: str,
    default: int,
    least: int | None = None,
    most: int | None = None,
) -> int:
    """The whole number in an environment variable, or the default where it is not set."""
    given = environment.get(name)
    return default if given is None else integer(given, name, least, most)


def is_number(given: str) -> bool:
    """True for ASCII digits, and not too many of them."""
    return _WHOLE.fullmatch(given) is not None and given[0] != "-"


def host(given: Any, where: str) -> str:
    """The name or address of a host."""
    try:
        if type(given) is str and given and given == "".join(given.split()):
            given.encode("idna")
            return given
    except UnicodeError:
        pass
    raise _refuse(given, where, "the name or address of a host")


def printable(given: str, where: str) -> str:
    """A text that can be written, unlike what an environment may hold."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise _refuse(given, where, "text in UTF-8") from None
    return given


def byte_count(value: Any, where: str) -> int:
    """A number of bytes that this host's memory could hold."""
    most = memory_of_host()
    if type(value) is int and 0 <= value <= most:  # as nearly always, and asked for each message
        return value
    return int(whole(0, most)(value, where))


@functools.cache
def memory_of_host() -> int:
    """The bytes of memory that this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
