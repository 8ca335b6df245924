"""The launch flags: added to a parser, read from a command line, merged with keyword arguments."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torchbearer_ddp.group.membership import DEFAULT_TIMEOUT
from torchbearer_ddp.launch.devices import BACKENDS
from torchbearer_ddp.launch.plan import DEFAULT_GRACE
from torchbearer_ddp.launch.planner import DEFAULT_PORT, LAUNCHERS
from torchbearer_ddp.launch.settings import PLACEMENT_FLAGS, Settings, flag


def _count_or_gpu(text: str) -> int | str:
    if text == "gpu" or re.fullmatch("-?[0-9]{1,9}", text):
        return text if text == "gpu" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor gpu")


#: The type and the meaning of each flag; those of type bool take no value.
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
    "device": (
        str,
        "cpu, cuda or cuda:N, in one process also xpu or mps (default: cuda if there is one)",
    ),
    "timeout": (float, f"seconds to wait for other ranks (default: {DEFAULT_TIMEOUT:g})"),
    "grace": (float, f"seconds to save and stop after a signal (default: {DEFAULT_GRACE:g})"),
    "seed": (int, "base seed of all random numbers (default: rank zero's own)"),
    "debug": (bool, "report where each rank is, on SIGUSR1 and when a wait fails"),
    "log_dir": (str, "a folder for rank-0.log, rank-1.log, ...: what each rank prints"),
    "tee": (bool, "show every line with the number of its rank, also without a terminal"),
    "quiet_ranks": (bool, "show rank zero only"),
    "max_restarts": (int, "how often the ranks start again after a failure (default: 0)"),
    "debug_rank": (int, "the rank whose breakpoint() has the terminal (default: 0)"),
}
_SLURM_FLAGS: dict[str, tuple[Any, str]] = {
    "nodes": (int, "as for sbatch"),
    "ntasks_per_node": (int, "as for sbatch: the ranks on each node"),
    "time": (int, "minutes until the limit"),
    "partition": (str, "as for sbatch"),
    "gpus_per_node": (int, "as for sbatch"),
    "cpus_per_task": (int, "as for sbatch"),
    "mem_gb": (float, "memory of each node in GB"),
    "job_name": (str, "as for sbatch"),
    "folder": (str, "the folder of the job's files and logs (default: slurm)"),
    "max_requeues": (int, "how often the job may start again (default: 10)"),
    "detach": (bool, "submit and exit"),
    "dry_run": (bool, "show what would be submitted, and submit nothing"),
}
_FLAGS = {**_LAUNCH_FLAGS, **_SLURM_FLAGS}
#: Where the values are that are not under a flag's own name: ``{setting: [attribute, default]}``.
_PLACES = "torchbearer_ddp_places"
#: Flags whose misspelt forms hardly mean anything else.
_DISTINCT = ("launcher", "nproc-per-node", "nnodes", "node-rank", "world-size")
#: Where a script has an option of this name, it means something else.
_OFTEN_THE_SCRIPTS = ("log_dir", "tee")
_SIMILAR = 0.85
_SHORTEST_ABBREVIATION = 5


def add_arguments(parser: argparse.ArgumentParser, prefix: str = "") -> argparse.ArgumentParser:
    """Adds the launch flags to a parser, in one group.

    An option that the parser already has, such as its own ``--device``, is used instead of a new
    one, so add the script's own options first; only ``--log-dir`` and ``--tee`` of the script stay
    its own. Abbreviated options are no longer accepted.

    Example: ::

        >>> import argparse
        >>> from torchbearer_ddp import add_arguments
        >>> parser = add_arguments(argparse.ArgumentParser())
        >>> parser.parse_args(['--nproc-per-node', '2']).nproc_per_node
        2

    Args:
        parser: The script's own parser.
        prefix: Comes before the name of each flag: with ``'ddp-'`` there is ``--ddp-device``.

    Returns:
        The same parser; pass what it parses to ``run_distributed(..., options=...)``.

    Raises:
        ValueError: If an option that the parser already has cannot be used.
    """
    # A misspelt flag would else be taken for another one that starts alike.
    parser.allow_abbrev = False
    places = {
        **_add_flags(parser, "distributed training", _LAUNCH_FLAGS, prefix),
        **_add_flags(parser, "submission with --launcher slurm", _SLURM_FLAGS, prefix),
    }
    if places:
        parser.set_defaults(**{_PLACES: places})
    return parser


def _add_flags(
    parser: argparse.ArgumentParser, title: str, flags: Mapping[str, Any], prefix: str = ""
) -> dict[str, list[Any]]:
    """Adds what the parser does not have yet; returns the places of what is not where it should."""
    group = parser.add_argument_group(title)
    places: dict[str, list[Any]] = {}
    for name, (kind, text) in flags.items():
        whole = f"{prefix}{name}".replace("-", "_")
        spellings = dict.fromkeys([flag(whole), f"--{whole}"])  # torchrun takes both, too
        known = parser._option_string_actions
        if found := next((known[s] for s in spellings if s in known), None):
            if name in _OFTEN_THE_SCRIPTS:
                places[name] = ["", None]
                continue
            _check_usable(found, name)
            # What was not given but has a default says nothing about which ranks to start.
            places[name] = [found.dest, found.default if name in PLACEMENT_FLAGS else None]
            continue
        taken = any(action.dest == whole for action in parser._actions)
        dest = f"torchbearer_ddp_{name}" if taken else whole
        if dest != name:
            places[name] = [dest, None]
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        for spelling in spellings:
            shown = {"default": None, "help": text}
            hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            is_first = spelling == flag(whole)
            group.add_argument(spelling, dest=dest, **how, **(shown if is_first else hidden))
    return places


def _check_usable(action: argparse.Action, name: str) -> None:
    """Raises if an option of the script cannot hold what the flag of this name holds."""
    takes = 0 if _FLAGS[name][0] is bool else None
    if action.nargs != takes:
        words: dict[Any, str] = {0: "no value", None: "one value"}
        found = words.get(action.nargs, "several values")
        raise ValueError(
            f"{action.option_strings[0]} of this parser takes {found}, but the launch flag of that "
            f"name takes {words[takes]}. Use add_arguments(parser, prefix='ddp-'), which adds "
            f"--ddp-{flag(name)[2:]} beside it."
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message[:1].upper()}{message[1:]}. Correct the command line.")


def read_flags(argv: Sequence[str], *, slurm: bool = False) -> dict[str, Any]:
    """Reads the launch flags from a command line that may have other flags as well.

    The flags of a submission are read only if a job is to be submitted, because a script may have
    flags of the same names.

    Raises:
        ValueError: If a value is wrong, or a flag looks like a misspelt one of these.
        SystemExit: After ``--help``: nobody has answered it before.
    """
    ours = list(argv[: argv.index("--")] if "--" in argv else argv)
    parser = _Parser(add_help=False, allow_abbrev=False)
    _add_flags(parser, "distributed training", _LAUNCH_FLAGS)
    found, others = parser.parse_known_args(ours)
    asked = {"-h", "--help"} & set(others)
    if slurm or found.launcher == "slurm" or asked:
        _add_flags(parser, "submission with --launcher slurm", _SLURM_FLAGS)
        found, others = parser.parse_known_args(ours)
    if asked:
        parser.print_help()
        raise SystemExit(0)
    if suggestions := near_misses(others):
        raise ValueError(
            f"{suggestions[0]} If it is a flag of the script itself, give run_distributed what the "
            "script's parser has parsed: options=add_arguments(parser).parse_args()."
        )
    return read_options(found)


def near_misses(words: Sequence[str]) -> list[str]:
    """A sentence for each unknown word of a command line that looks like one of our flags."""
    found = [(word.partition("=")[0], _meant(word)) for word in words if word.startswith("--")]
    return [f"{word} is unknown; did you mean --{meant}?" for word, meant in found if meant]


def _meant(word: str) -> str | None:
    """Our flag that this word is a misspelt or abbreviated form of."""
    name = word.partition("=")[0].strip("-").replace("_", "-").lower()
    names = [flag(each)[2:] for each in _LAUNCH_FLAGS]
    if name in names:
        return name
    if name in (flag(each)[2:] for each in _SLURM_FLAGS):
        return None
    for each in _DISTINCT:
        abbreviated = len(name) >= _SHORTEST_ABBREVIATION and each.startswith(name)
        if abbreviated or difflib.SequenceMatcher(None, name, each).ratio() >= _SIMILAR:
            return each
    # Of the others only exchanged letters count: --devices may well be a flag of the script.
    return next((each for each in names if sorted(each) == sorted(name)), None)


def read_options(options: argparse.Namespace) -> dict[str, Any]:
    """The launch flags that were given, out of all that a parser found."""
    places = getattr(options, _PLACES, {})
    given = {}
    for name in _FLAGS:
        dest, default = places.get(name, (name, None))
        value = getattr(options, dest, None) if dest else None
        if value is not None and value != default:
            given[name] = _converted(name, value) if name in places else value
    settings = {name: given[name] for name in _LAUNCH_FLAGS if name in given}
    return {**settings, "slurm": {name: given[name] for name in _SLURM_FLAGS if name in given}}


def _converted(name: str, value: Any) -> Any:
    """The value of an option of the script, as the flag of this name would have it."""
    kind = _FLAGS[name][0]
    try:
        return bool(value) if kind is bool else kind(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(
            f"{flag(name)} of this script is {value!r}, which the launch cannot use ({error}). Use "
            "add_arguments(parser, prefix='ddp-'), which adds flags of its own."
        ) from None


def merge(flags: Mapping[str, Any], overrides: Mapping[str, Any]) -> Settings:
    """The flags, overridden by the keyword arguments of ``run_distributed`` that are not None."""
    known = {*_LAUNCH_FLAGS, "slurm"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(
            f"run_distributed has no argument {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}. Arguments of the worker go into kwargs."
        )
    keywords = {k: v for k, v in overrides.items() if v is not None}
    settings = Settings({**flags, **keywords}, keywords)
    settings["slurm"] = {**flags.get("slurm", {}), **(overrides.get("slurm") or {})}
    return settings
