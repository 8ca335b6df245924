"""Which ranks to start, where, and why: a pure function of settings, environment and devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from torchbearer_ddp.group.membership import DEFAULT_TIMEOUT, Member
from torchbearer_ddp.launch import environments
from torchbearer_ddp.launch.devices import choose_backend, choose_device
from torchbearer_ddp.launch.plan import DEFAULT_GRACE, MOST_RANKS, Plan
from torchbearer_ddp.launch.settings import PLACEMENT_FLAGS, Settings, checked_count
from torchbearer_ddp.launch.token import prefix_with_token

LAUNCHERS = ("auto", "inline", "spawn", "rank", "torchrun", "srun", "slurm")
DEFAULT_PORT = 29500
_DEBUG_VARIABLE = "TORCHBEARER_DDP_DEBUG"


def make_plan(
    settings: Mapping[str, Any], environment: Mapping[str, str], gpus: int, accelerator: str = ""
) -> Plan:
    """Decides which ranks to start.

    ``gpus`` and ``accelerator`` are what :func:`~.devices.visible_devices` returns.

    Raises:
        ValueError: If the settings do not fit together.
        LaunchError: If the environment does not.
    """
    given = settings if isinstance(settings, Settings) else Settings(settings)
    launcher, reason = _choose_launcher(given, environment)
    seed = given.integer("seed", 0) if "seed" in given else None
    place = _place(launcher, given, environment, gpus)
    plan = dataclasses.replace(
        place,
        prefix=prefix_with_token(place.prefix, environment),
        launcher=launcher,
        reason=reason,
        grace=given.seconds("grace", DEFAULT_GRACE),
        debug=bool(given.get("debug", environment.get(_DEBUG_VARIABLE, "") not in ("", "0"))),
        slurm=dict(given.get("slurm", {})),
        **_supervision(launcher, given),
    ).with_member(timeout=given.seconds("timeout", DEFAULT_TIMEOUT), seed=seed)
    if launcher == "slurm":
        # Which devices there are is only known on the nodes, where these are checked.
        chosen = {name: given[name] for name in ("device", "backend") if name in given}
        return dataclasses.replace(plan, slurm={**chosen, **plan.slurm})
    started = plan.member.local_world_size if launcher == "spawn" else 1
    if plan.debug_rank >= plan.member.world_size:
        raise ValueError(
            f"{given.shown('debug_rank')} but there are {plan.member.world_size} ranks: they go "
            f"from 0 to {plan.member.world_size - 1}. Name one of them."
        )
    device = choose_device(given, gpus, accelerator, started, plan)
    return plan.with_member(device=device, backend=choose_backend(given, device))


def _supervision(launcher: str, given: Settings) -> dict[str, Any]:
    """How the ranks that are started here are shown, restarted and debugged."""
    found: dict[str, Any] = {"debug_rank": given.integer("debug_rank", 0, 0)}
    if launcher != "spawn":
        return found
    restarts = given.integer("max_restarts", 0, 0)
    if restarts and given.get("nnodes", 1) != 1:
        raise ValueError(
            f"{given.shown('max_restarts')} starts the ranks of one host again, but "
            f"{given.shown('nnodes')}. Use torchrun --max-restarts, or a Slurm job, which is "
            "requeued."
        )
    folder = given.get("log_dir")
    return {
        **found,
        "max_restarts": restarts,
        "log_dir": None if folder is None else os.fspath(folder),
        "tee": bool(given.get("tee")),
        "quiet_ranks": bool(given.get("quiet_ranks")),
    }


def _choose_launcher(given: Settings, environment: Mapping[str, str]) -> tuple[str, str]:
    """The launcher, and what it was chosen for."""
    launcher = given.get("launcher", "auto")
    if launcher not in LAUNCHERS:
        raise ValueError(
            f"{given.called('launcher')} is {launcher!r}; it can be {', '.join(LAUNCHERS)}. Choose "
            "one of them."
        )
    if launcher != "auto":
        return launcher, f"from {given.shown('launcher')}"
    named = [name for name in PLACEMENT_FLAGS if name in given]
    if named:
        kind = "rank" if {"rank", "world_size"} & set(named) else "spawn"
        return kind, f"from {', '.join(given.shown(name) for name in named)}"
    if environments.in_torchrun(environment):
        return "torchrun", "from torchrun's environment"
    if environments.in_slurm_step(environment):
        return _in_slurm_step(environment)
    given.refuse(
        "is given but not which ranks to start: add --world-size N and --rank i, or --nnodes N, "
        "--node-rank i and --nproc-per-node M.",
        *("host", "port"),
    )
    return "inline", "no launch flags, no torchrun, no Slurm step"


def _in_slurm_step(environment: Mapping[str, str]) -> tuple[str, str]:
    """The launcher in a process of a Slurm step; where it is one process, how to start more."""
    job, tasks = environment.get("SLURM_JOB_ID", "?"), environment.get("SLURM_NTASKS", "?")
    if environments.in_interactive_shell(environment):
        more = "" if tasks == "1" else f"; 'srun --overlap python ...' starts all {tasks} tasks"
        return "inline", f"interactive shell of Slurm job {job}{more}"
    more = "; 'srun --ntasks N python ...' starts N ranks" if tasks == "1" else ""
    return "srun", f"from the Slurm step of job {job}{more}"


def _place(launcher: str, given: Settings, environment: Mapping[str, str], gpus: int) -> Plan:
    """Which rank this process is or starts first, and where its store is."""
    if launcher == "slurm":
        given.refuse(
            "does not go with --launcher slurm, which places the ranks itself. Use --nodes and "
            "--ntasks-per-node.",
            *(*PLACEMENT_FLAGS, "host", "port"),
        )
        return Plan()
    if launcher == "inline":
        given.refuse(
            "is given but --launcher inline is one process. Use --launcher spawn, or leave it out.",
            *PLACEMENT_FLAGS,
            unless_single=True,
        )
        return Plan()
    if launcher == "spawn":
        return _spawned_ranks(given, gpus)
    if launcher == "rank":
        return _one_rank(given)
    read = environments.read_torchrun if launcher == "torchrun" else environments.read_slurm_step
    found = read(environment)
    ports = (given.integer("port", 0, 1, 65535),) if "port" in given else found.ports
    return dataclasses.replace(found, host=given.host_or(found.host), ports=ports)


def _spawned_ranks(given: Settings, gpus: int) -> Plan:
    """Several ranks on this host, which may be one of several hosts."""
    given.refuse(
        "is for one process per command, --launcher spawn starts several. Use --nnodes, "
        "--node-rank and --nproc-per-node instead.",
        *("rank", "world_size"),
    )
    count = given.get("nproc_per_node", "gpu" if gpus else 1)
    if count == "gpu" and not gpus:
        raise ValueError(
            "--nproc-per-node is gpu but no GPU is visible. Give a number, or check "
            "CUDA_VISIBLE_DEVICES and the driver."
        )
    count = gpus if count == "gpu" else count
    count = checked_count(given.called("nproc_per_node"), count, 1, MOST_RANKS)
    nodes = given.integer("nnodes", 1, 1, MOST_RANKS // count)
    if nodes == 1:
        if given.integer("node_rank", 0) != 0:
            raise ValueError(f"{given.shown('node_rank')} needs --nnodes greater than it.")
        member = Member(world_size=count, local_world_size=count)
        port = given.integer("port", 0, 0, 65535)
        return Plan(member=member, host=given.host_or("127.0.0.1"), ports=(port,))
    node = given.needed("node_rank", f"--nnodes is {nodes}", "0 on the first host, 1 on the next")
    if not 0 <= node < nodes:
        raise ValueError(
            f"--node-rank is {node} but --nnodes is {nodes}: node ranks go from 0 to {nodes - 1}. "
            "Start each host with its own --node-rank."
        )
    return Plan(
        member=Member(rank=node * count, world_size=nodes * count, local_world_size=count),
        host=given.host(f"--nnodes is {nodes}"),
        ports=(given.integer("port", DEFAULT_PORT, 1, 65535),),
        serve=node == 0,
    )


def _one_rank(given: Settings) -> Plan:
    """This process as one rank; the roll call finds out which ranks share its host."""
    given.refuse(
        "does not go with --rank, which is one process per command. For several processes per "
        "host use --nnodes, --node-rank and --nproc-per-node.",
        *("nnodes", "node_rank", "nproc_per_node"),
        unless_single=True,
    )
    size = given.needed("world_size", "--rank is given", "the number of ranks in the run")
    size = checked_count("--world-size", size, 1, MOST_RANKS)
    found = f"--world-size is {size}"
    rank = given.needed("rank", found, "0 for the first process, 1 for the next")
    if not 0 <= rank < size:
        raise ValueError(
            f"--rank is {rank} but --world-size is {size}: ranks go from 0 to {size - 1}. Start "
            "each process with its own --rank."
        )
    return Plan(
        member=Member(rank=rank, world_size=size, local_rank=-1 if size > 1 else 0),
        host=given.host(found) if size > 1 else "127.0.0.1",
        ports=(given.integer("port", DEFAULT_PORT, 1, 65535),),
        serve=rank == 0,
    )
