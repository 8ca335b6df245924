"""Steps in step until rank ``--on`` misbehaves as the first argument says."""

import argparse
import os
import signal
import sys
import time

import torch

from torchbearer_ddp import add_arguments, run_distributed
from torchbearer_ddp.group import collectives, membership, stop_request

parser = add_arguments(argparse.ArgumentParser())
parser.add_argument("event")
parser.add_argument("--on", type=int, default=1)
options = parser.parse_args()


def misbehave(event):
    if event == "raise":
        raise ValueError("a bad sample")
    if event == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "leave":
        sys.exit(0)
    if event == "return":
        return (number for number in range(3))
    raise AssertionError(event)


def say(word):
    """One write, so that the lines of two ranks do not mix."""
    os.write(1, f"rank {collectives.rank()} {word}\n".encode())


def step(number):
    stop = bool(options.event == "polite" and stop_request.requested())
    total = torch.tensor([float(stop)])
    collectives.all_reduce([total], f"step {number}")
    return total.item() > 0


def train():
    step(0)
    if group := membership.current():
        group.past_first_step = (
            True  # as after the first gradients: from here on the plain timeout holds
        )
    say(f"pid {os.getpid()}")
    for number in range(1, 60_000):
        mine = number == 5 and collectives.rank() == options.on
        if mine and options.event not in ("none", "polite", "stubborn"):
            return misbehave(options.event)
        if number == 5 and options.event in ("return", "leave"):
            return "done"
        if options.event == "stubborn":
            stop_request.requested()  # and takes no notice
        if step(number):
            say("saved")
            return "stopped"
        time.sleep(0.001)


print(run_distributed(train, options=options))
