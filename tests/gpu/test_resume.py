"""A run on GPUs that is interrupted continues: exactly on as many, and on more or fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import programs
from torchbearer_ddp import MixedPrecision

EPOCHS = programs.EPOCHS


def mixed() -> list[Any]:
    """fp16, so that the loss scale is resumed as well."""
    return [MixedPrecision("fp16", init_scale=2.0**18, growth_interval=2)]


def whole() -> dict[str, Any]:
    return programs.train(callbacks=mixed())


def interrupt(folder: Path, at: int) -> None:
    with pytest.raises(programs.Stopped):
        programs.train(folder, [*mixed(), programs.failing(at)], every_steps=1)


def go_on(folder: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    return programs.train(folder, mixed(), epochs, every_steps=1)


def test_in_the_middle_of_an_epoch(two, tmp_path):
    """Dropout on the GPU draws the same numbers, on each rank its own."""
    expected = two.run(whole, timeout=120)
    two.run(interrupt, (tmp_path, 6), timeout=120)
    for found, value in zip(two.run(go_on, (tmp_path,), timeout=120), expected, strict=True):
        programs.assert_same(found, value)


@pytest.mark.parametrize("more", [False, True])
def test_under_another_number_of_gpus(two, alone, tmp_path, more):
    first, second = (alone, two) if more else (two, alone)
    before = first.run(go_on, (tmp_path, 2), timeout=120)[0]
    # With no epoch left to do the run is only put back: on the other GPUs.
    for there in second.run(go_on, (tmp_path, 2), timeout=120):
        for name, value in before.items():
            if name.endswith(("weight", "bias")) or name.startswith("exp_avg"):
                assert (there[name] == value).all(), name
    for found in second.run(go_on, (tmp_path, EPOCHS), timeout=120):
        assert found["history"][:2] == before["history"]
        assert len(found["history"]) == EPOCHS
        assert found["history"][-1]["loss"] < before["history"][0]["loss"]
