"""The least that an exchange through memory can add to a step: copying and adding, and no ranks."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import measure, models, one_host, steps
from torchbearer_ddp import run_distributed, world_size
from torchbearer_ddp.gradients.transports.shared_memory import CACHE_BYTES

ALONE = "copied and added alone"


def run(names: list[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """What our exchange on two ranks adds to a step, and what its memory traffic alone adds."""
    found: list[dict[str, Any]] = run_distributed(
        _measure, (names, rounds, seconds), nproc_per_node=2, launcher="spawn"
    )[0]
    return found


def _measure(names: list[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    tables = []
    for name in names:
        case = models.CASES[name]
        ways = [steps.LOCAL, ALONE, one_host.SHM]
        results = measure.interleaved(case, ways, _prepare, rounds=rounds, seconds=seconds)
        local, alone, ours = (each["milliseconds"] for each in results)
        added = {"alone": alone - local, "ours": ours - local}
        tables.append({"model": case.title, "results": results, "added milliseconds": added})
    return tables


def _prepare(way: str, case: models.Case) -> steps.Steps:
    if way != ALONE:
        return steps.in_a_loop(way, case)
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = case.batch()
    ranks = world_size()
    total = sum(p.numel() for p in model.parameters())
    #: In the place of the other ranks' gradients are numbers of this one.
    parts = [torch.zeros(total) for _ in range(ranks)]
    parameters = list(model.parameters())
    views = [
        part.view_as(p)
        for part, p in zip(parts[0].split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    own, piece = -(-total // ranks), CACHE_BYTES // (4 * ranks)

    def copy(view: torch.Tensor, parameter: torch.Tensor) -> None:
        view.copy_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = view

    for view, parameter in zip(views, parameters, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda p, view=view: copy(view, p))

    def add_up() -> None:
        for begin in range(0, own, piece):
            end = min(own, begin + piece)
            first, *others = (part[begin:end] for part in parts)
            first.mul_(1 / ranks)
            for each in others:
                first.add_(each, alpha=1 / ranks)
            for each in others:
                each.copy_(first)

    def run(count: int) -> float:
        started = steps.now()
        for _ in range(count):
            optimizer.zero_grad()
            case.criterion(model(x), y).backward()
            with torch.no_grad():
                add_up()
            optimizer.step()
        return steps.now() - started

    return run


def sentences(tables: list[dict[str, Any]]) -> list[str]:
    """What was found."""
    return [
        f"{table['model']}: the exchange adds {table['added milliseconds']['ours']:.2f} ms to a "
        f"step, and its copies and sums alone, between no ranks, would add "
        f"{table['added milliseconds']['alone']:.2f} ms."
        for table in tables
    ]
