"""The launch flags: added to a parser, read from a command line, merged with keyword arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torchbearer_ddp.group.membership import DEFAULT_TIMEOUT
from torchbearer_ddp.launch.devices import BACKENDS
from torchbearer_ddp.launch.plan import DEFAULT_GRACE
from torchbearer_ddp.launch.planner import DEFAULT_PORT, LAUNCHERS
from torchbearer_ddp.launch.settings import flag


def _count_or_gpu(text: str) -> int | str:
    if text == "gpu" or text.lstrip("-").isdigit():
        return text if text == "gpu" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor gpu")


_LAUNCH_FLAGS: dict[str, tuple[Any, str]] = {
    "launcher": (str, f"one of {', '.join(LAUNCHERS)} (default: auto)"),
    "nproc_per_node": (_count_or_gpu, "processes on this host: a number, or gpu for one each"),
    "nnodes": (int, "number of hosts, each started with its own --node-rank"),
    "node_rank": (int, "the number of this host, from 0"),
    "world_size": (int, "number of ranks, each started with its own --rank"),
    "rank": (int, "the rank of this process, from 0"),
    "host": (str, "address of rank 0's host, the same on every host"),
    "port": (int, f"port on that host that all ranks connect to (default: {DEFAULT_PORT})"),
    "backend": (str, f"one of {', '.join(BACKENDS)} (default: by device)"),
    "device": (str, "cpu, cuda or cuda:N (default: cuda if there is one)"),
    "timeout": (float, f"seconds to wait for other ranks (default: {DEFAULT_TIMEOUT:g})"),
    "grace": (float, f"seconds to save and stop after a signal (default: {DEFAULT_GRACE:g})"),
    "seed": (int, "base seed of all random numbers (default: rank zero's own)"),
}
_SETTINGS = (*_LAUNCH_FLAGS, "debug")
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
        The same parser; pass what it parses to ``run_distributed(..., options=...)``.
    """
    _add_launch_flags(parser)
    _add_slurm_flags(parser)
    return parser


def _add_launch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distributed training")
    for name, (kind, text) in _LAUNCH_FLAGS.items():
        group.add_argument(flag(name), type=kind, default=None, help=text)
    text = "report where each rank is, on SIGUSR1 and when a wait fails"
    group.add_argument("--debug", action="store_true", default=None, help=text)


def _add_slurm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("submission with --launcher slurm")
    for name, kind in _SLURM_FLAGS.items():
        text = "minutes until the limit" if name == "time" else "as for sbatch"
        group.add_argument(flag(name), type=kind, default=None, help=text)
    group.add_argument("--detach", action="store_true", default=None, help="submit and exit")
    group.add_argument("--dry-run", action="store_true", default=None, help="show, submit nothing")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message[:1].upper()}{message[1:]}. Correct the command line.")


def read_flags(argv: Sequence[str], *, slurm: bool = False) -> dict[str, Any]:
    """Reads the launch flags from a command line that may have other flags as well.

    Abbreviated flags are ignored. The flags of a submission are read only if a job is to be
    submitted, because a script may have flags of the same names.
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
