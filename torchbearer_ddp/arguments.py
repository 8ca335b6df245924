"""Flags, arguments and environments, and what they mean: which ranks to start, where, and how.

Everything here is a pure function of the flags, the environment and the number of GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torchbearer_ddp import environments
from torchbearer_ddp.devices import BACKENDS, choose_backend, choose_device
from torchbearer_ddp.rendezvous import DEFAULT_TIMEOUT, Member
from torchbearer_ddp.settings import PLACES, Settings

LAUNCHERS = ("auto", "inline", "spawn", "rank", "torchrun", "srun", "slurm")
DEFAULT_PORT = 29500
DEFAULT_GRACE = 30.0
_SETTINGS = (
    *PLACES,
    *("launcher", "host", "port", "backend", "device", "timeout", "seed", "grace", "debug"),
)
_DEBUG_VARIABLE = "TORCHBEARER_DDP_DEBUG"
_SLURM_FLAGS: dict[str, Any] = {
    "nodes": int,
    "ntasks_per_node": int,
    "time": int,
    "partition": str,
    "gpus_per_node": int,
    "cpus_per_task": int,
    "mem_gb": float,
    "job_name": str,
    "folder": str,
    "max_requeues": int,
}


@dataclass(frozen=True)
class Plan:
    """What is to be started, and why.

    Args:
        launcher: The launcher that was chosen; never ``auto``.
        reason: What it was chosen for, in words.
        world_size: The number of ranks in the run.
        first_rank: The rank of this process, or the first of those it starts.
        local_rank: The same on this host; -1 if only the roll call can tell.
        local_world_size: The number of ranks on this host.
        device: ``cpu``, ``cuda`` (each rank its own) or one certain GPU.
        gpus: The number of GPUs that this process sees.
        backend: torch.distributed's name of the backend.
        host: The address of the store.
        port: The port of the store; 0 for any free one.
        spare_ports: Where to meet if something else holds the port.
        serve: True if this process is to hold the store.
        prefix: Sets this run apart from others on the same store.
        timeout: Seconds that any wait for other ranks may take.
        seed: The base seed, or None for rank zero's own.
        grace: Seconds that ranks have to end by themselves after a signal.
        debug: True if ranks are to tell where they are, see :mod:`torchbearer_ddp.debug`.
        slurm: The flags of a submission.
    """

    launcher: str
    reason: str
    world_size: int = 1
    first_rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    device: str = "cpu"
    gpus: int = 0
    backend: str = "gloo"
    host: str = "127.0.0.1"
    port: int = 0
    spare_ports: tuple[int, ...] = ()
    serve: bool = True
    prefix: str = "run"
    timeout: float = DEFAULT_TIMEOUT
    seed: int | None = None
    grace: float = DEFAULT_GRACE
    debug: bool = False
    slurm: dict[str, Any] = field(default_factory=dict)

    def member(self, index: int = 0) -> Member:
        """Who the ``index``-th rank that is started here is."""
        local_rank = self.local_rank + index
        return Member(
            rank=self.first_rank + index,
            world_size=self.world_size,
            local_rank=local_rank,
            local_world_size=self.local_world_size,
            device=self.device_of(local_rank),
            backend=self.backend,
            timeout=self.timeout,
            seed=self.seed,
        )

    def device_of(self, local_rank: int) -> str:
        """The device of a local rank: its own GPU, or the only one that it was given to see."""
        if self.device != "cuda" or local_rank < 0:
            return self.device
        return f"cuda:{0 if self.gpus == 1 else local_rank}"

    def describe(self, threads: int) -> str:
        """The line that rank zero prints.

        Args:
            threads: The CPU threads of each rank.
        """
        if self.world_size == 1:
            ranks = "1 process"
        elif self.world_size == self.local_world_size:
            ranks = f"{self.world_size} ranks on this host"
        else:
            ranks = f"{self.world_size} ranks, meeting at {self.host}:{self.port}"
        how = f"{self.backend} on {self.device}" if self.world_size > 1 else f"on {self.device}"
        share = f", {threads} thread{'s' * (threads > 1)}{' each' * (self.world_size > 1)}"
        # Where ranks share a host that only the roll call knows of, so is their share of it.
        return f"torchbearer_ddp: {ranks} ({self.reason}), {how}{share * (self.local_rank >= 0)}"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the launch flags to a parser, in one group.

    Example: ::

        >>> import argparse
        >>> from torchbearer_ddp import add_arguments
        >>> parser = add_arguments(argparse.ArgumentParser())
        >>> parser.parse_args(['--nproc-per-node', '2']).nproc_per_node
        2

    Args:
        parser: The script's own parser.

    Returns:
        The same parser; hand what it parses to ``run_distributed(..., options=...)``.
    """
    _add_launch_flags(parser)
    _add_slurm_flags(parser)
    return parser


