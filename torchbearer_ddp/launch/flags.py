"""The launch flags: added to a parser, read from a command line, merged with keyword arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torchbearer_ddp.group.membership import DEFAULT_TIMEOUT
from torchbearer_ddp.launch.devices import BACKENDS
from torchbearer_ddp.launch.plan import DEFAULT_GRACE
from torchbearer_ddp.launch.planner import DEFAULT_PORT, LAUNCHERS
from torchbearer_ddp.launch.settings import PLACEMENT_FLAGS

_SETTINGS = (
    *PLACEMENT_FLAGS,
    *("launcher", "host", "port", "backend", "device", "timeout", "seed", "grace", "debug"),
)
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
    """The launch flags that were given, out of all that a parser found."""
    given = {k: v for k, v in vars(options).items() if v is not None}
    settings = {name: given[name] for name in _SETTINGS if name in given}
    names = (*_SLURM_FLAGS, "detach", "dry_run")
    return {**settings, "slurm": {name: given[name] for name in names if name in given}}


def merge(flags: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The flags, overridden by the keyword arguments of ``run_distributed`` that are not None."""
    unknown = sorted(set(overrides) - {*_SETTINGS, "slurm"})
    if unknown:
        raise ValueError(
            f"run_distributed has no argument {', '.join(unknown)}; it has "
            f"{', '.join(sorted([*_SETTINGS, 'slurm']))}. Arguments of the worker go into kwargs."
        )
    settings = {**flags, **{k: v for k, v in overrides.items() if v is not None}}
    settings["slurm"] = {**flags.get("slurm", {}), **(overrides.get("slurm") or {})}
    return settings
