"""What a rank does: join the group, run the worker, leave; and tell the launcher how it went."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import cloudpickle

from torchbearer_ddp import debug, process_group, signals, waiting
from torchbearer_ddp.arguments import Plan
from torchbearer_ddp.errors import DistributedError, LaunchError, WorkerError

_running = threading.local()
#: How long exit handlers and buffers of a failed rank may take.
_EXIT_SECONDS = 2.0


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
        telling = debug.reporting(member.rank) if plan.debug else contextlib.nullcontext()
        with signals.handled(plan.grace, *extra), telling:
            try:
                if plan.world_size == 1:
                    process_group.stay_alone(member)
                else:
                    serve = plan.serve and plan.launcher != "spawn"
                    process_group.join(
                        member,
                        plan.host,
                        plan.port,
                        *plan.spare_ports,
                        serve=serve,
                        prefix=plan.prefix,
                    )
                result = worker_fn(*args, **kwargs)
            except BaseException as error:
                if isinstance(error, SystemExit) and not error.code:
                    process_group.leave()  # sys.exit(0): an early end, not a failure
                    raise
                # Without destroy_process_group, which could hang and hide the cause.
                if group := process_group.current():
                    waiting.report_failure(group, error, _head(error), _trace(error))
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
        share_names(worker_fn)
        result = run_rank(plan, index, worker_fn, args, kwargs)
        body = _pickled(result, plan.member(index).rank)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            body = cloudpickle.dumps(None)
        else:
            report = report_of(error)
            _send(reports, report)
            # Exit handlers still run, but not the destructors of a group with pending messages.
            exit_now(report["exitcode"])
    signum = signals.received()
    _send(reports, {"kind": "result", "signal": signum}, body)
    sys.exit(128 + signum if signum else 0)


def exit_now(code: int) -> NoReturn:
    """Ends this process with certainty: a group with pending messages can hang a normal exit.

    Args:
        code: The exit code.
    """
    late = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    late.daemon = True
    late.start()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


def share_names(worker_fn: Callable[..., Any]) -> None:
    """Puts what came with the worker into ``__main__``, where pickle looks for it by name.

    Args:
        worker_fn: The user's function, as it was unpickled.
    """
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


def report_of(error: BaseException) -> dict[str, Any]:
    """What the launcher needs to know of a failure, as plain data.

    Args:
        error: What the rank raised.
    """
    signum = _told_to_stop(error)
    code = error.code if isinstance(error, SystemExit) else None
    return {
        "kind": "error",
        "type": type(error).__name__,
        "host": socket.gethostname(),
        # These say all there is to say; where in our code they were raised does not help.
        "message": str(error) if isinstance(error, LaunchError | WorkerError) else "",
        "what": _what(error),
        "exitcode": signum + 128 if signum else code if code in range(1, 256) else 1,
        "signal": signum,
        "secondary": bool(getattr(error, "secondary", False)),
        "cause": getattr(error, "rank", None),
        "cause_host": getattr(error, "host", None),
    }


def headline(error: BaseException, rank: int) -> str:
    """What happened to a rank, in the words to begin with.

    Args:
        error: What it raised.
        rank: The rank.
    """
    if isinstance(error, DistributedError):
        return str(error)
    return f"Rank {rank} on {socket.gethostname()} {_head(error)}"


def explain(error: BaseException, rank: int) -> str:
    """What happened to a rank, with its traceback if that says more.

    Args:
        error: What it raised.
        rank: The rank.
    """
    report = report_of(error)
    return str(report["message"] or f"Rank {rank} on {report['host']} {report['what']}")


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The frames from the user's function on: the launch layer's own help nobody.

    Args:
        trace: The frames of an error that a worker raised.
    """
    frames = trace
    while frames and frames.tb_frame.f_code is not run_rank.__code__:
        frames = frames.tb_next
    return (frames and frames.tb_next) or trace


def _what(error: BaseException) -> str:
    """What happened to this rank, in words that follow its name, and its traceback."""
    return "\n\n".join(filter(None, (_head(error), _trace(error))))


def _head(error: BaseException) -> str:
    """What happened to this rank, in words that follow its name."""
    if signum := _told_to_stop(error):
        return f"was told to stop ({signal.Signals(signum).name})."
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {''.join(traceback.format_exception_only(error)).strip()}"


def _trace(error: BaseException) -> str:
    """The traceback, from the user's function on."""
    if _told_to_stop(error):
        return ""
    frames = users_part(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _told_to_stop(error: BaseException) -> int | None:
    return signals.received() if isinstance(error, KeyboardInterrupt | SystemExit) else None


def _send(reports: int, head: dict[str, Any], body: bytes = b"") -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(reports, "wb") as stream:
        stream.write(json.dumps(head).encode() + b"\n" + body)
