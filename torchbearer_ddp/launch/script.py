"""``python -m torchbearer_ddp run``: starts an unchanged script on several ranks.

Each rank runs the whole script as its ``__main__``, as ``python script.py`` does. The group is
joined before the script starts, and left when it ends.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from torchbearer_ddp.errors import WorkerError
from torchbearer_ddp.group import failures
from torchbearer_ddp.launch import rank as rank_process
from torchbearer_ddp.launch.ending import exit_with_message
from torchbearer_ddp.launch.flags import add_arguments, near_misses
from torchbearer_ddp.launch.main_module import MainModule
from torchbearer_ddp.launch.run import run_distributed

COMMAND = "python -m torchbearer_ddp run"
_DESCRIPTION = """\
Runs a script on several ranks, as python would run it on each: the same file, module level,
arguments and exit code. Flags before the script are read here, those after it belong to it.
"""
_EPILOG = """\
example:
  python -m torchbearer_ddp run --nproc-per-node 2 script.py --epochs 3

exit codes:
  0  the script ended well on every rank
  2  the command line is wrong; nothing was started
otherwise that of the script on the rank that failed first (1 after an exception, 128 + N if it was
ended by signal N)
"""


def main(words: list[str]) -> None:
    """Starts the script that the command line names, and ends with its exit code."""
    parser = _parser()
    options, unknown = parser.parse_known_args(words)
    if unknown:
        suggestions = "; ".join(near_misses(unknown))
        parser.error(suggestions or f"unknown flag {unknown[0]}. See --help")
    if not options.command:
        parser.error(f"no script is named. Write: {COMMAND} [flags] script.py [its arguments]")
    name, *arguments = options.command
    if not options.module:
        check_script(name)
    # Like python: the script's folder, or with -m the folder of this command.
    sys.path[0] = str(Path.cwd() if options.module else Path(name).resolve().parent)
    sys.argv[:] = [name, *arguments]
    options.job_name = options.job_name or Path(name).stem
    _show_only_the_scripts_frames()
    try:
        run_distributed(run_script, (name, options.module), options=options)
    except WorkerError as error:
        code = error.exitcode or 1
        exit_with_message(error, code if code > 0 else 128 - code)
        raise
    if rank_process.script_started_by() is None:
        failures.exit_normally(0)  # the script has run in other processes: nothing of it is here


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        COMMAND,
        f"{COMMAND} [flags] script.py [its arguments]",
        _DESCRIPTION,
        _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "the script is the name of a module, as with python -m"
    parser.add_argument("-m", "--module", action="store_true", help=text)
    add_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def check_script(path: str) -> None:
    """Ends as python does if the script is missing or has no valid syntax; nothing was started."""
    if not Path(path).exists():
        print(f"python: can't open file {path!r}: {os.strerror(2)}", file=sys.stderr)
        raise SystemExit(2)
    if Path(path).is_file():
        try:
            compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        except SyntaxError as error:
            sys.excepthook(type(error), error, None)
            raise SystemExit(1) from None


def run_script(name: str, is_module: bool) -> None:
    """Runs a script, or a module by its name, as ``__main__`` of this process."""
    rank_process.script_is_a_rank(COMMAND)
    if is_module:
        MainModule().install()
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what python -m calls
    elif Path(name).is_dir():
        runpy.run_path(name, run_name="__main__")
    else:
        path = str(Path(name).absolute())
        main = MainModule(path).install()
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, vars(main))


def _show_only_the_scripts_frames() -> None:
    """Leaves this package's frames out of a traceback, which starts with the script as in python.

    Of one process; several ranks report their errors to the launcher.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        own = failures.users_frames(trace)
        return previous(kind, error.with_traceback(own), own)

    sys.excepthook = hook
