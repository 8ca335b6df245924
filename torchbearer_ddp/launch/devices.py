"""Which device and which backend, as pure functions: planned for GPUs also where there are none."""

from __future__ import annotations

from torchbearer_ddp.launch.settings import Settings

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")


def choose_device(given: Settings, gpus: int, here: int, local_rank: int) -> str:
    """The device of a plan: ``cpu``, ``cuda`` (each rank its own GPU) or one certain GPU.

    ``here`` is the number of ranks that this process starts, ``local_rank`` its own on this host.
    """
    device = str(given.get("device", "cuda" if gpus else "cpu"))
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"--device is {device!r}; it can be cpu, cuda or cuda:N.")
    if kind == "cpu":
        return "cpu"
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
    backend = str(given.get("backend", "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"))
    if backend not in BACKENDS:
        raise ValueError(f"--backend is {backend!r}; it can be {', '.join(BACKENDS)}.")
    if "nccl" in backend and device == "cpu":
        raise ValueError(
            f"--backend is {backend} but the device is cpu: NCCL needs GPUs. Use --backend gloo."
        )
    return backend
