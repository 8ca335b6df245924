"""What some tests need from the machine; where it is missing they are skipped, or fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import uuid
from typing import NoReturn

import pytest
import torch

#: Set to ``cpu`` to run the tests of GPUs on CPUs with gloo, which shows that they can run at all.
GPU_TESTS_ON = "TORCHBEARER_DDP_GPU_TESTS_ON"
#: Set to anything but 0 where a test that cannot run is a failure, as in CI.
NO_SKIP = "TORCHBEARER_DDP_NO_SKIP"
_SLURM_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")


def unavailable(reason: str) -> NoReturn:
    """Skips the test, or fails it where nothing may be skipped.

    Args:
        reason: What is missing, and how to enable the test.
    """
    value = os.environ.get(NO_SKIP, "")
    if value not in ("", "0"):
        pytest.fail(f"{reason} ({NO_SKIP} is {value}, so this is a failure)")
    pytest.skip(reason)


def needs_package(name: str) -> None:
    """Skips where a package is not installed."""
    if importlib.util.find_spec(name) is None:
        unavailable(f"no {name} here; pip install -c constraints.txt '.[test]' brings it")


def needs_slurm() -> None:
    """Skips where Slurm's programs are not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in _SLURM_PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        unavailable(
            f"no {', '.join(missing)} here; on Debian: apt-get install --no-install-recommends "
            "slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core"
        )


def needs_network_namespaces() -> None:
    """Skips where no network namespaces can be made, which stand for several hosts."""
    if shutil.which("ip") is None:
        unavailable(
            "no ip command here; on Debian: apt-get install --no-install-recommends iproute2"
        )
    if os.geteuid() != 0:
        unavailable("network namespaces need root; run the tests as root, or in a container")
    name = f"tbd-probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        unavailable(f"no network namespaces here ({made.stderr.strip()}); allow CAP_SYS_ADMIN")
    subprocess.run(["ip", "netns", "delete", name], check=True)


def needs_firewall() -> None:
    """Skips where no rules can be made that drop packets between hosts."""
    if shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
        unavailable(
            "no nft command here; on Debian: apt-get install --no-install-recommends nftables"
        )


def needs_browser() -> None:
    """Skips where the documentation cannot be built or looked at."""
    for name in ("sphinx", "furo", "sphinx_copybutton"):
        if importlib.util.find_spec(name) is None:
            unavailable(f"no {name} here; make docs brings it")
    if shutil.which("chromium") is None:
        unavailable("no chromium here; on Debian: apt-get install --no-install-recommends chromium")


def gpu_tests_on(ranks: int = 2) -> str:
    """The device of the tests of GPUs: ``cuda``, or ``cpu`` as a stand-in.

    Skips where torch sees too few GPUs, also where nothing else may be skipped: no package can
    provide them.
    """
    chosen = os.environ.get(GPU_TESTS_ON, "cuda")
    if chosen not in ("cpu", "cuda"):
        pytest.fail(f"{GPU_TESTS_ON} is {chosen!r}: it can be cpu or cuda.")
    if chosen == "cuda" and (found := torch.cuda.device_count()) < ranks:
        pytest.skip(f"torch sees {found} GPUs here, and these tests need {ranks}")
    return chosen