def _add_launch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distributed training")

    def add(name: str, kind: Any, text: str) -> None:
        group.add_argument(name, type=kind, default=None, help=text)

    add("--launcher", str, f"one of {', '.join(LAUNCHERS)} (default: auto)")
    add("--nproc-per-node", _count_or_gpu, "processes on this host: a number, or gpu for one each")
    add("--nnodes", int, "number of hosts, each started with its own --node-rank")
    add("--node-rank", int, "which of the hosts this is, from 0")
    add("--world-size", int, "number of ranks, each started with its own --rank")
    add("--rank", int, "which of the ranks this process is, from 0")
    add("--host", str, "address of rank 0's host, the same on every host")
    add("--port", int, f"port of the rendezvous on that host (default: {DEFAULT_PORT})")
    add("--backend", str, f"one of {', '.join(BACKENDS)} (default: by device)")
    add("--device", str, "cpu, cuda or cuda:N (default: cuda where there is one)")
    add("--timeout", float, f"seconds to wait for other ranks (default: {DEFAULT_TIMEOUT:g})")
    add("--grace", float, f"seconds to save and stop after a signal (default: {DEFAULT_GRACE:g})")
    add("--seed", int, "base seed of all random numbers (default: rank zero's own)")
    text = "say where each rank is, on SIGUSR1 and when a wait fails"
    group.add_argument("--debug", action="store_true", default=None, help=text)


def _add_slurm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("submission with --launcher slurm")
    for name, kind in _SLURM_FLAGS.items():
        unit = {"time": "minutes until the limit"}.get(name, "as for sbatch")
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=unit)
    group.add_argument("--detach", action="store_true", default=None, help="submit and exit")
    group.add_argument("--dry-run", action="store_true", default=None, help="show, submit nothing")


def _count_or_gpu(text: str) -> int | str:
    if text == "gpu" or text.lstrip("-").isdigit():
        return text if text == "gpu" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor gpu")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message[:1].upper()}{message[1:]}. Correct the command line.")


def read_flags(argv: Sequence[str], *, slurm: bool = False) -> dict[str, Any]:
    """Reads the known flags from a command line and leaves the others to the script.

    Flags count only when they are written out whole. Those of a submission are common words, so
    they are left to the script as well unless a submission is asked for.

    Args:
        argv: The command line, without the program.
        slurm: True if a submission is asked for elsewhere.
    """
    ours = list(argv[: argv.index("--")] if "--" in argv else argv)
    parser = _Parser(add_help=False, allow_abbrev=False)
    _add_launch_flags(parser)
    found, _ = parser.parse_known_args(ours)
    if slurm or found.launcher == "slurm":
        _add_slurm_flags(parser)
        found, _ = parser.parse_known_args(ours)
    return read_options(found)


def read_options(options: argparse.Namespace) -> dict[str, Any]:
    """The launch flags that were given, out of all that a parser found.

    Args:
        options: What a parser with :func:`add_arguments` parsed.
    """
    given = {k: v for k, v in vars(options).items() if v is not None}
    settings = {name: given[name] for name in _SETTINGS if name in given}
    names = (*_SLURM_FLAGS, "detach", "dry_run")
    return {**settings, "slurm": {name: given[name] for name in names if name in given}}


