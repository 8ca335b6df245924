"""Why N ranks differ from one process: what the recordings show, and what further runs confirm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchbearer_ddp.commands.proving.comparison import Comparison
from torchbearer_ddp.commands.proving.job import BATCH_NORM, LOSS, RANDOM
from torchbearer_ddp.commands.words import listing

Recording = dict[str, Any]
#: Compares the ranks with one process that imitates them in these respects.
Imitate = Callable[[tuple[str, ...]], Comparison]


@dataclass(frozen=True)
class Reason:
    """Why there is a difference.

    Attributes:
        kind: A word for programs.
        text: What was found, and what to do about it.
        is_confirmed: True if the difference is gone without it.
    """

    kind: str
    text: str
    is_confirmed: bool = False


@dataclass(frozen=True)
class Evidence:
    """What the runs have left.

    Attributes:
        ranks: The recordings of the ranks.
        alone: That of one process.
        changing: What is another one each time one process runs, or None.
        comparison: How far the ranks are from one process.
    """

    ranks: Sequence[Recording]
    alone: Recording
    changing: str | None
    comparison: Comparison

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the single process."""
        return self.alone["facts"]  # type: ignore[no-any-return]


def find_reasons(evidence: Evidence, imitate: Imitate) -> list[Reason]:
    """The reasons of a difference, the most certain ones alone."""
    for find in (_other_start, _other_data):
        if reason := find(evidence):
            return [reason]
    confirmed, possible = _imitated(evidence, imitate)
    if confirmed:
        return confirmed
    found = [_other_settings(evidence), _other_optimizer(evidence), _different_replicas(evidence)]
    return [*(each for each in found if each is not None), *possible]


# The model and the data.


def _other_start(evidence: Evidence) -> Reason | None:
    first = evidence.comparison.first
    if first is None or first.stage != "start":
        return None
    outside = evidence.ranks[0]["facts"]["steps_outside"]
    if outside:
        return Reason(
            "optimizer_outside",
            f"an optimizer outside the Trial: it took {outside} steps before the Trial began, on "
            "gradients that nothing averages. Train inside a Trial with *data_parallel(), or on "
            "all of the data on every rank.",
        )
    how = (
        "with a seed that is another one at every start"
        if evidence.changing
        else "with a seed, or from values, that depend on the number of ranks"
    )
    return Reason(
        "model_seed",
        f"a model built from another seed: the script builds it {how}. Seed it alike before the "
        "model is built: torch.manual_seed(0).",
    )


def _other_data(evidence: Evidence) -> Reason | None:
    if evidence.changing:
        if "data" in evidence.changing:
            kind, what = "unseeded_data", "data drawn from an unseeded generator"
        else:
            kind, what = "unseeded", "numbers drawn from an unseeded generator"
        return Reason(
            kind,
            f"{what}: {evidence.changing} is another one each time one process runs. Seed the "
            "generator, or draw from torch's, numpy's or python's global one.",
        )
    first = evidence.comparison.first
    steps = evidence.comparison.steps if first is None else first.step + 1
    step = next((s for s in range(steps) if _has_other_data(evidence, s)), None)
    if step is None:
        return None
    facts = evidence.facts
    if _has_same_indices(evidence, step):
        return Reason(
            "data_generator",
            f"data drawn from a generator of its own: the samples of step {step} are the same, but "
            "their values depend on what was drawn before. Draw from torch's, numpy's or python's "
            "global generator, or seed by the index of the sample.",
        )
    sampler = facts["sampler"] or evidence.ranks[0]["facts"]["sampler"]
    named = f" ({sampler})" if sampler else ""
    ranks = [set(each["steps"][step]["rows"].tolist()) for each in evidence.ranks]
    shared = len(set.intersection(*ranks))
    repeated = f" {shared} samples of this step are on every rank." if shared else ""
    return Reason(
        "sampler",
        f"a sampler of its own{named}: at step {step} the ranks together do not have the samples "
        f"of one process.{repeated} Leave the division to ShardData, or use a DistributedSampler.",
    )


def _has_other_data(evidence: Evidence, step: int) -> bool:
    alone, ranks = evidence.alone["steps"][step], [r["steps"][step] for r in evidence.ranks]
    if any(each["row_shape"] != alone["row_shape"] for each in ranks):
        return False  # padded to another length: the same samples look different
    together = torch.cat([each["rows"] for each in ranks]).sort().values
    return not torch.equal(together, alone["rows"])


def _has_same_indices(evidence: Evidence, step: int) -> bool:
    alone, ranks = evidence.alone["steps"][step], [r["steps"][step] for r in evidence.ranks]
    if alone["indices"] is None or any(each["indices"] is None for each in ranks):
        return False
    together = sorted(index for each in ranks for index in each["indices"])
    return bool(together == alone["indices"])


# What one process can imitate.


