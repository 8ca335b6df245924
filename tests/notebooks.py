"""Notebooks that a real kernel executes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.processes import bound

_ROOT = Path(__file__).parents[1]


class ThisPython(KernelSpecManager):
    """A kernel of the Python that runs the tests, wherever others are installed."""

    def __init__(self, folder: Path) -> None:
        kernel = folder / "kernels" / "python3"
        kernel.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        described = {"argv": argv, "display_name": "Python 3", "language": "python"}
        (kernel / "kernel.json").write_text(json.dumps(described))
        super().__init__(kernel_dirs=[str(kernel.parent)], ensure_native_kernel=False)


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Executes all cells in a folder; each then has what it shows, also an error."""
    client = NotebookClient(notebook, timeout=int(bound(60)), allow_errors=True)
    client.km = client.create_kernel_manager()
    client.km.kernel_spec_manager = ThisPython(folder)
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    client.execute(cwd=str(folder), env={**os.environ, **environment})


def shown(cell: NotebookNode, name: str = "stderr") -> str:
    """The text on a stream of a cell."""
    return "".join(each.text for each in cell.outputs if each.get("name") == name)
