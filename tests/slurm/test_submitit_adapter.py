"""The private parts of submitit that we use are those of the installed version, in one file."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core.job_environment import JobEnvironment
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher

import torchbearer_ddp
from torchbearer_ddp.slurm.submitit_adapter import PRIVATE_PARTS

PACKAGE = Path(torchbearer_ddp.__file__).parent
ADAPTER = PACKAGE / "slurm" / "submitit_adapter.py"
#: How each private method is called, or what kind of value an attribute has.
EXPECTED: dict[type, dict[str, Any]] = {
    SlurmExecutor: {
        "_convert_parameters": ["self", "params"],
        "_equivalence_dict": ["cls"],
        "_make_submission_command": ["self", "submission_file_path"],
        "_make_submission_file_text": ["self", "command", "uid"],
        "_submit_command": ["self", "command"],
        "_submitit_command_str": property,
        "_valid_parameters": ["cls"],
    },
    SlurmInfoWatcher: {
        "_finished": set,
        "_info_dict": dict,
        "_last_status_check": float,
        "_num_calls": int,
        "_registered": set,
    },
    submitit.SlurmJob: {"_tasks": tuple},
    JobEnvironment: {"_usr_sig": ["cls"]},
}


def instance(kind: type, folder: Path) -> Any:
    """An object whose attributes can be looked at."""
    return {
        SlurmInfoWatcher: SlurmInfoWatcher,
        submitit.SlurmJob: lambda: submitit.SlurmJob(folder, "1"),
    }[kind]()


def found(kind: type, name: str, folder: Path) -> Any:
    """A private part as it is in the installed submitit: parameters, or a kind; None if gone."""
    part = inspect.getattr_static(kind, name, None)
    if isinstance(part, property):
        return property
    if isinstance(part, classmethod | staticmethod):
        part = part.__func__
    if inspect.isfunction(part):
        return list(inspect.signature(part).parameters)
    value = getattr(instance(kind, folder), name, None)
    return None if value is None else type(value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in PRIVATE_PARTS.items() for name in names],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_the_private_part_is_as_we_use_it(kind, name, tmp_path):
    expected, there = EXPECTED[kind][name], found(kind, name, tmp_path)
    installed = f"submitit {version('submitit')}"
    assert there is not None, f"{kind.__name__}.{name} is gone in {installed}"
    assert there == expected, (
        f"{kind.__name__}.{name} changed in {installed}: {expected} -> {there}"
    )


def private_names(path: Path) -> set[str]:
    """The private attributes that a file uses or defines, but for its own variables."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return {name for name in names if re.match(r"_[a-z]", name)}


def test_the_list_is_complete():
    listed = {name for names in PRIVATE_PARTS.values() for name in names}
    own = {"_start_file", "_script_path", "_look_up", "_final"}
    assert private_names(ADAPTER) - own == listed
    for kind in PRIVATE_PARTS:  # and ours do not replace one of submitit's
        assert not [name for name in own if hasattr(kind, name)]


def test_no_other_file_knows_submitit():
    imports = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                if module.partition(".")[0] == "submitit":
                    imports.setdefault(str(path.relative_to(PACKAGE)), set()).add(module)
    assert set(imports) == {"slurm/submitit_adapter.py", "slurm/start.py"}
    assert imports["slurm/start.py"] == {"submitit.core.submission"}  # its command, nothing else
    # Subclasses of the adapter's classes, and what uses them, leave submitit's private names alone.
    inherited = {name for kind in PRIVATE_PARTS for name in vars(kind) if re.match(r"_[a-z]", name)}
    for name in ("job", "submit", "task", "start"):
        used = private_names(PACKAGE / "slurm" / f"{name}.py")
        assert not used & inherited, f"slurm/{name}.py uses {used & inherited}"


def test_the_version_is_bounded():
    (requirement,) = [each for each in requires("torchbearer_ddp") if each.startswith("submitit")]
    assert {part.strip() for part in requirement.removeprefix("submitit").split(",")} == {
        ">=1.5.4",
        "<1.6",
    }