def _imitated(evidence: Evidence, imitate: Imitate) -> tuple[list[Reason], list[Reason]]:
    """Those without which the difference is gone; or those that are there, if it stays."""
    facts = evidence.facts
    possible = {
        BATCH_NORM: facts["batch_norms"] > 0,
        LOSS: facts["loss_kind"] in ("coupled", "sum", "unknown"),
        RANDOM: bool(facts["draws_in_step"]),
    }
    kinds = tuple(kind for kind, is_so in possible.items() if is_so)
    if not kinds or not imitate(kinds).is_equal:
        return [], [_imitable(kind, evidence, is_confirmed=False) for kind in kinds]
    needed = kinds
    for kind in kinds if len(kinds) > 1 else ():
        fewer = tuple(each for each in needed if each != kind)
        if fewer and imitate(fewer).is_equal:
            needed = fewer
    return [_imitable(kind, evidence, is_confirmed=True) for kind in needed], []


def _imitable(kind: str, evidence: Evidence, *, is_confirmed: bool) -> Reason:
    found = {BATCH_NORM: _batch_norm, LOSS: _loss, RANDOM: _random}[kind](evidence)
    name, what, same, remedy = found
    ends = "it is equal to the ranks" if is_confirmed else "it still differs from the ranks"
    return Reason(name, f"{what}. When one process {same}, {ends}. {remedy}", is_confirmed)


def _batch_norm(evidence: Evidence) -> tuple[str, str, str, str]:
    return (
        BATCH_NORM,
        "BatchNorm statistics per rank: each rank normalises its part of the batch",
        "normalises the same parts",
        "Use larger batches per rank, GroupNorm, or on GPUs SyncBatchNorm.",
    )


def _loss(evidence: Evidence) -> tuple[str, str, str, str]:
    kind = evidence.facts["loss_kind"]
    taken = evidence.ranks[0]["steps"][0]["kind"]
    what = {
        "coupled": "a loss that couples its samples: each rank computes the loss of its own part",
        "sum": f"a loss that is a sum over its samples, and is taken for a {taken}",
    }.get(kind, "a loss of which it cannot be told whether it is a mean or a sum")
    name = "coupled_loss" if kind == "coupled" else "loss_kind"
    remedy = "See the page on losses in the documentation."
    return name, what, "averages the losses of the same parts", remedy


def _random(evidence: Evidence) -> tuple[str, str, str, str]:
    layers = evidence.facts["dropouts"]
    shown = layers if len(layers) < 4 else [*layers[:3], f"{len(layers) - 3} more"]
    generators = [f"{each} generator" for each in evidence.facts["draws_in_step"]]
    what = (
        f"dropout's random numbers (layer{'s' * (len(layers) > 1)} {listing(shown)}): each rank "
        "draws its own"
        if layers
        else f"random numbers that each rank draws in a step from {listing(generators)}"
    )
    return (
        "dropout" if layers else "random_numbers",
        what,
        "draws the same numbers for the same samples",
        "--sample-streams compares in this way from the start.",
    )


# What is trained, and how.


def _other_settings(evidence: Evidence) -> Reason | None:
    first = evidence.comparison.first
    last = evidence.comparison.steps if first is None else first.step + 1
    for number in range(last):
        mine = evidence.alone["steps"][number]["settings"]
        theirs = evidence.ranks[0]["steps"][number]["settings"]
        for name in mine:
            if name in theirs and theirs[name] != mine[name]:
                return Reason(
                    "settings",
                    f"other settings of an optimizer: at step {number} {name} is {theirs[name]:g} "
                    f"on the ranks and {mine[name]:g} in one process. The script sets it by the "
                    "number of ranks, or by a metric.",
                )
    return None


def _other_optimizer(evidence: Evidence) -> Reason | None:
    first = evidence.comparison.first
    if first is None or first.stage not in ("gradient", "parameter"):
        return None
    facts = evidence.facts
    owner = facts["owners"].get(first.name.partition(" #")[0])
    if owner is None or owner in facts["trial_optimizers"]:
        return None
    return Reason(
        "optimizer_outside",
        f"an optimizer outside the Trial: {owner} trains {first.name}, not the Trial's own "
        "optimizer, and its loss is taken for a mean over the samples of the batch. Divide a loss "
        "that sums by the number of samples, or let the Trial's closure compute it.",
    )


def _different_replicas(evidence: Evidence) -> Reason | None:
    for number in range(evidence.comparison.steps):
        found = [each["steps"][number]["replica"] for each in evidence.ranks]
        others = [str(rank) for rank, each in enumerate(found) if each != found[0]]
        if others:
            return Reason(
                "replicas",
                f"after step {number} the parameters of rank {listing(others)} are not those of "
                "rank 0: something changes them on some ranks only. Look for a callback that "
                "writes parameters, or updates them without an optimizer of torch.",
            )
    return None
