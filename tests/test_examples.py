"""The files in examples/: programs run on two ranks; what needs an engine fits the programs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from pathlib import Path

import nbformat
import pytest

import torchbearer_ddp
from tests.notebooks import execute, shown
from tests.processes import run_python

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
#: What each program prints when it has learned; tests/launch/test_example.py has mnist_ddp.py.
PRINTS = {
    "text_classifier.py": r"accuracy: (0\.9\d*|1\.0+)",
    "gan.py": r"generated points is 0\.\d+ away",
    "fine_tuning.py": r"frozen at first: True, thawed later: True\naccuracy: 0\.[789]\d*",
    "mixed_precision.py": r"parameters: torch\.float32\naccuracy: (0\.9\d*|1\.0+)",
}


def test_every_program_is_run_and_shown() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == {*PRINTS, "mnist_ddp.py"}
    page = (ROOT / "docs" / "examples.rst").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert {
        Path(name).name for name in re.findall(r"(?:literalinclude|notebook):: (\S+)", page)
    } == files


@pytest.mark.parametrize("name", PRINTS)
def test_programs_fit_on_a_screen(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 75


@pytest.mark.concurrent
@pytest.mark.parametrize("name", PRINTS)
def test_programs_learn_on_two_ranks(name: str, tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "2", "--seed", "1")
    done = run_python(str(EXAMPLES / name), *flags, folder=tmp_path, OMP_NUM_THREADS="1")
    assert done.code() == 0, done.text()[-3000:]
    assert re.search(PRINTS[name], "".join(done.output)), done.text()
    assert "Warning" not in "".join(done.errors)


@pytest.mark.concurrent
def test_the_notebook_trains_and_gets_its_weights_back(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "saved with its outputs"
    execute(notebook, tmp_path)
    defined, trained, used = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert defined.outputs == []
    assert re.search(r"accuracy: (0\.9\d*|1\.0+)\n", shown(trained, "stdout")), trained.outputs
    assert shown(used, "stdout") == "equal: True\nfar from the centre: 1\n", used.outputs
    assert "Warning" not in shown(trained)


def parse(arguments: list[str]) -> argparse.Namespace:
    """What mnist_ddp.py and the launcher understand of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in re.findall(r'add_argument\("(--[a-z-]+)"', (EXAMPLES / "mnist_ddp.py").read_text()):
        parser.add_argument(flag)
    return torchbearer_ddp.add_arguments(parser).parse_args(arguments)


def test_the_slurm_script_is_a_shell_script_that_starts_the_example() -> None:
    script = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    command = shlex.split(script.read_text().splitlines()[-1])
    assert command[0] == "srun"
    start = command.index("python")
    assert (ROOT / command[start + 1]).is_file()
    parse(command[start + 2 :])
    options = re.findall(r"^#SBATCH --([a-z-]+)=\S+$", script.read_text(), re.MULTILINE)
    assert len(options) == script.read_text().count("#SBATCH") == 7


def test_the_image_copies_what_exists_and_starts_the_example() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert len(copied) == 3
    for names in copied:
        for name in names.split():
            assert (ROOT / name).exists(), name
    entry = json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)[1])  # type: ignore[index]
    assert entry[0] == "python"
    assert (ROOT / entry[1]).is_file()


def test_the_job_starts_all_of_its_ranks() -> None:
    text = (EXAMPLES / "kubernetes.yaml").read_text()
    given = re.findall(r"^ +- (--\S+)$", text, re.MULTILINE)
    options = parse([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in given])
    pods = re.findall(r"(?:completions|parallelism): (\d+)", text)
    assert [int(count) for count in pods] == [options.nnodes] * 2
    name, service = options.host.split(".")
    assert f"subdomain: {service}" in text
    assert f"name: {name.removesuffix('-0')}\n" in text
    folder = options.out.split("/")[1]
    assert f"mountPath: /{folder}" in text
