"""The documentation is true: its code runs, flags and files exist, every message has an entry."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchbearer_ddp
from tests.forked import run_script
from tests.processes import Program, free_port, run_python
from torchbearer_ddp.gradients import header

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchbearer_ddp"
PAGES = [ROOT / "README.rst", ROOT / "CONTRIBUTING.rst", *sorted((ROOT / "docs").glob("*.rst"))]
#: What a snippet that submits a job needs; tests/slurm runs jobs.
CLUSTER_ONLY = "submit_slurm("
SECONDS = 120
#: Is enough: other tests run beside these.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def blocks(page: Path, *directives: str) -> list[str]:
    """The contents of these directives on a page, in their order."""
    found = []
    lines = page.read_text().splitlines()
    starts = tuple(f".. {directive}" for directive in directives)
    for number, line in enumerate(lines):
        if not line.strip().startswith(starts):
            continue
        indent = len(line) - len(line.lstrip())
        inside = []
        for following in lines[number + 1 :]:
            if following.strip() and len(following) - len(following.lstrip()) <= indent:
                break
            inside.append(following)
        body = textwrap.dedent("\n".join(inside)).splitlines()
        options = next((n for n, each in enumerate(body) if not each.startswith(":")), len(body))
        found.append("\n".join(body[options:]).strip("\n"))
    return found


def run(*words: str, folder: Path) -> Program:
    """Runs Python to its end."""
    return run_python(*words, folder=folder, seconds=SECONDS, **ONE_THREAD)


# Snippets.


def program_of(page: Path) -> str:
    """All python blocks of a page one after the other, as a reader would try them."""
    return "\n\n".join(
        block
        for block in blocks(page, "testsetup::", "code-block:: python")
        if CLUSTER_ONLY not in block
    )


@pytest.mark.concurrent
@pytest.mark.parametrize("page", [p for p in PAGES if program_of(p)], ids=lambda p: p.name)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    text = program_of(page)
    script = tmp_path / "script.py"
    script.write_text(text)
    code, printed = run_script(script, timeout=SECONDS)
    assert code == 0, f"{page.name}\n{printed}"
    if "run_distributed(" in text:
        program = run("script.py", "--nproc-per-node", "2", folder=tmp_path)
        assert program.code() == 0, f"{page.name} on 2 ranks\n{program.text()}"


@pytest.mark.concurrent
def test_both_first_commands_of_the_readme_train(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(program_of(ROOT / "README.rst"))
    for words in ([], ["--nproc-per-node", "2"]):
        program = run("script.py", *words, folder=tmp_path)
        assert program.code() == 0, program.text()
        for epoch in range(3):
            assert f"{epoch}/3(t): 100%" in "".join(program.errors)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_compile(page: Path) -> None:
    for block in blocks(page, "testsetup::", "code-block:: python", "code-block:: py3"):
        ast.parse(block)


@pytest.mark.concurrent
def test_docstring_examples_run(tmp_path: Path) -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if ">>> " in path.read_text()
    ]
    assert len(modules) > 5
    program = tmp_path / "examples.py"
    program.write_text(_DOCTEST_PROGRAM)
    code, printed = run_script(program, *modules, timeout=SECONDS)
    assert code == 0, printed


_DOCTEST_PROGRAM = f"""
import doctest, importlib, sys

if __name__ == "__main__":
    names, sys.argv[1:] = sys.argv[1:], []
    failed = tried = 0
    for name in names:
        module = importlib.import_module(name)
        for test in doctest.DocTestFinder().find(module):
            if any({CLUSTER_ONLY!r} in example.source for example in test.examples):
                continue
            result = doctest.DocTestRunner().run(test)
            failed, tried = failed + result.failed, tried + result.attempted
    print(tried, "examples")
    sys.exit(failed > 0 or tried < 20)
