"""The folders of the package are its layers: imports point down, and files stay short."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torchbearer_ddp"
#: The layers from top to bottom; layers of one row are equally high. ``__init__`` is the package
#: itself, which exports the public names and which no module imports; ``__main__`` its commands.
ROWS = (
    ("__main__",),
    ("commands",),
    ("__init__",),
    ("callbacks",),
    ("launch",),
    ("slurm",),
    ("gradients",),
    ("checkpoints",),
    ("metrics",),
    ("data",),
    ("group",),
    ("checked",),
    ("errors", "log", "version"),
)
HEIGHT = {layer: -number for number, row in enumerate(ROWS) for layer in row}
#: How to start ranks and what runs in a Trial are independent of each other.
STRANGERS = {"callbacks", "launch"}
#: Imports that a function may make, by the start of the file's path, and why.
IN_FUNCTIONS = (
    ("launch/", "torchbearer_ddp.slurm", "it loads submitit"),
    ("commands/export.py", "safetensors", "it is optional"),
    ("__init__.py", "torchbearer_ddp.callbacks.tensorboard", "it loads tensorboardX"),
    ("callbacks/tensorboard.py", "torch.utils.tensorboard", "it needs the tensorboard package"),
    ("callbacks/bars.py", "tqdm.notebook", "it loads ipywidgets"),
    ("launch/notebook.py", "tqdm.notebook", "it loads ipywidgets"),
)
#: Where torch.distributed may be used.
TALKERS = ("group/", "gradients/transports/")
MOST_LINES_OF_A_FILE = 350
MAKE_TENSORS = {
    f"torch.{name}"
    for name in (
        *("tensor", "empty", "zeros", "ones", "full", "empty_strided", "scalar_tensor", "eye"),
        *("arange", "linspace", "rand", "randn", "randint", "randperm"),
    )
}
MOST_LINES_OF_A_FUNCTION = 60


@dataclass(frozen=True)
class Source:
    """One file of a package."""

    path: str
    module: str
    text: str

    @property
    def layer(self) -> str:
        return layer_of(self.module)

    @property
    def tree(self) -> ast.Module:
        return parsed(self.text)


@functools.cache
def parsed(text: str) -> ast.Module:
    """The tree of a text, which every rule reads."""
    return ast.parse(text)


@dataclass(frozen=True)
class Import:
    """One import: the file, its line, and the module that it names."""

    source: Source
    line: int
    module: str
    in_function: bool

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}: {self.source.layer} imports {self.module}"


def layer_of(module: str) -> str:
    """The folder or top-level module that a module of the package belongs to."""
    return (*module.split(".")[1:], "__init__")[0]


def sources(package: Path) -> list[Source]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        found.append(Source(str(path.relative_to(package)), module, path.read_text()))
    return found


def imports(package: Path) -> Iterator[Import]:
    """Every import of every file, also under TYPE_CHECKING and inside functions."""
    files = sources(package)
    modules = {source.module for source in files}
    for source in files:
        functions = [
            node
            for node in ast.walk(source.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        lines = {line for f in functions for line in range(f.lineno, (f.end_lineno or 0) + 1)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in named_modules(node, source, modules):
                    yield Import(source, node.lineno, name, node.lineno in lines)


def named_modules(
    node: ast.Import | ast.ImportFrom, source: Source, modules: set[str]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:  # relative to the folder of this file
        folder = source.module.split(".")
        if not source.path.endswith("__init__.py"):
            folder = folder[:-1]
        folder = folder[: len(folder) - node.level + 1]
        base = ".".join([*folder, *filter(None, [node.module])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield inner if inner in modules else base


def our_imports(package: Path) -> list[Import]:
    prefix = f"{package.name}."
    return [i for i in imports(package) if f"{i.module}.".startswith(prefix)]


# The rules: each finds sentences to complain with.


def upward_imports(package: Path) -> Iterator[str]:
    for each in our_imports(package):
        layer, other = each.source.layer, layer_of(each.module)
        if {layer, other} <= HEIGHT.keys():
            if HEIGHT[other] > HEIGHT[layer]:
                yield f"{each}, but {other} is above {layer}"
            elif {layer, other} == STRANGERS:
                yield f"{each}, but {layer} and {other} must not know each other"
        else:
            yield f"{each}: {layer if layer not in HEIGHT else other} is no known layer"


def cycles(package: Path) -> Iterator[str]:
    found = our_imports(package)
    graph: dict[str, dict[str, Import]] = {}
    for each in found:
        graph.setdefault(each.source.module, {})[each.module] = each

    def reaches(start: str, goal: str) -> bool:
        seen, waiting = set(), [start]
        while waiting:
            module = waiting.pop()
            if module == goal:
                return True
            if module not in seen:
                seen.add(module)
                waiting.extend(graph.get(module, ()))
        return False

    for each in found:
        if reaches(each.module, each.source.module):
            yield f"{each}, which imports {each.source.module} in turn (a cycle)"


def imports_in_functions(package: Path) -> Iterator[str]:
    for each in imports(package):
        allowed = any(
            each.source.path.startswith(path) and each.module.startswith(module)
            for path, module, _ in IN_FUNCTIONS
        )
        if each.in_function and not allowed:
            yield f"{each} inside a function; move the import to the top of the file"


def talks_to_other_ranks(package: Path) -> Iterator[str]:
    for source in sources(package):
        if source.path.startswith(TALKERS):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                yield f"{source.path}:{node.lineno}: {source.layer} uses torch.distributed"
    for each in imports(package):
        if each.source.path.startswith(TALKERS):
            continue
        if f"{each.module}.".startswith(("torch.distributed.", "torch._C._distributed_c10d.")):
            yield f"{each}; only group and gradients/transports use torch.distributed"


def long_files(package: Path) -> Iterator[str]:
    for source in sources(package):
        lines = len(source.text.splitlines())
        if lines > MOST_LINES_OF_A_FILE:
            yield f"{source.path} has {lines} lines, more than {MOST_LINES_OF_A_FILE}"


def long_functions(package: Path) -> Iterator[str]:
    for source in sources(package):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    yield (
                        f"{source.path}:{node.lineno}: {node.name} has {lines} lines, more than "
                        f"{MOST_LINES_OF_A_FUNCTION}"
                    )


def tensors_of_any_device(package: Path) -> Iterator[str]:
    """A script may set another default device, on which our numbers for the host have no place."""
    for source in sources(package):
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or {k.arg for k in node.keywords} & {"device", None}:
                continue
            called = ast.unparse(node.func)
            if called in MAKE_TENSORS:
                yield f"{source.path}:{node.lineno}: {called} without device="


Rule = Callable[[Path], Iterator[str]]
RULES: list[Rule] = [
    upward_imports,
    cycles,
    imports_in_functions,
    talks_to_other_ranks,
    long_files,
    long_functions,
    tensors_of_any_device,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(PACKAGE)) == []


def test_every_exception_for_a_function_is_in_use() -> None:
    inside = [each for each in imports(PACKAGE) if each.in_function]
    for path, module, _ in IN_FUNCTIONS:
        assert any(i.source.path.startswith(path) and i.module.startswith(module) for i in inside)


# Each rule can fail: small packages that break exactly one.

BROKEN: list[tuple[Rule, dict[str, str], str]] = [
    (
        upward_imports,
        {"group/a.py": "\nfrom torchbearer_ddp.data import b\n", "data/b.py": ""},
        "group/a.py:2: group imports torchbearer_ddp.data.b, but data is above group",
    ),
    (
        upward_imports,
        {"log.py": "import torchbearer_ddp.group.a\n", "group/a.py": ""},
        "log.py:1: log imports torchbearer_ddp.group.a, but group is above log",
    ),
    (
        upward_imports,
        {
            "group/a.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from ..metrics.b import name\n",
            "metrics/b.py": "name = 1",
        },
        "group/a.py:3: group imports torchbearer_ddp.metrics.b, but metrics is above group",
    ),
    (
        upward_imports,
        {"data/a.py": "from torchbearer_ddp import rank\n", "__init__.py": "rank = 1"},
        "data/a.py:1: data imports torchbearer_ddp, but __init__ is above data",
    ),
    (
        upward_imports,
        {"callbacks/a.py": "from torchbearer_ddp.launch import b\n", "launch/b.py": ""},
        "callbacks/a.py:1: callbacks imports torchbearer_ddp.launch.b, "
        "but callbacks and launch must not know each other",
    ),
    (
        upward_imports,
        {"data/a.py": "from torchbearer_ddp.attic import b\n", "attic/b.py": ""},
        "data/a.py:1: data imports torchbearer_ddp.attic.b: attic is no known layer",
    ),
    (
        cycles,
        {
            "group/a.py": "from torchbearer_ddp.group import b\n",
            "group/b.py": "from torchbearer_ddp.group.c import name\n",
            "group/c.py": "def name():\n    import torchbearer_ddp.group.a\n",
        },
        "group/a.py:1: group imports torchbearer_ddp.group.b, "
        "which imports torchbearer_ddp.group.a in turn (a cycle)",
    ),
    (
        imports_in_functions,
        {"launch/a.py": "def f():\n    import json\n"},
        "launch/a.py:2: launch imports json inside a function; "
        "move the import to the top of the file",
    ),
    (
        talks_to_other_ranks,
        {"data/a.py": "import torch.distributed as dist\n"},
        "data/a.py:1: data imports torch.distributed; "
        "only group and gradients/transports use torch.distributed",
    ),
    (
        talks_to_other_ranks,
        {"gradients/a.py": "import torch\ntorch.distributed.barrier()\n"},
        "gradients/a.py:2: gradients uses torch.distributed",
    ),
    (long_files, {"data/a.py": "\n" * 351}, "data/a.py has 351 lines, more than 350"),
    (
        long_functions,
        {"data/a.py": "\ndef f():\n" + "    pass\n" * 60},
        "data/a.py:2: f has 61 lines, more than 60",
    ),
    (
        tensors_of_any_device,
        {"data/a.py": "import torch\ntorch.empty(1, device='cpu')\ntorch.arange(3)\n"},
        "data/a.py:3: torch.arange without device=",
    ),
]


@pytest.mark.parametrize(("rule", "files", "complaint"), BROKEN)
def test_a_package_that_breaks_a_rule_is_named(
    rule: Rule, files: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    package = tmp_path / "torchbearer_ddp"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert complaint in list(rule(package))
    for other in RULES:
        # A cycle here needs an import in a function; all else breaks one rule alone.
        if other is not rule and rule is not cycles:
            assert list(other(package)) == []


def test_importing_the_package_loads_neither_submitit_nor_tensorboardx() -> None:
    program = (
        "import sys, torchbearer_ddp\n"
        "print(*(name for name in ('submitit', 'tensorboardX') if name in sys.modules))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == ""


def test_no_test_module_is_imported() -> None:
    imported = re.compile(
        r"^(from|import) tests\.(\w+\.)*test_|^from tests\S* import test_", re.MULTILINE
    )
    folder = Path(__file__).parent
    assert [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*.py"))
        if imported.search(path.read_text())
    ] == []
