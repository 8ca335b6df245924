"""What the command lines of all commands have in common: an example, and the exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

#: The command did what it should, and found nothing wrong.
GOOD = 0
#: The command found what it looks for: a fault, a difference, a damaged file.
FOUND = 1
#: The command line is wrong; nothing was started. argparse ends with the same code.
USAGE = 2


def command_parser(
    name: str, description: str, example: str, exit_codes: Mapping[int, str]
) -> argparse.ArgumentParser:
    """The parser of one command, whose help ends with an example and the exit codes."""
    command = f"python -m torchbearer_ddp {name}"
    lines = [f"  {code}  {meaning}" for code, meaning in {**exit_codes, USAGE: _USAGE}.items()]
    shown = "\n".join(f"  {command} {words}".rstrip() for words in example.splitlines() or [""])
    return argparse.ArgumentParser(
        command,
        description=description,
        epilog="\n".join(["example:", shown, "", "exit codes:", *sorted(lines)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


_USAGE = "the command line is wrong; nothing was started"
