"""What some tests need from the machine, and what to do where it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

_SLURM_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")


def unavailable(reason: str) -> None:
    """Skips the test, or fails it where nothing may be skipped (as in CI).

    Args:
        reason: What is missing, and how to enable the test.
    """
    if os.environ.get("TORCHBEARER_DDP_NO_SKIP"):
        pytest.fail(f"{reason} (TORCHBEARER_DDP_NO_SKIP is set, so this is a failure)")
    pytest.skip(reason)


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
    name = f"tbd-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        unavailable(f"no network namespaces here ({made.stderr.strip()}); allow CAP_SYS_ADMIN")
    subprocess.run(["ip", "netns", "delete", name], check=True)