"""


# Commands.


def commands() -> Iterator[tuple[Path, list[str]]]:
    for page in PAGES:
        for block in blocks(page, "code-block:: console"):
            for line in block.splitlines():
                if words := shlex.split(line, comments=True):
                    yield page, words


def our_flags(words: list[str]) -> list[str] | None:
    """What a command gives to a script, or None if it starts none."""
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    return None if script is None else words[script + 1 :]


def test_flags_in_commands_exist() -> None:
    parser = torchbearer_ddp.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for flag in re.findall(
        r'add_argument\("(--[a-z-]+)"', (ROOT / "examples/mnist_ddp.py").read_text()
    ):
        parser.add_argument(flag)  # the example's own
    checked = 0
    for page, words in commands():
        flags = our_flags(words)
        if flags is None:
            continue
        try:
            parser.parse_args([word.replace("...", "1") for word in flags])
        except SystemExit:
            pytest.fail(f"{page.name}: {' '.join(words)}")
        checked += 1
    assert checked > 8


def test_make_targets_in_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = {words[1] for _, words in commands() if words[0] == "make"}
    assert wanted
    assert wanted <= targets


def runnable_commands() -> list[str]:
    """The distinct commands that start ranks on hosts, with at most two processes each."""
    found = set()
    for _, words in commands():
        flags = our_flags(words)
        if flags is None or words[0] not in ("python", "torchrun") or "slurm" in words:
            continue
        if all(flag.partition("=")[0] in _STARTS for flag in flags if flag.startswith("--")):
            text = re.sub(r"(--nproc-per-node) \d+", r"\1 2", " ".join(words))
            text = re.sub(r"\S+\.py", "script.py", text)
            text = re.sub(r"--host \S+", "--host 127.0.0.1", text)
            found.add(re.sub(r"(--rank|--node-rank) \d+", r"\1 {rank}", text))
    return sorted(found)


_STARTS = ("--nproc-per-node", "--world-size", "--rank", "--host", "--nnodes", "--node-rank")

_SUM_PROGRAM = """
from torchbearer_ddp import rank, run_distributed, world_size
print(run_distributed(lambda: (rank(), world_size())))
"""


@pytest.mark.concurrent
@pytest.mark.parametrize("command", runnable_commands())
def test_commands_start_their_ranks(command: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SUM_PROGRAM)
    nodes = int(next(iter(re.findall(r"(?:--world-size|--nnodes) (\d+)", command)), 1))
    each = int(next(iter(re.findall(r"--nproc-per-node (\d+)", command)), 1))
    if nodes > 1:
        command += f" --port {free_port()}"
    words = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    with contextlib.ExitStack() as stack:
        programs = []
        for node in range(nodes):
            first, *rest = command.format(rank=node).split()
            program = Program(
                *(sys.executable, *words[first], *rest),
                raw=True,
                folder=tmp_path,
                environment=ONE_THREAD,
            )
            programs.append(stack.enter_context(program))
        codes = [program.code(SECONDS) for program in programs]
    if "--nproc-per-node gpu" in command and not torch.cuda.is_available():
        assert "no GPU is visible" in programs[0].text()
        return
    assert codes == [0] * nodes, "".join(program.text() for program in programs)
    output = "".join(line for program in programs for line in program.output)
    started = sorted(re.findall(r"\((\d+), (\d+)\)", output))
    assert started == [(str(rank), str(nodes * each)) for rank in range(nodes * each)]


# Pages against the package.


def test_every_flag_has_a_row() -> None:
    page = (ROOT / "docs/launching.rst").read_text()
    options = torchbearer_ddp.add_arguments(argparse.ArgumentParser(add_help=False))._actions
    shown = [o.option_strings[0] for o in options if o.help != argparse.SUPPRESS]
    assert len(shown) > 20
    assert [name for name in shown if f"``{name}``" not in page] == []


def test_api_page_has_exactly_the_public_names() -> None:
    page = (ROOT / "docs/api.rst").read_text()
    documented = re.findall(
        r"^\.\. (?:auto(?:function|class|exception)|data):: (\w+)", page, re.MULTILINE
    )
    assert sorted(documented) == sorted(torchbearer_ddp.__all__)


def test_files_that_pages_include_exist() -> None:
    checked = 0
    for page in PAGES:
        text = page.read_text()
        for kind, name in re.findall(
            r"^ *\.\. (image|figure|include|literalinclude):: (\S+)", text, re.MULTILINE
        ):
            assert (page.parent / name).is_file(), f"{page.name}: {kind} {name}"
            checked += 1
        assert ":lines:" not in text, f"{page.name} includes by line number, which rots"
    assert checked >= 2


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("layers_picture.py", "hierarchical"),  # a file in the innermost folder
        ("data_flow_picture.py", ">header<"),  # a box in a box
        ("favicon_picture.py", "flame"),
    ],
)
def test_a_picture_is_what_its_script_draws(
    script: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))  # where the scripts find what they share
    picture = runpy.run_path(str(ROOT / "docs" / script))
    for name in picture["COLOURS"]:
        drawn = (ROOT / "docs" / "images" / name).read_text()
        assert drawn == picture["draw"](name), f"run python docs/{script}"
        assert detail in drawn


def test_every_picture_is_made_by_a_script() -> None:
    scripts = "".join(path.read_text() for path in (ROOT / "docs").glob("*_picture.py"))
    pictures = [path.name for path in (ROOT / "docs" / "images").iterdir()]
    assert len(pictures) > 5
    assert [name for name in pictures if f'"{name}"' not in scripts] == []


def test_the_picture_of_a_proof_is_the_same_in_both_colours() -> None:
    picture = runpy.run_path(str(ROOT / "docs" / "prove_picture.py"))
    assert picture["program"]().strip() == program_of(ROOT / "docs" / "prove.rst").strip()
    light, dark = ((picture["FOLDER"] / name).read_text() for name in picture["COLOURS"])
    for colour, other in zip(*picture["COLOURS"].values(), strict=True):
        dark = dark.replace(other, colour)
    assert dark == light, "run python docs/prove_picture.py"
    assert light.count("<circle") == 20


def test_the_picture_of_a_terminal_is_of_the_first_page() -> None:
    picture = runpy.run_path(str(ROOT / "docs" / "terminal_picture.py"))
    assert picture["program"]().strip() == program_of(ROOT / "docs" / "index.rst").strip()
    drawn = picture["PICTURE"].read_text()
    shown = re.findall(r"<text .*?>(.*)</text>", drawn)
    assert shown[0] == f"$ {picture['COMMAND']}"
    assert drawn == picture["draw"]("\n".join(shown[1:])), "run python docs/terminal_picture.py"
    assert any(line.startswith("2/3(t): 100%") for line in shown)


def test_the_numbers_of_the_first_page_are_measured() -> None:
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    figures = (ROOT / "docs" / "benchmarks" / "figures.rst").read_text()
    numbers = settings["measured"]()
    page = (ROOT / "docs" / "index.rst").read_text()
    assert all(f"|{name}|" in page for name in numbers)
    assert f"**{numbers['ratio_trial']}**" in figures
    assert f'"{numbers["ratio_hosts"]}"' in figures


def test_pages_link_to_the_repository_once_its_address_is_known() -> None:
    link = runpy.run_path(str(ROOT / "docs" / "conf.py"))["repository_link"]
    assert link("setup(\n    name='x',\n)") == {}
    found = link('setup(\n    url="https://example.org/x",\n)')["footer_icons"]
    assert [each["url"] for each in found] == ["https://example.org/x"]


def test_figures_and_pictures_are_of_the_stored_results() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "benchmark_pictures.py"))
    files = script["files"]()
    assert {*files, "results.json"} == {each.name for each in script["FOLDER"].iterdir()}
    for name, text in files.items():
        kept = (script["FOLDER"] / name).read_text()
        assert kept == text, f"{name}: run python docs/benchmark_pictures.py"


def test_files_that_the_design_page_names_exist() -> None:
    text = (ROOT / "docs" / "design.rst").read_text()
    names = {path.name for path in PACKAGE.rglob("*.py")}
    found = re.findall(r"``((?:\w+/)*)(\w+\.py)``", text)
    assert len(found) > 20
    for folder, name in found:
        assert name in names or (ROOT / folder / name).is_file(), f"{folder}{name}"
        assert not folder or (ROOT / folder).is_dir() or (PACKAGE / folder / name).is_file()


def test_the_table_of_the_header_is_that_of_the_source() -> None:
    text = (ROOT / "docs" / "design.rst").read_text()
    rows = re.findall(r"\* - (\d+) to (\d+)\n +- ``(\w+)``", text)
    assert [name for _, _, name in rows] == list(header._NAMES)
    size = 4 * header.Header.size(world_size=1, parameters=0)
    assert [(int(a), int(b)) for a, b, _ in rows] == [(n, n + 3) for n in range(0, size, 4)]
    assert f"a row takes {size} bytes" in text


# Messages: each that the package can print has an entry in docs/troubleshooting.rst.

#: Calls whose first argument is a message; errors are found by their ``raise`` as well.
_SAY = (
    *("announce", "warnings.warn", "PeerLost", "LaunchError", "WorkerError", "refuse"),
    *("given.refuse", "logger.warning", "logger.error"),
)
#: Never seen by a user: for Python's own machinery, or turned into another message.
_INTERNAL = (
    "not implemented on", "sem_init failed", "unreachable", "Permission denied", "has no attribute",
    "scontrol shows no JobState",
)  # fmt: skip
_HOLE = "\0"


def template(node: ast.expr) -> str | None:
    """A message with a hole for every part that varies, or None if it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or _HOLE for part in node.values)
    return None


