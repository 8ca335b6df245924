"""``python -m torchbearer_ddp doctor --script``: times a script on 1, 2, 4, ... ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from torchbearer_ddp.commands.examining import prediction
from torchbearer_ddp.commands.examining.prediction import Speed
from torchbearer_ddp.commands.examining.timed_run import PLAIN, Timed, measure
from torchbearer_ddp.commands.parser import GOOD
from torchbearer_ddp.group.join import usable_cores
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.script import check_script
from torchbearer_ddp.log import logger

#: Of which hosts a link's effect is predicted.
_HOSTS = (2, 4)
#: What a rank of several commands waits for the others: one may still time its single process.
_MEET_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that go with a script."""
    group = parser.add_argument_group("how fast a script is on 1, 2, 4, ... ranks")
    add = group.add_argument
    add("--script", nargs=argparse.REMAINDER, metavar="FILE ...", help=_SCRIPT)
    add("--module", action="store_true", help="--script names a module, as with python -m")
    add("--seconds", type=float, default=5.0, help="how long one process is timed (default: 5)")
    add("--limit", type=float, default=300.0, help="seconds for each start (default: 300)")
    add("--link", type=_link, help="predict for several hosts over a link of 1gbit, 110MB/s, ...")


_SCRIPT = "the script and its arguments, to the end of the line: its steps are timed"


def _link(text: str) -> float:
    try:
        return prediction.link_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def examine(plan: Plan, options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Times the script, and prints what follows on rank zero; ``given`` are the launch flags.

    Raises:
        LaunchError: If the script cannot be timed.
    """
    if not options.module:
        check_script(options.script[0])
    load, cores = os.getloadavg()[0], usable_cores()
    if load > cores:
        logger.warning(
            f"doctor: this host is busy ({load:.1f} processes want {cores} cores): the times are "
            "not those of an idle host. End other programs, and start the doctor again"
        )
    speeds, timed = _measure(plan, options, given)
    if plan.member.rank:
        return GOOD
    compressed = None
    if options.link and _is_one_host(plan):
        compressed = _predict(plan, options, speeds, timed)
    if options.json:
        print(json.dumps(prediction.plain(speeds, timed, compressed), indent=1))
    else:
        print(prediction.text(options.script[0], speeds, timed, compressed))
    sys.stdout.flush()
    return GOOD


def _predict(
    plan: Plan, options: argparse.Namespace, speeds: list[Speed], timed: Timed
) -> Speed | None:
    """Adds what several hosts would do; returns what the last would with half the bytes."""

    def own(wire: str) -> float:
        launch = {"nproc_per_node": 2, **_device(plan)}
        what = f"on 2 ranks as on two hosts ({wire})"
        return _time(options, what, launch, timed.steps, wire).moving

    chosen, link, plain = prediction.best(speeds), options.link, own(PLAIN)
    speeds += [prediction.over_link(chosen, timed, hosts, link, plain) for hosts in _HOSTS]
    hosts = prediction.limited(speeds).hosts
    if hosts == 1:
        return None
    return prediction.over_link(chosen, timed, hosts, link, own("bf16"), compress=True)


def _time(
    options: argparse.Namespace,
    what: str,
    launch: dict[str, Any],
    steps: int,
    wire: str | None = None,
) -> Timed:
    """Times the script once."""
    logger.info(f"doctor: timing {options.script[0]} {what}")
    limits = (steps, options.seconds, options.limit)
    return measure(options.script, options.module, launch, *limits, wire)


def _is_one_host(plan: Plan) -> bool:
    """True if this command starts all ranks; otherwise several hosts are timed as they are."""
    member = plan.member
    return plan.launcher == "spawn" and member.world_size == member.local_world_size


def _device(plan: Plan) -> dict[str, Any]:
    return {"device": plan.member.device} if plan.member.device == "cpu" else {}


def _measure(
    plan: Plan, options: argparse.Namespace, given: dict[str, Any]
) -> tuple[list[Speed], Timed]:
    """The speeds of one process and of more and more ranks, and the last run's times."""
    device = _device(plan)
    found = _time(options, "in one process", {"launcher": "inline", **device}, 0)
    speeds = [prediction.speed_of(1, found)]
    steps, world_size = found.steps, plan.member.world_size
    if _is_one_host(plan):
        for ranks in _sizes(world_size):
            launch = {"nproc_per_node": ranks, **device}
            found = _time(options, f"on {ranks} ranks", launch, steps)
            speeds.append(prediction.speed_of(ranks, found))
    elif world_size > 1:
        hosts = world_size // max(1, plan.member.local_world_size)
        launch = {"timeout": _MEET_SECONDS + options.limit, **given}
        found = _time(options, f"on {world_size} ranks", launch, steps)
        speeds.append(prediction.speed_of(world_size, found, hosts))
    return speeds, found


def _sizes(most: int) -> list[int]:
    """2, 4, 8, ... and the number itself."""
    powers = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
    return sorted({*powers, *([most] if most > 1 else [])})
