"""Every two options and situations at once, against arithmetic that does not use the library.

The cases are drawn from seeds, one of them unless ``TORCHBEARER_DDP_PAIR_SEEDS`` gives their
number; three of them use every transport for every pair.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import pytest
import torch

from tests.gradients.transport_cases import play_hosts
from tests.pairs import library, local_reference, reference
from tests.pairs.cases import BATCHES, LAYOUTS, Case, draw, pairs
from tests.ranks import RankPool

SEEDS = int(os.environ.get("TORCHBEARER_DDP_PAIR_SEEDS", "1"))
TRANSPORTS = tuple(LAYOUTS)


def chosen() -> list[tuple[tuple[str, ...], str, int]]:
    """Every pair once for each seed; which transport is used changes from pair to pair."""
    found = [
        (pair, TRANSPORTS[(number + seed) % len(TRANSPORTS)], seed)
        for seed in range(SEEDS)
        for number, pair in enumerate(pairs())
    ]
    return sorted(found, key=lambda each: TRANSPORTS.index(each[1]))


def name(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    """The ranks of each transport."""
    torch.set_num_threads(1)  # the reference is small, and the ranks need the cores
    made = {
        transport: RankPool(len(layout), lambda layout=layout: play_hosts(layout))
        for transport, layout in LAYOUTS.items()
    }
    try:
        yield made
    finally:
        for pool in made.values():
            pool.close()


@pytest.mark.parametrize(("pair", "transport", "seed"), chosen(), ids=name)
def test_a_pair_is_what_one_process_computes(pools, pair, transport, seed, tmp_path):
    case = draw(pair, transport, seed)
    print(
        f"{case}\nTo run it again: TORCHBEARER_DDP_PAIR_SEEDS={seed + 1} python -m pytest "
        f"'tests/pairs/test_pairs.py::{test_a_pair_is_what_one_process_computes.__name__}"
        f"[{name(pair)}-{transport}-{seed}]'"
    )
    if case.refusal:
        with pytest.raises(AssertionError, match=case.refusal):
            pools[transport].run(library.train, (case, str(tmp_path)))
        return
    results = pools[transport].run(library.train, (case, str(tmp_path)))
    journals = [journal for _, journal, _ in results]
    assert journals == [journals[0]] * case.world_size
    plan = planned(case, journals[0])
    check_journal(case, journals[0], plan)
    train = local_reference.train if case.has("local") else reference.train
    start, (expected, scales) = reference.train(case, [])[0], train(case, plan)
    for rank, (found, _, its_scales) in enumerate(results):
        assert its_scales == scales
        for key, value in expected.items():
            assert found[key].dtype == value.dtype, key
            assert found[key].isfinite().all(), f"rank {rank}: {key} is not finite"
            assert torch.equal(found[key], results[0][0][key]), f"rank {rank} differs: {key}"
            allowed = tolerance(case, start[key], value)
            off = float((found[key].double() - value.double()).abs().max())
            assert off <= allowed, f"{key} is off by {off:.3g}, more than {allowed:.3g}"


@pytest.mark.parametrize(
    "pair", [pair for pair in pairs() if {"bf16", "fp16"} & set(pair)], ids=name
)
def test_the_comparison_sees_mixed_precision(pair):
    """A run without autocast, or one that skips no step, is out of the tolerance."""
    case = draw(pair, "shm", 0)
    if case.refusal or case.hook == "fp16_compress_hook":  # which rounds more than autocast does
        return
    plan = [epochs(0, case.calls[0])]
    start, (expected, scales) = reference.train(case, [])[0], reference.train(case, plan)
    single, _ = reference.train(dataclasses.replace(case, mixed=None), plan)
    assert any(
        float((single[key].double() - value.double()).abs().max())
        > tolerance(case, start[key], value)
        for key, value in expected.items()
    )
    assert case.mixed == "bf16" or any(
        b < a for a, b in itertools.pairwise([case.loss_scale, *scales])
    )


def tolerance(case: Case, start: torch.Tensor, end: torch.Tensor) -> float:
    """How far a parameter may be off, by how far it has come and how it is rounded."""
    moved = float((end.double() - start.double()).abs().max())
    if moved == 0:
        return 0.0
    relative = 1e-5 if case.mixed is None else 1e-4
    exact = case.world_size == 2 and len(set(itertools.chain(*case.sizes))) == 1
    # LBFGS goes elsewhere with each rounded bit: the ranks must at least go there together.
    elsewhere = float("inf") if case.has("lbfgs") else 3e-2
    if case.has("half"):
        relative = 3e-3 if exact else elsewhere
    if case.is_compressed:
        lost = {"bf16": elsewhere, "int8": elsewhere, "fp16": elsewhere / 8}
        relative = max(relative, lost.get(case.compress, 1e-3))
    if case.hook == "fp16_compress_hook":
        relative = max(relative, 4e-3)
    if case.has("converted") and case.conversion == "half":
        relative = max(relative, 1e-3)  # a number at the edge of two halves
    return relative * moved + max(1e-6, torch.finfo(end.dtype).eps) * float(end.abs().max())


def epochs(first: int, last: int) -> list[tuple[int, int]]:
    return [(epoch, batch) for epoch in range(first, last) for batch in range(BATCHES)]


def planned(case: Case, journal: library.Journal) -> library.Journal:
    """The batches that each run trains if nothing is killed."""
    first = epochs(0, case.calls[0])
    runs = [first[: case.event]] if case.has("caught") else []
    if case.has("stop"):
        # The request travels with the next exchange; where in between is up to the library.
        length = len(journal[len(runs)])
        later = range(case.event + 1, BATCHES)
        assert case.event < length <= 1 + next(b for b in later if case.is_exchange(b))
        runs.append(first[:length])
    return [*runs, first, *(epochs(*each) for each in itertools.pairwise(case.calls))]


def check_journal(case: Case, journal: library.Journal, plan: library.Journal) -> None:
    """The runs trained what was planned; a killed one goes on at the last exchange."""
    if not case.has("resume"):
        assert journal == plan
        return
    everything = list(itertools.chain(*plan))
    killed = again = everything.index(case.kill)
    while not case.is_last_of_window(everything[again - 1][1]):
        again -= 1
    assert list(itertools.chain(*journal)) == everything[:killed] + everything[again:]
