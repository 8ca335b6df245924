"""A few of the programs as real scripts: the two lines, and the command that starts the ranks."""

import sys

import pytest
import torch

from tests.processes import Program
from tests.projects.moving import Run, difference, execute, moved, plain
from tests.ranks import run_ranks

pytestmark = pytest.mark.concurrent

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUN = (sys.executable, "-m", "torchbearer_ddp", "run", "--nproc-per-node", "2")


def outcomes(command, text, folder):
    """What each process of a script has come to."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(text)
    environment = {
        "PROJECT_OUTCOME": str(folder / "outcome"),
        "PROJECT_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    with Program(*command, str(script), environment=environment, raw=True) as program:
        assert program.code(120) == 0, program.text()
    files = folder.glob("outcome-*.pt")
    return [Run(torch.load(file, weights_only=False), program.errors) for file in files]


@pytest.mark.parametrize(
    ("name", "command"),
    [("script", TORCHRUN), ("gan", TORCHRUN), ("stopping", TORCHRUN), ("script", RUN)],
)
def test_a_script_that_two_lines_have_moved(name, command, tmp_path):
    whole = name == "stopping"  # its batch sampler makes the batches of a rank
    text = moved(name, "" if whole else "global_batch=True")
    found = outcomes(command, text, tmp_path / "ranks")
    variables = {"BATCH_SIZE": "24" if whole else "12"}
    (alone,) = run_ranks(execute, 1, (plain(name), str(tmp_path), variables))
    assert len(found) == 2
    # Two processes that know nothing of each other would come to the same numbers.
    assert "gradients: shared memory (2 ranks on one host)" in "".join(found[0].lines)
    for run in found:
        assert difference(run, alone) <= 1e-5
        assert run.metrics == found[0].metrics
        for mine, one in zip(run.metrics, alone.metrics, strict=True):
            assert mine == pytest.approx(one, rel=1e-5, abs=1e-6)
        if "evaluated" in alone.outcome:
            assert run.outcome["evaluated"] == pytest.approx(alone.outcome["evaluated"], rel=1e-5)
        if "predictions" in alone.outcome:
            assert torch.allclose(run.outcome["predictions"], alone.outcome["predictions"], 1e-4)