def merge(flags: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with the keyword arguments of ``run_distributed`` over them.

    Args:
        flags: What :func:`read_flags` or :func:`read_options` gave.
        overrides: Keyword arguments; None leaves a flag as it is.
    """
    unknown = sorted(set(overrides) - {*_SETTINGS, "slurm"})
    if unknown:
        raise ValueError(
            f"run_distributed has no argument {', '.join(unknown)}; it has "
            f"{', '.join(sorted([*_SETTINGS, 'slurm']))}. Arguments of the worker go into kwargs."
        )
    settings = {**flags, **{k: v for k, v in overrides.items() if v is not None}}
    settings["slurm"] = {**flags.get("slurm", {}), **(overrides.get("slurm") or {})}
    return settings


def make_plan(settings: Mapping[str, Any], environment: Mapping[str, str], gpus: int) -> Plan:
    """Decides which ranks to start.

    Args:
        settings: What :func:`merge` gave; what is not in it is not set.
        environment: The environment, such as ``os.environ``.
        gpus: The number of GPUs that this process sees.

    Raises:
        ValueError: If the settings do not fit together.
        LaunchError: If the environment does not.
    """
    given = Settings(settings)
    launcher, reason = _choose(given, environment)
    common: dict[str, Any] = {
        "launcher": launcher,
        "reason": reason,
        "gpus": gpus,
        "timeout": given.seconds("timeout", DEFAULT_TIMEOUT),
        "grace": given.seconds("grace", DEFAULT_GRACE),
        "seed": given.integer("seed"),
        "debug": bool(given.get("debug", environment.get(_DEBUG_VARIABLE, "") not in ("", "0"))),
        "slurm": dict(settings.get("slurm", {})),
    }
    if launcher == "slurm":
        for name in (*PLACES, "host", "port"):
            if name in given:
                raise ValueError(
                    f"{given.shown(name)} does not go with --launcher slurm, which places the "
                    "ranks itself. Use --nodes and --ntasks-per-node."
                )
        # Which devices there are is only known on the nodes.
        chosen = {name: given[name] for name in ("device", "backend") if name in given}
        return Plan(**{**common, "slurm": {**chosen, **common["slurm"]}})
    if launcher == "inline":
        given.refuse_several("inline", "is one process. Name --launcher spawn, or leave it out.")
        place: dict[str, Any] = {}
    elif launcher == "spawn":
        place = _spawn(given, gpus)
    elif launcher == "rank":
        place = _one_rank(given)
    else:
        found = (
            environments.torchrun_placement(environment)
            if launcher == "torchrun"
            else environments.slurm_placement(environment)
        )
        place = {k: v for k, v in vars(found).items() if k != "rank"}
        place["first_rank"] = found.rank
        place["host"] = given.get("host", found.host)
        place["port"] = given.integer("port", found.port, 1, 65535)
        if "port" in given:
            place["spare_ports"] = ()
    here = place["local_world_size"] if launcher == "spawn" else 1
    device = choose_device(given, gpus, here, place.get("local_rank", 0))
    return Plan(**common, **place, device=device, backend=choose_backend(given, device))


def _choose(given: Settings, environment: Mapping[str, str]) -> tuple[str, str]:
    launcher = given.get("launcher", "auto")
    if launcher not in LAUNCHERS:
        raise ValueError(
            f"--launcher is {launcher!r}; it can be {', '.join(LAUNCHERS)}. Choose one of them."
        )
    if launcher != "auto":
        return launcher, f"from --launcher {launcher}"
    named = [name for name in PLACES if name in given]
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
    count = given.checked("nproc_per_node", count, 1)
    nodes = given.integer("nnodes", 1, 1) or 1
    if nodes == 1:
        if (given.integer("node_rank", 0) or 0) != 0:
            raise ValueError(f"{given.shown('node_rank')} needs --nnodes greater than it.")
        place = {"host": given.get("host", "127.0.0.1"), "port": given.integer("port", 0, 0, 65535)}
        return {"world_size": count, "local_world_size": count, **place}
    node = given.needed("node_rank", f"--nnodes is {nodes}", "0 on the first host, 1 on the next")
    if not 0 <= node < nodes:
        raise ValueError(
            f"--node-rank is {node} but --nnodes is {nodes}: node ranks go from 0 to {nodes - 1}. "
            "Start each host with its own --node-rank."
        )
    return {
        "world_size": nodes * count,
        "first_rank": node * count,
        "local_world_size": count,
        "host": given.host(f"--nnodes is {nodes}"),
        "port": given.integer("port", DEFAULT_PORT, 1, 65535),
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
    size = given.checked("world_size", size, 1)
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
        "first_rank": rank,
        "local_rank": -1 if size > 1 else 0,
        "host": given.host(f"--world-size is {size}") if size > 1 else "127.0.0.1",
        "port": given.integer("port", DEFAULT_PORT, 1, 65535),
        "serve": rank == 0,
    }
