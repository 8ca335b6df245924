"""Every callback of torchbearer does on two ranks what it does in one process.

The rows are in ``torchbearer_rows.py``. A callback that a new torchbearer adds fails the first test
until it has a row.
"""

import importlib
import inspect
import pkgutil
import re

import pytest
import torch
from torchbearer import Callback, callbacks

from tests.callbacks.torchbearer_rows import ROWS, play
from torchbearer_ddp import data_parallel

HELPERS = {"count_args", "get_writer", "close_writer"}  # functions that make no callback
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def exports():
    """Every callback class, and every public function beside them."""
    found = set()
    package = callbacks.__name__
    modules = [m.name for m in pkgutil.walk_packages(callbacks.__path__, f"{package}.")]
    for module in [package, *modules]:
        for name, value in vars(importlib.import_module(module)).items():
            is_class = inspect.isclass(value) and issubclass(value, Callback)
            is_function = inspect.isfunction(value) and not name.startswith("_")
            if (is_class or is_function) and value.__module__.startswith(package):
                found.add(value.__name__)
    return found


def test_every_callback_has_a_row():
    assert exports() - HELPERS == set(ROWS)


def assert_same(found, expected, place):
    """Equal but for rounding; numbers in texts too."""
    assert type(found) is type(expected), f"{place}: {found!r} is not {expected!r}"
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{place}: {list(found)} is not {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{place}[{key}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{place}: {found!r} is not {expected!r}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place}[{index}]")
    elif torch.is_tensor(expected):
        assert found.shape == expected.shape, place
        assert torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-5), place
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True), place
    elif isinstance(expected, str):
        assert NUMBER.sub("#", found) == NUMBER.sub("#", expected), place
        numbers = [[float(n) for n in NUMBER.findall(text)] for text in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=2e-4), place
    else:
        assert found == expected, place


def added(first, second):
    """The sum of two ranks' notes."""
    if isinstance(first, list):
        return [added(one, other) for one, other in zip(first, second, strict=True)]
    return first + second


def plain_names(files):
    """The names of event files have the time in them."""
    return sorted({re.sub(r"events\.out\.tfevents.*", "events", name) for name in files})


def on_ranks(name, folder):
    return play(name, folder, ours=data_parallel())


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Ranks have one thread; with more the small Trials of this process only take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_do_what_one_process_does(name, two_ranks, tmp_path):
    row = ROWS[name]
    ours = data_parallel() if row.plain is None else None
    expected, expected_files = play(name, str(tmp_path / "alone"), ours=ours)
    ranks = two_ranks.run(on_ranks, (name, str(tmp_path / "together")))
    (zero, files), (one, others) = ranks
    assert others == [], "a rank other than zero has written"
    assert plain_names(files) == plain_names(expected_files)
    if row.others == "sum":
        zero = added(zero, one)
    elif row.others == "same":
        assert_same(one, expected, f"{name} on rank 1")
    else:
        assert not one, f"{name} has acted on rank 1"
    assert_same(zero, expected, name)
    assert expected or row.compared == "that it writes nothing by itself", "nothing is compared"
