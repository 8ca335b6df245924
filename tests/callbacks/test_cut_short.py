"""Code after a run can ask whether it was cut short, and by what; a slow rank is named."""

import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer.callbacks import on_step_training

from tests.log_lines import LogLines
from tests.programs import launch, short_trial
from torchbearer_ddp import CUT_SHORT, data_parallel, rank
from torchbearer_ddp.gradients import stragglers, timing


def trial_with(*callbacks, samples=40):
    model = torch.nn.Linear(3, 2)
    trial = short_trial(model, torch.nn.functional.mse_loss, *data_parallel(), *callbacks)
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 2))
    return trial.with_generators(DataLoader(data, 2), DataLoader(data, 2))


@on_step_training
def stop_on_rank_zero(state):
    if rank() == 0 and state[torchbearer.EPOCH] == 1:
        state[torchbearer.STOP_TRAINING] = True


def endings():
    """How a run that is stopped and one that is not have ended, after evaluations too."""
    stopped, whole = trial_with(stop_on_rank_zero), trial_with()
    found = []
    for trial in (stopped, whole):
        trial.run(3)
        found.append(trial.state[CUT_SHORT])
        trial.evaluate()
        found.append(trial.state[CUT_SHORT])
    return found


def test_a_callback_cuts_a_run_short(two_ranks):
    expected = ["callback", "callback", None, None]
    assert endings() == expected
    assert two_ranks.run(endings) == [expected, expected]


def test_the_launchers_trial_knows_it_too():
    trial = trial_with(stop_on_rank_zero)
    launch(trial.run, 3)
    assert trial.state[CUT_SHORT] == "callback"


class FedClock(timing.HostClock):
    """A clock on which rank 1 takes twice as long as rank 0, whatever the machine does."""

    def begin_exchange(self):
        super().begin_exchange()
        self._own = 0.01 * (1 + rank())
        return self._own


def slow_lines():
    """The lines of a short run, in which few steps are enough to judge."""
    with pytest.MonkeyPatch.context() as patch, LogLines() as lines:
        patch.setattr(stragglers, "_STEPS", 4)
        patch.setattr(stragglers, "_ROWS", 2)
        patch.setattr(timing, "HostClock", FedClock)
        trial_with(samples=44).run(1)
    return [line for line in lines if "as long as" in line or "longer than" in line]


def test_a_slow_rank_is_named_by_rank_zero(two_ranks):
    first, second = two_ranks.run(slow_lines)
    assert second == []
    [line] = first
    assert line.startswith("rank 1 on ")
    assert " takes 2.0 times as long as the others since step " in line
    assert "(20 ms against 10 ms from one exchange to the next): all ranks wait for it" in line
