"""The tests of GPUs: skipped where there are none, and free of mistakes that a CPU can show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.requirements import GPU_TESTS_ON, NO_SKIP

ROOT = Path(__file__).parent.parent
#: One of each kind that is cheap. All of them: TORCHBEARER_DDP_GPU_TESTS_ON=cpu pytest tests/gpu
CHEAP = (
    "own_device or (gradients and (uneven or fused)) or other_exchanges or compiled_model"
    " or (another_number and True) or (by_hand and adam)"
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [*command, "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.concurrent
def test_cheap_ones_pass_on_the_cpu() -> None:
    found = run("-k", CHEAP, **{GPU_TESTS_ON: "cpu"})
    assert found.returncode == 0, found.stdout + found.stderr
    assert sum(map(int, re.findall(r"(\d+) passed", found.stdout))) >= 9, found.stdout


@pytest.mark.concurrent
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs here")
def test_without_gpus_all_are_skipped_with_the_reason() -> None:
    found = run(**{NO_SKIP: "1", GPU_TESTS_ON: "cuda"})
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"torch sees \d GPUs here, and these tests need 2", found.stdout)
    assert re.search(r"^\d+ skipped in", found.stdout.splitlines()[-1]), found.stdout
