"""What a rank does: join the group, run the worker, leave; and tell the launcher how it went."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from torchbearer_ddp import process_group, signals, waiting
from torchbearer_ddp.arguments import Plan
from torchbearer_ddp.errors import DistributedError, LaunchError, WorkerError

_running = threading.local()


def inside() -> bool:
    """True while this thread runs a worker."""
    return getattr(_running, "rank", None) is not None


def run_rank(
    plan: Plan, index: int, worker_fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Runs the worker in this process, as the ``index``-th rank of the plan.

    Args:
        plan: The plan this process belongs to.
        index: Which of the plan's ranks this process is.
        worker_fn: The user's function.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    member = plan.member(index)
    extra = (signal.SIGUSR2,) if "SLURM_JOB_ID" in os.environ else ()
    _running.rank = member.rank
    try:
        with signals.handled(plan.grace, *extra):
            try:
                if plan.world_size == 1:
                    process_group.stay_alone(member)
                else:
                    serve = plan.serve and plan.launcher != "spawn"
                    process_group.join(
                        member, plan.host, plan.port, serve=serve, prefix=plan.prefix
                    )
                result = worker_fn(*args, **kwargs)
            except BaseException as error:
                # Without destroy_process_group, which could hang and hide the cause.
                group = process_group.current()
                if group is not None:
                    waiting.report_failure(group, error)
                process_group.abandon()
                raise
            process_group.leave()
            return result
    finally:
        _running.rank = None


def main(index: int, plan_fields: dict[str, Any], payload: bytes, reports: int) -> None:
    """Runs a started rank to its end, which it reports to the launcher.

    Args:
        index: Which of the plan's ranks this process is.
        plan_fields: The plan, as plain data.
        payload: The pickled worker, its arguments and keyword arguments.
        reports: The descriptor to write the report to.
    """
    plan = Plan(**plan_fields)
    try:
        worker_fn, args, kwargs = cloudpickle.loads(payload)
        _share_names(worker_fn)
        result = run_rank(plan, index, worker_fn, args, kwargs)
        body = _pickled(result, plan.member(index).rank)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            body = cloudpickle.dumps(None)  # sys.exit(0): an early end, not a failure
        else:
            report = _report_of(error)
            _send(reports, report)
            # Exit handlers still run, but not the destructors of a group with pending messages.
            exit_now(report["exitcode"])
    signum = signals.received()
    _send(reports, {"kind": "result", "signal": signum}, body)
    sys.exit(128 + signum if signum else 0)


def exit_now(code: int) -> None:
    """Ends this process with certainty: a group with pending messages can hang a normal exit."""
    import atexit

    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


def _share_names(worker_fn: Callable[..., Any]) -> None:
    """Puts what came with the worker into ``__main__``, where pickle looks for it by name."""
    names = getattr(worker_fn, "__globals__", {})
    if getattr(worker_fn, "__module__", None) == "__main__":
        main_names = vars(sys.modules["__main__"])
        main_names.update({k: v for k, v in names.items() if not k.startswith("__")})


def _pickled(result: Any, rank: int) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise WorkerError(
            f"Rank {rank} returned a {kind}, which cannot be sent to the launcher ({error}). "
            "Return plain data, such as numbers, lists or tensors.",
            rank=rank,
        ) from error


def _report_of(error: BaseException) -> dict[str, Any]:
    """What the launcher needs to know of a failure, as plain data."""
    signum = signals.received()
    exitcode, what = 1, f"raised {''.join(traceback.format_exception_only(error)).strip()}"
    if signum and isinstance(error, KeyboardInterrupt | SystemExit):
        exitcode, what = 128 + signum, f"was told to stop ({signal.Signals(signum).name})"
    elif isinstance(error, SystemExit):
        exitcode = error.code if isinstance(error.code, int) and 0 < error.code < 256 else 1
        what = f"called sys.exit({error.code!r})"
    complete = isinstance(error, DistributedError) and (
        error.secondary or isinstance(error, LaunchError)
    )
    return {
        "kind": "error",
        "type": type(error).__name__,
        "host": socket.gethostname(),
        "what": what,
        "message": str(error) if complete else "",
        "traceback": "".join(traceback.format_exception(error)),
        "exitcode": exitcode,
        "signal": signum if exitcode == 128 + (signum or 0) else None,
        "secondary": bool(getattr(error, "secondary", False)),
        "cause": getattr(error, "rank", None),
        "cause_host": getattr(error, "host", None),
    }


def _send(reports: int, head: dict[str, Any], body: bytes = b"") -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(reports, "wb") as stream:
        stream.write(json.dumps(head).encode() + b"\n" + body)
