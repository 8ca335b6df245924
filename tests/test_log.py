"""The package's messages: on stderr by default, and only where a program has sent them."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from torchbearer_ddp import log

LOGGER = "logging.getLogger('torchbearer_ddp')"
#: What a program does about logging, and the line that it then shows for one message.
PROGRAMS = {
    "nothing": ("", "torchbearer_ddp: hello"),
    "basicConfig": ("logging.basicConfig(format='mine %(message)s')", "mine hello"),
    "basicConfig with the rank": (
        "logging.basicConfig(format='%(rank)d %(name)s %(levelname)s %(message)s')",
        "0 torchbearer_ddp INFO hello",
    ),
    "dictConfig of the root": (
        "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False, "
        "'formatters': {'f': {'format': 'mine %(message)s'}}, "
        "'handlers': {'h': {'class': 'logging.StreamHandler', 'formatter': 'f'}}, "
        "'root': {'handlers': ['h']}})",
        "mine hello",
    ),
    "dictConfig of this logger": (
        "logging.config.dictConfig({'version': 1, "
        "'formatters': {'f': {'format': 'mine %(message)s'}}, "
        "'handlers': {'h': {'class': 'logging.StreamHandler', 'formatter': 'f'}}, "
        "'root': {'handlers': ['h']}, "
        "'loggers': {'torchbearer_ddp': {'handlers': ['h'], 'propagate': False}}})",
        "mine hello",
    ),
    "a handler of its own": (f"{LOGGER}.addHandler(logging.StreamHandler())", "hello"),
    "a handler of its own, and not the root's": (
        f"logging.basicConfig(); {LOGGER}.addHandler(logging.StreamHandler())\n"
        f"{LOGGER}.propagate = False",
        "hello",
    ),
    "not the root's": (
        f"logging.basicConfig(); {LOGGER}.propagate = False",
        "torchbearer_ddp: hello",
    ),
    "another stderr": ("sys.stderr = sys.stdout", "torchbearer_ddp: hello"),
    "a null handler": (f"{LOGGER}.addHandler(logging.NullHandler())", ""),
    "a higher level": (f"{LOGGER}.setLevel(logging.WARNING)", ""),
    "disabled": (f"{LOGGER}.disabled = True", ""),
}


@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.parametrize(("setup", "line"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_shows_each_message_once(setup: str, line: str, imported: str) -> None:
    steps = [setup, "from torchbearer_ddp import log"]
    if imported == "before":
        steps.reverse()
    program = "\n".join(["import logging, logging.config, sys", *steps, "log.announce('hello')"])
    result = run(program)
    assert result.stdout + result.stderr == (line and line + "\n")


def test_records_have_the_rank_and_other_ranks_announce_nothing() -> None:
    program = (
        "import logging\nfrom torchbearer_ddp import log\n"
        "logging.basicConfig(format='%(rank)d %(message)s')\n"
        "log.set_rank(3)\nlog.announce('only rank zero')\nlog.logger.warning('every rank')\n"
    )
    assert run(program).stderr == "3 every rank\n"


def test_caplog_reads_messages(caplog: pytest.LogCaptureFixture) -> None:
    log.announce("hello")
    (record,) = caplog.records
    assert (record.levelno, record.message, record.rank) == (logging.INFO, "hello", 0)


def run(program: str) -> "subprocess.CompletedProcess[str]":
    # Without torchbearer_ddp/__init__.py, which imports torch: these programs log and nothing else.
    bare = "import sys, types; package = types.ModuleType('torchbearer_ddp')\n"
    bare += f"package.__path__ = [{str(Path(log.__file__).parent)!r}]\n"
    bare += "sys.modules['torchbearer_ddp'] = package\n"
    command = [sys.executable, "-c", bare + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
