"""The walk over plain data: what it accepts, what it makes plain, what it leaves to others."""

import enum
import pathlib
from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch
import torchbearer

from torchbearer_ddp.group.plain_data import PlainDataWalker


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    pass


class Naming(PlainDataWalker):
    """Puts names in the place of tensors and of what is not plain."""

    def tensor(self, tensor, where):
        return f"tensor at {where}"

    def other(self, value, where):
        return f"{type(value).__name__} at {where}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Level.HIGH, 3),
        (Text("a"), "a"),
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), True),
        (torchbearer.MODEL, "model"),
        ({torchbearer.MODEL: 1}, {"model": 1}),
        (OrderedDict(a=(1, [2])), {"a": (1, [2])}),
        (namedtuple("Pair", "x y")(1, 2), (1, 2)),
        ({None, 1, "a"}, {None, 1, "a"}),
        (b"x", b"x"),
    ],
)
def test_what_becomes_plain(value, expected):
    found = Naming().walk(value, "here")
    assert found == expected
    assert type(found) is type(expected)


def test_tensors_and_other_things_come_with_their_place():
    value = {"a": [1, torch.ones(2)], 2: {"b": pathlib.Path("x")}}
    expected = {"a": [1, "tensor at here['a'][1]"], 2: {"b": "PosixPath at here[2]['b']"}}
    assert Naming().walk(value, "here") == expected
    keys = Naming().walk({pathlib.Path("x"): 1}, "here")
    assert keys == {"PosixPath at a key of here": 1}
    # Not every numpy scalar is a Python number.
    assert Naming().walk(numpy.longdouble(1), "here") == "longdouble at here"