def messages() -> Iterator[tuple[str, str]]:
    """What is raised, warned of or announced, with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            if call is node and ast.unparse(call.func) not in _SAY:
                continue
            text = template(call.args[0])
            if text and len(text.replace(_HOLE, "")) > 12 and not any(t in text for t in _INTERNAL):
                yield f"{path.relative_to(ROOT)}:{call.lineno}", text


def entries() -> dict[str, re.Pattern[str]]:
    """The headings of the page, each as a pattern over templates."""
    found = {}
    for line in (ROOT / "docs/troubleshooting.rst").read_text().splitlines():
        if line.startswith("``"):
            for heading in re.findall(r"``(.+?)``(?: · |$)", line):
                parts = [re.escape(part.strip()) for part in heading.split("...") if part.strip()]
                found[heading] = re.compile(".*".join(parts), re.DOTALL)
    return found


def test_every_message_has_an_entry() -> None:
    known = entries().values()
    missing = [
        f"{place}: {text.replace(_HOLE, '...')}"
        for place, text in messages()
        if not any(pattern.search(text) for pattern in known)
    ]
    assert missing == []


def test_every_entry_is_of_a_message() -> None:
    texts = [
        text
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr) and (text := template(node))
    ]
    stale = [h for h, pattern in entries().items() if not any(map(pattern.search, texts))]
    assert stale == []
