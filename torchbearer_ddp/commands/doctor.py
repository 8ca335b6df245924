"""``python -m torchbearer_ddp doctor``: examines hosts and links before a run needs them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchbearer_ddp import log
from torchbearer_ddp.commands.children import stopped_by_sigterm
from torchbearer_ddp.commands.examining import (
    examination,
    host_checks,
    links,
    meeting,
    scaling,
    verdict,
)
from torchbearer_ddp.commands.examining.examination import Report, examine, work_of
from torchbearer_ddp.commands.examining.finding import Finding
from torchbearer_ddp.commands.parser import FOUND, GOOD, command_parser
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import failures, membership, network, rendezvous
from torchbearer_ddp.group.bounded import in_background
from torchbearer_ddp.group.join import usable_cores
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.planner import DEFAULT_PORT, make_plan
from torchbearer_ddp.launch.settings import PLACEMENT_FLAGS, Settings

_DESCRIPTION = """\
Ranks meet as in a run, then measure what a run needs: every pair's round trip and bandwidth, shared
memory, ports, clocks, versions, names, the interface that gloo uses, the sum of gradients, and with
--folder the disk. Rank zero prints a report with a verdict and what to do about each finding. It
ends in bounded time, whatever is broken.

Ranks are started here (--nproc-per-node, the default), or each by its own command with --rank and
--world-size, or by torchrun or srun.

With --script a few steps of a script of yours are timed instead, in one process and on 2, 4, ...
ranks: how much faster it is, how many ranks to use, and what limits beyond that. Its checkpoints
and logs are neither read nor written.
"""
_EXAMPLE = """\
--nproc-per-node 4
--world-size 2 --rank 0 --host 10.0.0.1     (and --rank 1 on the other host)
--folder runs/a
--nproc-per-node 4 --link 1gbit --script train.py --epochs 3"""
_CODES = {
    GOOD: "no problem was found (there may be things to know)",
    FOUND: "a problem was found; the report says which, and what to do",
}
_TIMEOUT = 30.0
#: Without an answer of the store for so long, rank zero is taken for lost.
_SILENT_SECONDS = 20.0
#: What starting Python and torch may take.
_START_SECONDS = 60.0
_TICK_SECONDS = 0.1
_MOST_DEFAULT_RANKS = 4
#: Set for ranks that this command has started.
_STARTED = "TORCHBEARER_DDP_DOCTOR"


def main(arguments: list[str]) -> None:
    """Examines this host, or all hosts of a run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan = _plan(options)
    except (ValueError, LaunchError) as error:
        parser.error(str(error))
    if options.script or plan.launcher == "spawn":
        with stopped_by_sigterm():
            if options.script:
                raise SystemExit(scaling.examine(plan, options, _given(options)))
            raise SystemExit(_start_ranks(plan, options))
    membership.settle()
    log.set_rank(plan.member.rank)
    code = _be_a_rank(plan, options)
    # A group that could not be formed, or a store that does not answer, can hang an exit.
    failures.exit_now(code)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", _DESCRIPTION, _EXAMPLE, _CODES)
    flags: dict[str, tuple[Any, str]] = {
        "--nproc-per-node": (int, "ranks to start on this host (default: GPUs, or up to 4 cores)"),
        "--nnodes": (int, "number of hosts, each with its own --node-rank"),
        "--node-rank": (int, "the number of this host, from 0"),
        "--world-size": (int, "number of ranks, each started with its own --rank"),
        "--rank": (int, "the rank of this process, from 0"),
        "--host": (str, "address of rank 0's host, the same on every host"),
        "--port": (int, f"port on that host (default: {DEFAULT_PORT})"),
        "--device": (str, "cpu, cuda or cuda:N (default: cuda if there is one)"),
        "--timeout": (float, f"seconds to wait for other ranks (default: {_TIMEOUT:g})"),
    }
    for name, (kind, text) in flags.items():
        parser.add_argument(name, type=kind, help=text)
    parser.add_argument("--folder", type=Path, help="also measure the disk of this folder")
    parser.add_argument("--json", action="store_true", help="the report as JSON, for programs")
    scaling.add_arguments(parser)
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    """The ranks to examine, found as run_distributed finds them."""
    settings = Settings(_given(options))
    settings.setdefault("timeout", _TIMEOUT)
    gpus = torch.cuda.device_count()
    plan = make_plan(settings, os.environ, gpus)
    if plan.launcher == "inline":
        settings["nproc_per_node"] = gpus or max(2, min(usable_cores(), _MOST_DEFAULT_RANKS))
        plan = make_plan(settings, os.environ, gpus)
    if os.environ.get(_STARTED):
        plan = dataclasses.replace(plan, serve=False)
    return plan


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The launch flags that were given."""
    names = (*PLACEMENT_FLAGS, "host", "port", "device", "timeout")
    found = {name: getattr(options, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _start_ranks(plan: Plan, options: argparse.Namespace) -> int:
    """Starts the ranks of this host, and ends them if they do not end by themselves."""
    member, ports = plan.member, plan.ports
    store = None
    try:
        if plan.serve:
            store = rendezvous.serve_store(plan.host, ports[0], member.timeout)
            ports = (store.port,)
    except LaunchError as error:
        return _report_no_meeting(plan, error, as_json=options.json)
    words = [sys.executable, "-m", "torchbearer_ddp", "doctor", "--host", plan.host]
    words += ["--port", str(ports[0]), "--world-size", str(member.world_size)]
    words += ["--timeout", str(member.timeout), "--device", member.device]
    words += ["--folder", str(options.folder)] if options.folder else []
    words += ["--json"] if options.json else []
    environment = {**os.environ, _STARTED: "1"}
    started = [
        subprocess.Popen([*words, "--rank", str(rank)], env=environment)
        for rank in range(member.rank, member.rank + member.local_world_size)
    ]
    deadline = time.monotonic() + _START_SECONDS + _longest(plan)
    try:
        codes = [_code(process, deadline) for process in started]
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        for process in started:
            process.kill()
    return FOUND if any(codes) else GOOD


def _code(process: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return FOUND


def _longest(plan: Plan) -> float:
    """The longest that a rank takes, from its first attempt to meet the others."""
    return 2 * plan.member.timeout + examination.LONGEST_SECONDS


def _be_a_rank(plan: Plan, options: argparse.Namespace) -> int:
    """Takes part as one rank; rank zero prints the report."""
    if os.environ.get(_STARTED):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    deadline = time.monotonic() + _longest(plan)
    found = host_checks.check(plan.host)
    address, others = host_checks.addresses(found["gloo"], plan.host)
    listener = links.Listener(network.loopback(plan.host) or "")
    found["place"] = {
        **{"address": address, "others": others},
        **{"port": listener.port, "token": listener.token},
    }
    found["world size"] = plan.member.world_size
    rank = plan.member.rank
    try:
        store = meeting.meet(plan)
        meeting.register(store, rank, found)
    except LaunchError as error:
        return _report_no_meeting(plan, error, as_json=options.json)
    pause = meeting.pause_of(plan.member.world_size)
    own = rendezvous.own_connection(store)
    answering = meeting.Answering(own, rank, work_of(plan), pause)
    answers = in_background(answering.run)
    if rank:
        return _wait_for_the_end(answers, answering, deadline)
    return _examine(plan, options, store, deadline)


def _wait_for_the_end(answers: Any, answering: meeting.Answering, deadline: float) -> int:
    """A rank's part: done when rank zero says so, or is silent for too long."""
    while not answers.done():
        silent = time.monotonic() - answering.contact > _SILENT_SECONDS + links.LONGEST_SECONDS
        if silent or time.monotonic() > deadline:
            break
        time.sleep(_TICK_SECONDS)
    if answers.done() and answers.exception() is None:
        return int(answers.result())
    log.logger.error(
        "rank 0 does not answer any more: it has ended, its host is frozen, or the link to it was "
        "cut. See its output."
    )
    return FOUND


