"""Existing Trials, moved with two lines: what one process computes, several ranks compute too.

``TORCHBEARER_DDP_PROJECT_KILLS=N`` kills and resumes each program N times, at other steps.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.projects.moving import (
    IMPORT,
    PROGRAMS,
    Run,
    Runner,
    difference,
    execute,
    moved,
    plain,
    runner,
    same_bits,
    saved,
    with_criterion_of,
    with_splits,
)

#: The losses that couple the samples of a batch: N ranks have N losses of their own.
COUPLED = ("balanced", "contrastive", "segmentation")
#: Programs whose batches a rank takes whole: they have a batch sampler or a loader of their own.
WHOLE_BATCHES = ("stopping", "zipped")
#: What rank zero says of the losses that are no plain mean, or of which it sees only a part.
LOSS_LINES = {
    "vae": "the loss is a sum over its samples",
    "padded": "the loss divides by the weights of its targets",
    "gan": "it cannot be told whether the loss is a mean or a sum",
    "wgan": "it cannot be told whether the loss is a mean or a sum",
}
TROUBLESHOOTING = Path(__file__).parents[2] / "docs" / "troubleshooting.rst"
#: Each rank draws its own numbers for its samples.
RANDOM = ("mixing",)
EXACT = tuple(name for name in PROGRAMS if name not in (*COUPLED, *RANDOM))
PLACES = [(2, "shm"), (2, "gloo"), (3, "shm"), (3, "gloo")]
#: How often each program is killed, and before which steps: in an epoch or at its beginning.
KILLS = int(os.environ.get("TORCHBEARER_DDP_PROJECT_KILLS", "1"))
STEPS = {"folds": 20, "stopping": 7, **dict.fromkeys((*COUPLED, "wgan", "zipped"), 5)}
on_every_place = pytest.mark.parametrize(("world_size", "transport"), PLACES)


class Ranks:
    """The ranks of this module, and what they have computed."""

    def __init__(self, folder: Any, runners: dict[int, Runner]) -> None:
        self._folder = folder
        self._runners = runners
        self.alone = functools.cache(self._alone)
        self.together = functools.cache(self._together)

    def run(self, world_size: int, body: Any, *args: Any) -> list[Run]:
        return self._runners[world_size](body, *args)

    def folder(self) -> str:
        return str(self._folder.mktemp("project"))

    def _alone(self, name: str, batch_size: int = 12) -> Run:
        """The plain program in one process."""
        variables = {"BATCH_SIZE": str(batch_size)}
        return self.run(1, execute, plain(name), self.folder(), variables)[0]

    def _together(self, name: str, world_size: int, transport: str) -> list[Run]:
        """The moved program on several ranks."""
        text = moved(name, arguments(name, transport))
        return self.run(world_size, execute, text, self.folder())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with runner(1) as one, runner(2) as two, runner(3) as three:
        yield Ranks(tmp_path_factory, {1: one, 2: two, 3: three})


def arguments(name: str, transport: str) -> str:
    """What data_parallel is given: the batch size in the program is that of all ranks."""
    meaning = "" if name in WHOLE_BATCHES else "global_batch=True, "
    return f"{meaning}transport={transport!r}"


def reference(ranks: Ranks, name: str, world_size: int) -> Run:
    """One process with the batches of all ranks."""
    return ranks.alone(name, 12 * world_size if name in WHOLE_BATCHES else 12)


def assert_equal(found: list[Run], expected: Run) -> None:
    """Every rank has the parameters and the metrics of one process."""
    for rank, run in enumerate(found):
        assert same_bits(run, found[0]), f"rank {rank} differs from rank 0"
        assert len(run.metrics) == len(expected.metrics)
        for epoch, (mine, one) in enumerate(zip(run.metrics, expected.metrics, strict=True)):
            assert mine == pytest.approx(one, rel=1e-5, abs=1e-6), f"epoch {epoch}"
        assert difference(run, expected) <= 1e-5


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_lines_are_all_that_differs(name):
    before, after = plain(name).splitlines(), moved(name).splitlines()
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert len(changes) == 2
    assert changes[0] == f"+ {IMPORT.strip()}"
    assert "*data_parallel(global_batch=True)" in changes[1]
    assert "torchbearer_ddp" not in plain(name)
    compile(moved(name), name, "exec")


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_process_is_not_changed(ranks, name):
    moved_run = ranks.run(1, execute, moved(name, ""), ranks.folder())[0]
    assert same_bits(moved_run, ranks.alone(name))


@on_every_place
@pytest.mark.parametrize("name", [name for name in EXACT if name != "folds"])
def test_ranks_compute_what_one_process_does(ranks, name, world_size, transport):
    found = ranks.together(name, world_size, transport)
    expected = reference(ranks, name, world_size)
    assert_equal(found, expected)
    for run in found:
        for key in ("tables", "evaluated", "predictions"):  # what the program looked at
            if key in expected.outcome:
                assert_close(run.outcome[key], expected.outcome[key])


def assert_close(found: Any, expected: Any) -> None:
    if torch.is_tensor(expected):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    elif isinstance(expected, dict):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    else:
        assert found == expected


@on_every_place
def test_splits_that_the_script_draws_are_equal_on_all_ranks(ranks, world_size, transport):
    found = ranks.together("folds", world_size, transport)
    splits = found[0].outcome["splits"]
    assert all(run.outcome["splits"] == splits for run in found)
    assert all(not set(training) & set(validation) for training, validation in splits)
    # The first one is what a plain process draws; each fold has one of its own, and they do not
    # depend on the number of ranks.
    assert splits[0] == ranks.alone("folds").outcome["splits"][0]
    assert splits[0] != splits[1] != splits[2]
    other = ranks.together("folds", *next(place for place in PLACES if place[0] != world_size))
    assert other[0].outcome["splits"] == splits
    expected = ranks.run(1, with_splits, splits, plain("folds"), ranks.folder())[0]
    assert_equal(found, expected)


@on_every_place
@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_loss_is_named_and_averaged(ranks, name, world_size, transport):
    found = ranks.together(name, world_size, transport)
    assert said_of_the_loss(found) == [
        f"the loss couples the samples of a batch: {world_size} ranks compute {world_size} losses, "
    ]
    expected = ranks.run(1, with_criterion_of, world_size, plain(name), ranks.folder())[0]
    assert_equal(found, expected)
    assert difference(found[0], ranks.alone(name)) > 1e-3  # which is why it has to be said


@pytest.mark.parametrize("name", [*EXACT, *RANDOM])
def test_what_is_said_of_a_loss_is_documented(ranks, name):
    sentence = LOSS_LINES.get(name)
    assert said_of_the_loss(ranks.together(name, 2, "shm")) == ([sentence] if sentence else [])
    assert (sentence or "") in TROUBLESHOOTING.read_text()


def said_of_the_loss(found: list[Run]) -> list[str]:
    """The beginnings of the lines about the loss, which rank zero alone shows."""
    assert not any(run.lines for run in found[1:])
    lines = [line for line in found[0].lines if "the loss " in line]
    ends = r"the loss couples.*losses, |.*? or a sum|.*? samples|.*? targets"
    return [head[0] if (head := re.match(ends, line)) else line for line in lines]


@on_every_place
def test_a_trial_that_mixes_is_reloaded_and_replayed(ranks, world_size, transport):
    found = ranks.together("mixing", world_size, transport)
    for run in found:
        assert same_bits(run, found[0])
        outcome = run.outcome
        assert outcome["reloaded"] == outcome["evaluated"] == found[0].outcome["evaluated"]
        assert len(outcome["replayed"]) == len(outcome["metrics"]) == 3
        for replayed, epoch in zip(outcome["replayed"], outcome["metrics"], strict=True):
            assert replayed.items() <= epoch.items()
            assert {"loss", "mixup_acc", "val_loss", "val_mixup_acc"} <= replayed.keys()
        for name, tensor in outcome["trained"].items():
            assert torch.equal(outcome["reloaded_model"][name], tensor)
    # It has learned what the plain program learns.
    assert found[0].metrics[-1]["val_mixup_acc"] > 0.9


@pytest.mark.parametrize("kill", range(KILLS))
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_and_resumed(ranks, name, kill, tmp_path):
    world_size, transport = PLACES[(PROGRAMS.index(name) + kill) % len(PLACES)]
    text = saved(name, arguments(name, transport))
    folder, checkpoints = ranks.folder(), {"PROJECT_CHECKPOINTS": str(tmp_path)}
    step = max(2, STEPS.get(name, 9) - kill % 6)
    with pytest.raises(AssertionError, match="ended without a word"):
        killed = {**checkpoints, "PROJECT_KILL_BEFORE": str(step)}
        ranks.run(world_size, execute, text, folder, killed)
    assert list(tmp_path.glob("trial-*/*.pt"))
    expected = ranks.together(name, world_size, transport)
    # Once to the end, and once more when there is nothing left to do.
    for said in ("continuing from", "nothing to train"):
        found = ranks.run(world_size, execute, text, folder, checkpoints)
        assert any(said in line for line in found[0].lines)
        for run, whole in zip(found, expected, strict=True):
            assert difference(run, whole) == 0
            assert run.metrics == whole.metrics
            for key in ("evaluated", "predictions", "splits", "replayed"):
                if key in whole.outcome:
                    assert_close(run.outcome[key], whole.outcome[key])
