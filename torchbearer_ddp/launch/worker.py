"""The worker as bytes: what a started rank needs to run it as the launcher would.

Functions and values of the script are sent; the rank places them into its ``__main__``, whose
module level it has run before. Classes of the script are the rank's own, so that what libraries
know about them (from decorators at module level) is true of those that the worker uses.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from cloudpickle import cloudpickle as internals
from torchbearer.metrics import metrics as registry

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.launch import pickling
from torchbearer_ddp.launch.main_module import MainModule

#: The function, its arguments and its keyword arguments.
Task = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

#: Settings of torch that change results: how they are read, and how they are set.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn": (
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        lambda flags: _set_cudnn(*flags),
    ),
}


def _set_cudnn(benchmark: bool, deterministic: bool) -> None:
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = deterministic


def pack(task: Task) -> bytes:
    """The worker for another process.

    Raises:
        LaunchError: If the worker or its arguments cannot be sent.
    """
    main = MainModule.of_this_process()
    metrics = {} if main.source else _metrics_of_script()
    with _explained(task):
        body = pickling.dumps((task, metrics))
    if main.name is not None and b"__main__" not in body:
        main = MainModule()  # a program such as python -m pytest, of which the worker needs nothing
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    return pickle.dumps((asdict(main), _classes_of_script(), settings, body))


def prepare_fork(task: Task) -> None:
    """Checks a worker for forked ranks, which have it already: it is what others could be sent.

    Open files and locks would be shared. Whether a launch works does not depend on how it starts.

    Raises:
        LaunchError: If the worker or its arguments could not be sent.
    """
    with _explained(task):
        pickling.check(task)
    _classes_of_script()  # their keys: results name the launcher's classes


@contextlib.contextmanager
def _explained(task: Task) -> Iterator[None]:
    """Says which worker cannot be sent, and what to do."""
    try:
        yield
    except Exception as error:
        name = getattr(task[0], "__qualname__", repr(task[0]))
        raise LaunchError(
            f"The worker {name} or its arguments cannot be sent to other processes "
            f"({type(error).__name__}: {error}). Open files, locks and connections inside the "
            "worker instead of handing them over."
        ) from error


def unpack(payload: bytes) -> Task:
    """The worker, after the script's module level was run in this process."""
    main, names, settings, body = pickle.loads(payload)
    MainModule(**main).run_module_level()
    for name, value in settings.items():
        read, write = _SETTINGS[name]
        if read() != value:
            write(value)
    module = vars(sys.modules["__main__"])
    classes = {key: module[name] for key, name in names.items() if name in module}
    for key, each in classes.items():
        internals._lookup_class_or_track(key, each)  # results then name the launcher's classes
    task, metrics = _Unpickler(io.BytesIO(body), classes).load()
    _metrics.update(metrics)
    return task  # type: ignore[no-any-return]


def _classes_of_script() -> dict[str, str]:
    """The classes at the module level of the script, by the keys that cloudpickle gives them."""
    return {
        internals._get_or_create_tracker_id(each): name
        for name, each in vars(sys.modules["__main__"]).items()
        if isinstance(each, type) and (each.__module__, each.__qualname__) == ("__main__", name)
    }


#: The table of metrics that torchbearer's decorators fill, and what it has registered itself.
_metrics: dict[str, Any] = vars(registry)["__defaults__"]
_own_metrics = set(_metrics)


def _metrics_of_script() -> dict[str, Any]:
    """The metrics that a notebook has registered by torchbearer's decorators."""
    return {key: each for key, each in _metrics.items() if key not in _own_metrics}


class _Unpickler(pickle.Unpickler):
    """Loads functions of the script into ``__main__`` itself, and takes the classes from there."""

    def __init__(self, stream: io.BytesIO, classes: dict[str, Any]) -> None:
        super().__init__(stream)
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is internals._make_function:
            return _make_function
        if found in (internals._make_skeleton_class, internals._make_skeleton_enum):
            return lambda *words: self._known(words) or found(*words)
        return found

    def _known(self, words: tuple[Any, ...]) -> Any:
        """The class that one of these words is the key of."""
        return next((self._classes[w] for w in words if type(w) is str and w in self._classes), 0)


def _make_function(code: Any, names: dict[str, Any], *words: Any) -> Any:
    if names.get("__name__") == "__main__":
        names = vars(sys.modules["__main__"])
    return internals._make_function(code, names, *words)