def _examine(plan: Plan, options: argparse.Namespace, store: Any, deadline: float) -> int:
    """Rank zero's part: measures, prints, and tells the others how it ended."""
    member = plan.member
    report = Report(member.world_size, member.timeout, plan.host)
    asking = meeting.Asking(store, member.world_size, deadline - links.LONGEST_SECONDS)
    done = in_background(lambda: examine(asking, report, options.folder))
    while not done.done() and time.monotonic() < deadline:
        time.sleep(_TICK_SECONDS)
    findings = verdict.diagnose(report)
    if done.done() and (error := done.exception()):
        remedy = "Start the doctor again; if it happens again, see python -m torchbearer_ddp env."
        findings.insert(0, Finding(True, f"The examination broke off: {error}", remedy))
    code = _print(report, findings, as_json=options.json)
    asking.end(code)
    return code


def _print(report: Report, findings: list[Finding], *, as_json: bool) -> int:
    if as_json:
        print(_as_json(report.plain(), findings))
    else:
        print(verdict.text(report, findings))
    sys.stdout.flush()
    return FOUND if any(finding.problem for finding in findings) else GOOD


def _as_json(known: dict[str, Any], findings: list[Finding]) -> str:
    every = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({**known, "findings": every}, indent=1, default=str)


def _report_no_meeting(plan: Plan, error: LaunchError, *, as_json: bool) -> int:
    """Prints why this rank has not met the others."""
    host, port = plan.host, plan.ports[0]
    if plan.serve:
        held = isinstance(error.__cause__, OSError)
        found = f"Rank 0 cannot open the rendezvous: {error}"
        if held:
            found = f"Port {port} on {host} is held by {host_checks.holder(port)}."
        remedy = f"End it, or give every rank another --port than {port}."
    else:
        found = f"Rank {plan.member.rank} did not meet rank 0 within {plan.member.timeout:g} s. "
        why, remedy = host_checks.why_no_rendezvous(host, port)
        found += why
    findings = [Finding(True, found, remedy)]
    known = {"world_size": plan.member.world_size, "host": host}
    print(
        _as_json(known, findings) if as_json else "\n".join(verdict.verdict(findings)), flush=True
    )
    return FOUND
