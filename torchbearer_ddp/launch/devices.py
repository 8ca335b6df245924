"""Which device and which backend, as pure functions: planned for GPUs also where there are none."""

from __future__ import annotations

import re

import torch

from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.settings import Settings

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
#: Accelerators besides GPUs of CUDA and ROCm, which torch calls cuda.
OTHERS = ("xpu", "mps")
#: The number of a device, or nothing; ``isdigit`` alone takes digits that ``int`` does not.
_INDEX = re.compile("[0-9]{0,4}")


def visible_devices() -> tuple[int, str]:
    """The number of GPUs (CUDA or ROCm), and the kind of another accelerator, if there is one."""
    gpus = torch.cuda.device_count()
    found = None if gpus else torch.accelerator.current_accelerator(check_available=True)
    return gpus, found.type if found else ""


def choose_device(given: Settings, gpus: int, accelerator: str, started: int, plan: Plan) -> str:
    """The device of a plan: ``cpu``, ``cuda`` (each rank its own GPU) or one certain device.

    ``started`` is the number of ranks that this process starts.
    """
    world_size = plan.member.world_size
    # Ranks on several of them would need a backend that moves their data.
    usual = accelerator if accelerator and world_size == 1 else "cpu"
    device = str(given.get("device", "cuda" if gpus else usual))
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda", *OTHERS) or not _INDEX.fullmatch(index):
        raise ValueError(
            f"--device is {device!r}; it can be cpu, cuda or cuda:N, and for one process "
            f"{' or '.join(OTHERS)}."
        )
    if kind == "cpu":
        return "cpu"
    if kind in OTHERS:
        return _other(device, kind, accelerator, world_size)
    return _gpu(device, index, gpus, started, plan.member.local_rank)


def _other(device: str, kind: str, accelerator: str, world_size: int) -> str:
    if world_size > 1:
        raise ValueError(
            f"--device is {device} but there are {world_size} ranks: they can exchange data "
            f"between CPUs (gloo) and between GPUs of CUDA or ROCm (NCCL), but not between {kind} "
            "devices. Use --device cpu, or one process."
        )
    if kind != accelerator:
        raise ValueError(
            f"--device is {device} but torch sees no {kind} device. Use --device cpu, or install "
            "the build of torch for it."
        )
    return device


def _gpu(device: str, index: str, gpus: int, here: int, local_rank: int) -> str:
    if not gpus:
        raise ValueError(
            f"--device is {device} but no GPU is visible. Use --device cpu, or check "
            "CUDA_VISIBLE_DEVICES and the driver."
        )
    if index and here > 1:
        raise ValueError(
            f"--device is {device} but {here} ranks start on this host: each needs its own GPU. "
            "Use --device cuda."
        )
    needed = max(int(index or 0), here - 1, local_rank if gpus > 1 else 0) + 1
    if needed > gpus:
        raise ValueError(
            f"{needed} GPUs are needed on this host but {gpus} are visible: each rank needs its "
            "own. Start fewer ranks (--nproc-per-node gpu), or use --device cpu."
        )
    return device


def choose_backend(given: Settings, device: str) -> str:
    """The backend of a plan: on GPUs one for them and one for the CPU."""
    on_gpus = device.startswith("cuda")
    backend = str(given.get("backend", "cpu:gloo,cuda:nccl" if on_gpus else "gloo"))
    if backend not in BACKENDS:
        raise ValueError(f"--backend is {backend!r}; it can be {', '.join(BACKENDS)}.")
    if "nccl" in backend and not on_gpus:
        raise ValueError(
            f"--backend is {backend} but the device is {device}: NCCL needs GPUs of CUDA or ROCm. "
            "Use --backend gloo."
        )
    return backend
