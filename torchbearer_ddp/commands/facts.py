"""What a host and this process on it are like, as plain data; nothing here talks to other ranks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import network
from torchbearer_ddp.group.bounded import in_time
from torchbearer_ddp.group.join import usable_cores
from torchbearer_ddp.group.launcher import TOKEN_VARIABLE
from torchbearer_ddp.version import __version__

Facts = dict[str, Any]

_PACKAGES = ("torchbearer", "torch", "numpy", "submitit", "tensorboardX", "cloudpickle", "tqdm")
#: Variables that decide how ranks are started and connected, by the start of their names.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GLOO_", "MASTER_", "MKL_NUM_THREADS", "NCCL_", "OMP_", "RANK"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHBEARER_DDP_", "TORCH_NCCL_", "TORCHELASTIC_"),
    *("WORLD_SIZE", "PYTHONUNBUFFERED"),
)
#: Of Slurm's many variables those that say which task this is; others may hold secrets.
_SLURM_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_CPUS_PER_TASK"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT"),
)
SHARED_MEMORY = Path("/dev/shm")
#: How long a driver or a name server may take to answer.
_ANSWER_SECONDS = 10.0
_NO_ANSWER = "no answer within 10 s"


def collect() -> Facts:
    """Everything, by subject."""
    return {
        "versions": versions(),
        "processor": processor(),
        "memory": memory(),
        "gpus": gpus(),
        "network": {**names(), "interfaces": interfaces(), "gloo": gloo_interface(None)},
        "slurm": slurm(),
        "environment": variables(),
    }


def versions() -> dict[str, str]:
    """The versions of this package, of what it uses, and of the system."""
    found = {"torchbearer_ddp": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = str(torch.__version__)  # with what it was built for, as in 2.10.0+cpu
    libc = " ".join(platform.libc_ver())
    found |= {"python": sys.version.split()[0], "system": f"{platform.platform()} {libc}".strip()}
    if cuda := torch.version.cuda:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found |= {"cuda": cuda, "nccl": ".".join(map(str, nccl))}
    return found


def processor() -> Facts:
    """The cores and who uses them."""
    quota = _cores_of_container()
    return {
        "model": _processor_model(),
        "cores of the host": os.cpu_count() or 1,
        "usable cores": usable_cores(),
        **({"cores of the container": quota} if quota else {}),
        "torch threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def _cores_of_container() -> float | None:
    """The cores that a container's limit on CPU time is worth, or None without a limit."""
    limit, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return round(int(limit) / int(period), 2) if limit.isdigit() and period.isdigit() else None


def _processor_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> dict[str, int]:
    """Memory, shared memory (in bytes) and the limit of open files."""
    found = {}
    with contextlib.suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found = {"total": known["MemTotal"], "available": known["MemAvailable"]}
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(SHARED_MEMORY)
        found |= {"shared memory": usage.total, "free shared memory": usage.free}
    found["open files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return found


def gpus() -> Facts:
    """The GPUs that torch sees; a driver that hangs does not hang this."""

    def ask() -> list[dict[str, Any]]:
        every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [{"name": each.name, "memory": each.total_memory} for each in every]

    try:
        return {"visible": in_time(ask, time.monotonic() + _ANSWER_SECONDS, _NO_ANSWER)}
    except LaunchError as error:
        return {"visible": [], "problem": str(error.__cause__ or error)}


def names() -> Facts:
    """This host's name, what it resolves to, and how long that took."""
    host, started = socket.gethostname(), time.monotonic()
    found = resolve(host)
    return {"host": host, **found, "seconds": round(time.monotonic() - started, 3)}


def resolve(host: str) -> Facts:
    """The addresses of a name, or the problem with it, in bounded time."""

    def ask() -> list[str]:
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})

    try:
        return {"addresses": in_time(ask, time.monotonic() + _ANSWER_SECONDS, _NO_ANSWER)}
    except LaunchError as error:
        cause = error.__cause__
        return {"addresses": [], "problem": getattr(cause, "strerror", None) or str(error)}


def interfaces() -> list[Facts]:
    """The network interfaces with their addresses and speeds (Mbit/s, where the driver knows)."""
    found = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        speed = _read(folder / "speed")
        known: Facts = {
            "name": name,
            "address": network.address_of(name),
            "state": _read(folder / "operstate") or "unknown",
        }
        if speed.isdigit() and int(speed) > 0:
            known["mbit"] = int(speed)
        found.append(known)
    return found


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def gloo_interface(host: str | None) -> Facts:
    """The interface that gloo uses in a run whose rank zero is at this host, and why."""
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        # gloo takes a list, one connection over each; the first is the one that it binds to.
        name, why = chosen.split(",")[0], "GLOO_SOCKET_IFNAME"
    elif host is not None:
        name = network.interface_of(network.loopback(host) or network.route_to(host)) or ""
        why = f"the route to {host}"
    else:
        return {"interface": "", "why": "chosen by the route to rank zero's host"}
    return {"interface": name, "address": network.address_of(name), "why": why}


def slurm() -> Facts:
    """The Slurm job and task, and whether its commands are here."""
    found: Facts = {name: os.environ[name] for name in _SLURM_VARIABLES if name in os.environ}
    found["commands"] = [name for name in ("srun", "sbatch", "sacct") if shutil.which(name)]
    return found


def variables() -> dict[str, str]:
    """The environment variables that decide how ranks are started and connected."""
    names = [name for name in sorted(os.environ) if name.startswith(_VARIABLES)]
    return {name: "(set)" if name == TOKEN_VARIABLE else os.environ[name] for name in names}
