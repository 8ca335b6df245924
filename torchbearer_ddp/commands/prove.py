"""``python -m torchbearer_ddp prove``: compares a script on N ranks with one process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from torchbearer_ddp.commands.children import stopped_by_sigterm
from torchbearer_ddp.commands.parser import FOUND, GOOD, command_parser
from torchbearer_ddp.commands.proving import html, numbers, text
from torchbearer_ddp.commands.proving.job import RANDOM, Job
from torchbearer_ddp.commands.proving.proof import CouldNotRun, Proof, prove
from torchbearer_ddp.commands.proving.runs import started
from torchbearer_ddp.launch.flags import near_misses
from torchbearer_ddp.launch.script import check_script
from torchbearer_ddp.log import logger

COULD_NOT_RUN = 3
_DESCRIPTION = """\
Runs a script for a few steps on N ranks, and in one process that takes the batches of all ranks,
and compares losses, gradients, parameters and metrics step by step. What counts as equal is
measured: the process runs again from parameters that differ by one unit in the last place. The
script is not changed; it has *data_parallel() among the callbacks of its Trial. Its checkpoints and
logs are neither read nor written.
"""
_EXAMPLE = "--nproc-per-node 2 train.py --epochs 3\n--nproc-per-node 4 --html proof.html train.py"


def main(words: list[str]) -> None:
    """Proves the script that the command line names, and ends with the result as exit code."""
    options = _options(words)
    name, *arguments = options.command
    job = Job(
        name,
        options.module,
        tuple(arguments),
        options.nproc_per_node,
        options.steps,
        options.seed,
        imitates=(RANDOM,) if options.sample_streams else (),
    )
    launch: dict[str, Any] = {"nproc_per_node": job.world_size}
    launch |= {k: v for k in ("device", "timeout") if (v := getattr(options, k)) is not None}
    try:
        say = lambda line: logger.info("prove: %s", line)  # noqa: E731
        with stopped_by_sigterm(), started(launch, say) as runs:
            proof = prove(runs, job, options.roundings)
    except CouldNotRun as error:
        sys.stderr.write(f"torchbearer_ddp: {error}\n")
        raise SystemExit(COULD_NOT_RUN) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception:  # not 1, which is a verdict
        traceback.print_exc()
        raise SystemExit(COULD_NOT_RUN) from None
    if options.json != "-":
        print("\n".join(text.lines(proof)))
    try:
        if options.html:
            html.write(proof, options.html)
        if options.json:
            _write_json(proof, options.json)
    except OSError as error:  # not 1, which is a verdict
        sys.stderr.write(f"torchbearer_ddp: The report cannot be written ({error}).\n")
        raise SystemExit(COULD_NOT_RUN) from None
    raise SystemExit(GOOD if proof.is_equal else FOUND)


def _write_json(proof: Proof, path: str) -> None:
    """All numbers, for programs; what is not a finite number is null."""
    content = json.dumps(numbers.of(proof), indent=1, allow_nan=False)
    if path == "-":
        print(content)
    else:
        Path(path).write_text(content + "\n")


def _options(words: list[str]) -> argparse.Namespace:
    parser = _parser()
    options, unknown = parser.parse_known_args(words)
    if options.nproc_per_node is None and options.command:
        options, unknown = parser.parse_known_args(_flags_first(parser, words, options.command))
    if unknown:
        suggestions = "; ".join(near_misses(unknown))
        parser.error(suggestions or f"unknown flag {unknown[0]}. See --help")
    if not options.command:
        parser.error("no script is named. Write: prove --nproc-per-node N script.py [arguments]")
    if options.nproc_per_node is None or options.nproc_per_node < 2:
        parser.error("--nproc-per-node N is missing, or less than 2: there is nothing to compare")
    if options.steps < 1 or options.roundings < 1:
        parser.error("--steps and --roundings are at least 1")
    if not options.module:
        _check_script(options.command[0])
    for flag, name in (("--html", options.html), ("--json", options.json)):
        if name and name != "-" and not _is_writable(Path(name)):
            parser.error(f"{flag} {name} cannot be written. Give a file in a folder that is there")
    return options


def _check_script(path: str) -> None:
    """Ends as python does if the script cannot be compiled, but with a code that is no verdict."""
    try:
        check_script(path)
    except SystemExit as end:
        raise SystemExit(COULD_NOT_RUN if end.code == FOUND else end.code) from None


def _is_writable(path: Path) -> bool:
    """Whether a report can be written there, which is better known before the runs than after."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def _flags_first(
    parser: argparse.ArgumentParser, words: list[str], command: list[str]
) -> list[str]:
    """The words with the flags that follow the script directly before it, where none are."""
    known, (script, *rest) = parser._option_string_actions, command
    count = 0
    while count < len(rest) and (action := known.get(rest[count].partition("=")[0])) is not None:
        count += 1 if action.nargs == 0 or "=" in rest[count] else 2
    before = words[: len(words) - len(command)]
    return [*before, *rest[:count], script, *rest[count:]]


def _parser() -> argparse.ArgumentParser:
    codes = {
        GOOD: "equal: all differences are rounding",
        FOUND: "the ranks differ from one process",
        COULD_NOT_RUN: "the script could not be run, or the report not be written",
    }
    parser = command_parser("prove", _DESCRIPTION, _EXAMPLE, codes)
    parser.usage = (
        "%(prog)s --nproc-per-node N [flags] script.py [its arguments]\n"
        "       %(prog)s script.py --nproc-per-node N [flags] [its arguments]"
    )
    add = parser.add_argument
    add("--nproc-per-node", type=int, metavar="N", help="the number of ranks")
    add("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    add("--steps", type=int, default=20, help="training steps to compare (default: 20)")
    add("--seed", type=int, default=0, help="seed of both sides, if the script sets none")
    add("--roundings", type=int, default=3, help="runs that measure rounding (default: 3)")
    add(
        "--sample-streams",
        action="store_true",
        help="random layers draw numbers that belong to the sample, so that dropout compares too",
    )
    add("--device", help="cpu, cuda or cuda:N, as for run")
    add("--timeout", type=float, help="seconds to wait for other ranks")
    add("--html", metavar="FILE", help="write a report with a plot")
    add("--json", metavar="FILE", help="write all numbers; - for the standard output")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
