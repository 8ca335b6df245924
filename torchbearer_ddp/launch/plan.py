"""The plan of a launch: which ranks to start, where, and why.

Everything here is a pure function of the settings, the environment and the number of GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchbearer_ddp.group.membership import DEFAULT_TIMEOUT, Member
from torchbearer_ddp.launch import environments
from torchbearer_ddp.launch.devices import choose_backend, choose_device
from torchbearer_ddp.launch.settings import PLACEMENT_FLAGS, Settings, checked_count

LAUNCHERS = ("auto", "inline", "spawn", "rank", "torchrun", "srun", "slurm")
DEFAULT_PORT = 29500
DEFAULT_GRACE = 30.0
_DEBUG_VARIABLE = "TORCHBEARER_DDP_DEBUG"


@dataclass(frozen=True)
class Plan:
    """What is to be started, and why.

    Attributes:
        launcher: The launcher that was chosen; never ``auto``.
        reason: What it was chosen for, in words.
        member: The rank that this process is, or the first of those that it starts.
        host: The address of the store.
        ports: The store is on the first of these that is free; 0 is any free one.
        serve: True if this process holds the store.
        prefix: Separates this run from others on the same store.
        grace: Seconds that ranks have to end by themselves after a signal.
        debug: True if ranks report where they are, see :mod:`torchbearer_ddp.group.debug`.
        slurm: The flags of a submission.
    """

    launcher: str
    reason: str
    member: Member = field(default_factory=Member)
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)
    serve: bool = True
    prefix: str = "run"
    grace: float = DEFAULT_GRACE
    debug: bool = False
    slurm: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Plan:
        """The plan that :func:`dataclasses.asdict` has made plain data of."""
        return cls(**{**fields, "member": Member(**fields["member"])})

    def member_at(self, index: int) -> Member:
        """The ``index``-th of the ranks that are started here."""
        return dataclasses.replace(
            self.member, rank=self.member.rank + index, local_rank=self.member.local_rank + index
        )

    def describe(self, threads: int) -> str:
        """The line that rank zero shows; ``threads`` are the CPU threads of each rank."""
        world_size = self.member.world_size
        if world_size == 1:
            ranks = "1 process"
        elif world_size == self.member.local_world_size:
            ranks = f"{world_size} ranks on this host"
        else:
            ranks = f"{world_size} ranks, meeting at {self.host}:{self.ports[0]}"
        device = self.member.device
        how = f"{self.member.backend} on {device}" if world_size > 1 else f"on {device}"
        share = f", {threads} thread{'s' * (threads > 1)}{' each' * (world_size > 1)}"
        # The share of each rank is only known here if the ranks on this host are.
        return f"{ranks} ({self.reason}), {how}{share * (self.member.local_rank >= 0)}"


def make_plan(settings: Mapping[str, Any], environment: Mapping[str, str], gpus: int) -> Plan:
    """Decides which ranks to start.

    Raises:
        ValueError: If the settings do not fit together.
        LaunchError: If the environment does not.
    """
    given = Settings(settings)
    launcher, reason = _choose(given, environment)
    common: dict[str, Any] = {
        "launcher": launcher,
        "reason": reason,
        "grace": given.seconds("grace", DEFAULT_GRACE),
        "debug": bool(given.get("debug", environment.get(_DEBUG_VARIABLE, "") not in ("", "0"))),
        "slurm": dict(settings.get("slurm", {})),
    }
    member: dict[str, Any] = {
        "timeout": given.seconds("timeout", DEFAULT_TIMEOUT),
        "seed": given.integer("seed"),
    }
    if launcher == "slurm":
        for name in (*PLACEMENT_FLAGS, "host", "port"):
            if name in given:
                raise ValueError(
                    f"{given.shown(name)} does not go with --launcher slurm, which places the "
                    "ranks itself. Use --nodes and --ntasks-per-node."
                )
        # Which devices there are is only known on the nodes.
        chosen = {name: given[name] for name in ("device", "backend") if name in given}
        return Plan(**{**common, "slurm": {**chosen, **common["slurm"]}}, member=Member(**member))
    place = _place(launcher, given, environment, gpus)
    store = {
        name: place.pop(name) for name in ("host", "ports", "serve", "prefix") if name in place
    }
    here = place["local_world_size"] if launcher == "spawn" else 1
    device = choose_device(given, gpus, here, place.get("local_rank", 0))
    backend = choose_backend(given, device)
    return Plan(**common, **store, member=Member(**member, **place, device=device, backend=backend))


def _place(
    launcher: str, given: Settings, environment: Mapping[str, str], gpus: int
) -> dict[str, Any]:
    """Which rank this process is or starts first, and where its store is."""
    if launcher == "inline":
        given.refuse_several("inline", "is one process. Name --launcher spawn, or leave it out.")
        return {}
    if launcher == "spawn":
        return _spawn(given, gpus)
    if launcher == "rank":
        return _one_rank(given)
    found = (
        environments.torchrun_placement(environment)
        if launcher == "torchrun"
        else environments.slurm_placement(environment)
    )
    place = {**vars(found), "host": given.get("host", found.host)}
    if "port" in given:
        place["ports"] = (given.integer("port", None, 1, 65535),)
    return place


def _choose(given: Settings, environment: Mapping[str, str]) -> tuple[str, str]:
    launcher = given.get("launcher", "auto")
    if launcher not in LAUNCHERS:
        raise ValueError(
            f"--launcher is {launcher!r}; it can be {', '.join(LAUNCHERS)}. Choose one of them."
        )
    if launcher != "auto":
        return launcher, f"from --launcher {launcher}"
    named = [name for name in PLACEMENT_FLAGS if name in given]
    if named:
        kind = "rank" if {"rank", "world_size"} & set(named) else "spawn"
        return kind, f"from {', '.join(given.shown(name) for name in named)}"
    if environments.in_torchrun(environment):
        return "torchrun", "from torchrun's environment"
    if environments.in_slurm_step(environment):
        return "srun", f"from the Slurm step of job {environment.get('SLURM_JOB_ID', '?')}"
    for name in ("host", "port"):
        if name in given:
            raise ValueError(
                f"{given.shown(name)} is given but not which ranks to start: add --world-size N "
                "and --rank i, or --nnodes N, --node-rank i and --nproc-per-node M."
            )
    return "inline", "no launch flags, no torchrun, no Slurm step"


def _spawn(given: Settings, gpus: int) -> dict[str, Any]:
    for name in ("rank", "world_size"):
        if name in given:
            raise ValueError(
                f"{given.shown(name)} is for one process per command, --launcher spawn starts "
                "several. Use --nnodes, --node-rank and --nproc-per-node instead."
            )
    count = given.get("nproc_per_node", "gpu" if gpus else 1)
    if count == "gpu":
        if not gpus:
            raise ValueError(
                "--nproc-per-node is gpu but no GPU is visible. Give a number, or check "
                "CUDA_VISIBLE_DEVICES and the driver."
            )
        count = gpus
    count = checked_count("--nproc-per-node", count, 1)
    nodes = given.integer("nnodes", 1, 1) or 1
    if nodes == 1:
        if (given.integer("node_rank", 0) or 0) != 0:
            raise ValueError(f"{given.shown('node_rank')} needs --nnodes greater than it.")
        return {
            "world_size": count,
            "local_world_size": count,
            "host": given.get("host", "127.0.0.1"),
            "ports": (given.integer("port", 0, 0, 65535),),
        }
    node = given.needed("node_rank", f"--nnodes is {nodes}", "0 on the first host, 1 on the next")
    if not 0 <= node < nodes:
        raise ValueError(
            f"--node-rank is {node} but --nnodes is {nodes}: node ranks go from 0 to {nodes - 1}. "
            "Start each host with its own --node-rank."
        )
    return {
        "world_size": nodes * count,
        "rank": node * count,
        "local_world_size": count,
        "host": given.host(f"--nnodes is {nodes}"),
        "ports": (given.integer("port", DEFAULT_PORT, 1, 65535),),
        "serve": node == 0,
    }


def _one_rank(given: Settings) -> dict[str, Any]:
    for name in ("nnodes", "node_rank", "nproc_per_node"):
        if name in given and given[name] not in (0, 1):
            raise ValueError(
                f"{given.shown(name)} does not go with --rank, which is one process per command. "
                "For several processes per host use --nnodes, --node-rank and --nproc-per-node."
            )
    size = given.needed("world_size", "--rank is given", "the number of ranks in the run")
    size = checked_count("--world-size", size, 1)
    rank = given.needed(
        "rank", f"--world-size is {size}", "0 for the first process, 1 for the next"
    )
    if not 0 <= rank < size:
        raise ValueError(
            f"--rank is {rank} but --world-size is {size}: ranks go from 0 to {size - 1}. Start "
            "each process with its own --rank."
        )
    return {
        "world_size": size,
        "rank": rank,
        "local_rank": -1 if size > 1 else 0,
        "host": given.host(f"--world-size is {size}") if size > 1 else "127.0.0.1",
        "ports": (given.integer("port", DEFAULT_PORT, 1, 65535),),
        "serve": rank == 0,
    }
