"""A backend in the place of NCCL whose communicator cannot be made, or not in time.

Like NCCL it makes its communicator at the first collective, in the thread that starts it. Importing
this module registers the backend.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

NAME = "failing_stand_in"
#: What NCCL writes where the hosts cannot reach each other.
ERROR = (
    "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.29.3\nncclSystemError: System call (e.g. socket, malloc) failed.\n"
    "Last error:\nsocketStartConnect: Connect to 10.0.0.9<4711> failed: Connection refused"
)


@dataclass
class Behaviour:
    """How the backend of this process behaves, and what it has seen.

    Attributes:
        problem: ``raise``, ``hang``, or nothing.
        made: For each communicator whether it was made outside of the main thread.
        environment: The environment when the first group was made.
        device_error: What a wait raises after the communicator was made.
    """

    problem: str = ""
    made: tuple[bool, ...] = ()
    environment: dict[str, str] | None = None
    device_error: str = ""


behaviour = Behaviour()


class _Work:
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        if behaviour.device_error:
            raise torch.AcceleratorError(behaviour.device_error)
        return True


class FailingBackend(dist.ProcessGroup):
    """The process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._is_made = False
        behaviour.environment = behaviour.environment or dict(os.environ)

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        pass

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        if not self._is_made:
            is_main = threading.current_thread() is threading.main_thread()
            behaviour.made += (not is_main,)
            if behaviour.problem == "raise":
                raise dist.DistBackendError(ERROR)
            while behaviour.problem == "hang":
                time.sleep(0.1)
            self._is_made = True
        return _Work()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self.allreduce(tensors)


dist.Backend.register_backend(NAME, FailingBackend, devices=["cpu"])
