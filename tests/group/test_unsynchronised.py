"""A step on gradients that nothing averages is named; every step that is meant is not."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchbearer import Trial
from torchbearer.callbacks import Callback, on_backward

from tests.log_lines import LogLines
from tests.processes import run_python
from tests.ranks import RankPool
from torchbearer_ddp import RankZeroOnly, data_parallel
from torchbearer_ddp.group import collectives, membership, unsynchronised

STEPS = 3


@pytest.fixture(scope="module")
def two_ranks():
    with RankPool(2) as pool:
        yield pool


def make(*callbacks, model=None):
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trial = Trial(model, optimizer, nn.functional.mse_loss, callbacks=[*callbacks], verbose=0)
    x = torch.randn(4 * STEPS, 3)
    return trial.with_train_data(x, torch.randn(4 * STEPS, 2), batch_size=4, num_workers=0)


def lines_of(work):
    """What a program warns of, on each rank, in a group that it has just joined."""
    unsynchronised.watch(afresh=True)
    with LogLines(logging.WARNING) as found:
        work()
    return found


def forgotten():
    make().run(1)


def with_other_callbacks():
    make(RankZeroOnly(Callback())).run(1)


def after_a_run_that_averages():
    make(*data_parallel()).run(1)
    make().run(1)


def after_a_barrier():
    dist.barrier()
    make().run(1)


def after_our_barrier():
    collectives.barrier()
    make().run(1)


WARNED = [
    forgotten,
    with_other_callbacks,
    after_a_run_that_averages,
    after_a_barrier,
    after_our_barrier,
]


@pytest.mark.parametrize("work", WARNED, ids=lambda work: work.__name__)
def test_a_step_that_nothing_averages_is_named_once(two_ranks, work):
    first, second = two_ranks.run(lines_of, (work,))
    assert second == []
    [line] = first
    assert "SGD takes a step on the gradients of one rank. 2 ranks run this script" in line
    assert "Add *data_parallel() to the callbacks" in line
    source = work.__code__
    assert line.startswith("tests/group/test_unsynchronised.py:")
    number = int(line.split(":")[1])
    assert source.co_firstlineno < number <= source.co_firstlineno + 2


def averaged():
    make(*data_parallel()).run(1)


def nested():
    """The inner Trial ends first."""

    class Inner(Callback):
        def on_end_epoch(self, state):
            make(*data_parallel()).run(1)

    trial = make(Inner(), *data_parallel())
    trial.run(2)


def wrapped_in_ddp():
    make(model=DistributedDataParallel(nn.Linear(3, 2))).run(1)


def by_hand():
    @on_backward
    def average(state):
        for group in state["optimizer"].param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)

    make(average).run(1)


def two_optimizers_of_one_backward():
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizers = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    for _ in range(STEPS):
        model(torch.randn(4, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def probe_on_rank_zero():
    class Probe(Callback):
        def on_start(self, state):
            probe = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(probe.parameters(), 0.1)
            probe(torch.randn(4, 3)).sum().backward()
            optimizer.step()

    RankZeroOnly(Probe()).on_start({})


def nothing_is_trained():
    trial = Trial(nn.Linear(3, 2), callbacks=[], verbose=0).for_steps(2)
    trial.with_train_data(torch.randn(4, 3), torch.randn(4, 2), num_workers=0).run(1)


MEANT = [
    averaged,
    nested,
    wrapped_in_ddp,
    by_hand,
    two_optimizers_of_one_backward,
    probe_on_rank_zero,
    nothing_is_trained,
]


@pytest.mark.parametrize("work", MEANT, ids=lambda work: work.__name__)
def test_a_step_that_is_meant_is_not_named(two_ranks, work):
    assert two_ranks.run(lines_of, (work,)) == [[], []]


def test_one_process_is_not_warned():
    assert membership.current() is None
    assert lines_of(forgotten) == []


PROGRAM = """
import torch
from torch import nn
from torchbearer import Trial
from torchbearer_ddp import data_parallel

model = nn.Linear(3, 2)
trial = Trial(model, torch.optim.Adam(model.parameters()), nn.functional.mse_loss)
trial.with_train_data(torch.randn(4, 3), torch.randn(4, 2), num_workers=0).run(1, verbose=0)
"""


@pytest.mark.concurrent
def test_a_process_of_torchrun_that_joins_no_group_is_warned(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}
    result = run_python("train.py", folder=tmp_path, **torchrun)
    assert result.code() == 0, result.text()
    warned = "torchbearer_ddp: train.py:9: Adam takes a step on the gradients of one rank. 2 ranks"
    assert warned in "".join(result.errors)
