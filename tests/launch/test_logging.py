"""What the package reports goes through a standard logger, which a program can set up."""

import re
import sys

import pytest

from tests.processes import Program, free_port

pytestmark = pytest.mark.concurrent

SCRIPT = """
import logging, sys
from torchbearer_ddp import barrier, rank, run_distributed
from torchbearer_ddp.log import announce

SETUP

def work():
    set_up()
    logging.getLogger("torchbearer_ddp").info(f"from rank {rank()}")
    logging.getLogger("torchbearer_ddp").warning("a warning")
    logging.getLogger("torchbearer_ddp").debug("not shown")
    barrier()
    announce("for everybody")

set_up()
run_distributed(work)
"""


def run(setup):
    """What a run on two ranks writes to stderr, where this code sets logging up."""
    script = SCRIPT.replace("SETUP", f"def set_up():\n    {setup}")
    with Program(sys.executable, "-c", script, "--nproc-per-node", "2", raw=True) as program:
        assert program.code() == 0, program.text()
        return sorted(program.errors)


def test_by_default_lines_from_info_on_go_to_stderr():
    launched, *lines = run("pass")
    assert launched.startswith("torchbearer_ddp: 2 ranks on this host (from --nproc-per-node 2)")
    expected = ["a warning", "a warning", "for everybody", "from rank 0", "from rank 1"]
    assert lines == [f"torchbearer_ddp: {line}\n" for line in expected]


def test_set_level_silences_it():
    assert run("logging.getLogger('torchbearer_ddp').setLevel(logging.ERROR)") == []
    warnings = run("logging.getLogger('torchbearer_ddp').setLevel(logging.WARNING)")
    assert warnings == ["torchbearer_ddp: a warning\n"] * 2


def test_basic_config_redirects_it_with_the_rank_of_each_record(tmp_path):
    path = tmp_path / "log"
    form = "%(name)s %(levelname)s rank %(rank)s: %(message)s"
    setup = f"logging.basicConfig(filename={str(path)!r}, format={form!r}, level=logging.INFO)"
    assert run(setup) == []
    launched, *lines = sorted(path.read_text().splitlines())
    assert launched.startswith("torchbearer_ddp INFO rank 0: 2 ranks on this host")
    assert lines == [
        "torchbearer_ddp INFO rank 0: for everybody",
        "torchbearer_ddp INFO rank 0: from rank 0",
        "torchbearer_ddp INFO rank 1: from rank 1",
        "torchbearer_ddp WARNING rank 0: a warning",
        "torchbearer_ddp WARNING rank 1: a warning",
    ]


FAILING = """
import logging, sys
from torchbearer_ddp import barrier, rank, run_distributed

def work():
    barrier()
    sys.exit(3 * rank())

logging.basicConfig(format="%(rank)s|%(message)s")
run_distributed(work)
"""


def test_a_line_after_the_run_has_the_rank_as_well():
    place = ("--world-size", "2", "--host", "127.0.0.1", "--port", str(free_port()), "--rank")
    with (
        Program(sys.executable, "-c", FAILING, *place, "0", raw=True) as zero,
        Program(sys.executable, "-c", FAILING, *place, "1", raw=True) as one,
    ):
        assert one.code() == 3, one.text()
        assert zero.code() == 0, zero.text()
        assert re.match(r"1\|Rank 1 on \S+ called sys.exit\(3\)", one.said()), one.text()
