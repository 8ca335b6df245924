"""The script's ``__main__`` on a started rank: its module level is run, as multiprocessing does.

The rank runs the text of the script under the name ``__mp_main__``, so what is under ``if __name__
== '__main__'`` is left out. A script without that line is run up to its call of
``run_distributed``. Afterwards the module is ``__main__``, also for loader workers of this rank.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
from dataclasses import dataclass
from multiprocessing.process import current_process
from pathlib import Path
from types import ModuleType

from torchbearer_ddp.errors import LaunchError

_MAIN = "__main__"
#: multiprocessing's name of the main module in a process that it has started.
_IMPORTED_MAIN = "__mp_main__"


class LaunchReached(BaseException):
    """The module level has come to the launch; not an Exception, so that no script catches it."""


class _ModuleLevel:
    #: True while a rank runs the script's module level.
    is_running = False


@dataclass(frozen=True)
class MainModule:
    """The script that this process was started with.

    Attributes:
        path: The file of its source.
        name: The module's name, if it was started with ``python -m``.
        source: Its text, or None if there is none, as in a notebook. A submitted job runs the text
            as it was at the submission.
    """

    path: str | None = None
    name: str | None = None
    source: bytes | None = None

    @classmethod
    def of_this_process(cls) -> MainModule:
        """The script of this process."""
        main = sys.modules[_MAIN]
        path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        name = getattr(spec, "name", None)
        if path is None or Path(path).stem == "ipython" or f"{name}.".startswith(_OURS):
            return cls()
        try:
            source = Path(path).read_bytes()
            compile(source, path, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError):  # a program that is not a file of source text
            return cls()
        return cls(str(Path(path).absolute()), name, source)

    def install(self) -> ModuleType:
        """Makes an empty ``__main__`` of this script; the previous one is kept alive."""
        module = ModuleType(_MAIN)
        spec = importlib.util.find_spec(self.name) if self.name else None
        package = spec.parent if spec else None
        vars(module).update(__builtins__=builtins, __spec__=spec, __package__=package)
        if self.path is not None:
            vars(module).update(__file__=self.path, __cached__=None)
        _previous.append(sys.modules[_MAIN])
        sys.modules[_MAIN] = sys.modules[_IMPORTED_MAIN] = module
        return module

    def run_module_level(self) -> None:
        """Makes a ``__main__`` with everything that the script defines before it launches."""
        module = self.install()
        if self.source is None:
            return
        module.__name__, _ModuleLevel.is_running = _IMPORTED_MAIN, True
        try:
            exec(compile(self.source, self.path or "?", "exec", dont_inherit=True), vars(module))
        except LaunchReached:
            pass
        finally:
            module.__name__, _ModuleLevel.is_running = _MAIN, False


#: This package's own commands are not scripts of the user.
_OURS = "torchbearer_ddp."
_previous: list[ModuleType] = []


def check_launch(function: str) -> None:
    """Stops where a launch must not happen: in a process that only imports the script.

    Raises:
        LaunchReached: On a rank that runs the script's module level.
        LaunchError: In a process of multiprocessing that imports the script.
    """
    if _ModuleLevel.is_running:
        raise LaunchReached
    if getattr(current_process(), "_inheriting", False):
        raise LaunchError(
            f"{function} was called while another process of multiprocessing, such as a loader's "
            "worker with the start method spawn or forkserver, imports the script. Put the call "
            "under if __name__ == '__main__'."
        )
