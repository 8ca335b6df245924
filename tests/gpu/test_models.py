"""What only GPUs have in full: compiled models, and BatchNorm over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.cases import SMALL_BUCKETS, UNEVEN, Case, assert_alike, build, fit
from torchbearer_ddp import device

CASE = Case(options=SMALL_BUCKETS)


def train_compiled(how: str) -> dict[str, Any]:
    """Trains a compiled model; on CPUs traced, but not turned into other code, which takes long."""
    model = build(CASE)
    on_gpu = device().type == "cuda"
    if how == "wrapped":
        # With views into buckets, a second average would write into torch's own.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiled: Any = torch.compile(model, backend="inductor" if on_gpu else "eager")
    found = fit(CASE, compiled)
    prefix = "_orig_mod.module." if how == "wrapped" else "_orig_mod."
    parameters = found["parameters"].items()
    return {**found, "parameters": {n.removeprefix(prefix): p for n, p in parameters}}


def train_plain() -> dict[str, Any]:
    return fit(CASE, build(CASE))


def test_a_compiled_model(two, alone):
    (one,) = alone.run(train_plain)
    assert_alike(two.run(train_compiled, ("plain",), timeout=180), one, 1e-4)


def test_a_compiled_model_in_ddp(two, alone):
    """torch averages its gradients, and nothing averages them twice."""
    (one,) = alone.run(train_plain)
    assert_alike(two.run(train_compiled, ("wrapped",), timeout=180), one, 1e-4)


NORMALISED = Case(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
    sizes=tuple(tuple(max(2, size) for size in sizes) for sizes in UNEVEN),
    tolerance=1e-4,
)


def train_normalised() -> dict[str, Any]:
    """On two ranks BatchNorm sees the batches of both, as one process does."""
    return fit(NORMALISED, nn.SyncBatchNorm.convert_sync_batchnorm(build(NORMALISED)))


def test_batch_norm_over_all_ranks(two, alone, kind):
    if kind == "cpu":
        pytest.skip("torch has SyncBatchNorm for GPUs only")
    (one,) = alone.run(train_normalised)
    found = two.run(train_normalised)
    assert_alike(found, one, NORMALISED.tolerance)
    for name, expected in one["buffers"].items():
        assert torch.allclose(found[0]["buffers"][name], expected, rtol=1e-4, atol=1e-5), name
