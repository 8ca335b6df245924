"""The command line of ``python -m torchbearer_ddp``: every command explains itself."""

import re
import subprocess
import sys

import pytest

from torchbearer_ddp.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_the_exit_codes(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m torchbearer_ddp {name}")
    example = text.partition("example:\n")[2].partition("exit codes:")
    assert example[0].strip().startswith(f"python -m torchbearer_ddp {name}"), text
    assert {"0", "2"} <= set(re.findall(r"^  (\d)  \w", example[2], re.MULTILINE))


def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "torchbearer_ddp", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(60) == 141
