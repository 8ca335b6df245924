"""Memory runs out, helper processes die: the run ends and the error names the rank."""

import argparse
import multiprocessing
import os
import signal
import socket
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.programs import launch, short_trial, train_with_events
from torchbearer_ddp import ShardData, SyncGradients, WorkerError, data_parallel, run_distributed
from torchbearer_ddp.group import collectives

pytestmark = pytest.mark.concurrent

HOST = socket.gethostname()


def test_out_of_memory_names_the_rank():
    with pytest.raises(WorkerError, match="allocate memory") as caught:
        launch(train_with_events, [{"rank": 1, "step": 3, "do": "exhaust"}])
    assert str(caught.value).startswith(f"Rank 1 on {HOST} raised RuntimeError")
    assert caught.value.rank == 1


class Deadly(Dataset):
    """Ends the process that loads a certain sample, on rank one."""

    def __init__(self, how):
        self._how = how
        self._deadly = collectives.rank() == 1

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self._deadly and torch.utils.data.get_worker_info() and index > 6:
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(7)
        return torch.zeros(4), torch.zeros(2)


def fit(loader, *callbacks):
    trial = short_trial(torch.nn.Linear(4, 2), torch.nn.functional.mse_loss, *callbacks)
    return trial.with_train_generator(loader).run(1)


def load_with_workers(how):
    fit(DataLoader(Deadly(how), num_workers=1), *data_parallel())


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_loader_s_worker_dies(how):
    with pytest.raises(WorkerError, match=r"DataLoader worker \(pid.*\d+") as caught:
        launch(load_with_workers, how)
    assert str(caught.value).startswith(f"Rank 1 on {HOST} raised RuntimeError: DataLoader worker")


class Shorter(list):
    """A loader of the user's own, which promises more than it has."""

    def __len__(self):
        return 8


def train_on_own_batches():
    batches = [(torch.zeros(2, 4), torch.zeros(2, 2))] * (8 - 3 * collectives.rank())
    fit(Shorter(batches), *data_parallel(shard=False))


def test_a_loader_of_the_user_s_own_is_shorter_on_one_rank():
    with pytest.raises(WorkerError) as caught:
        launch(train_on_own_batches)
    assert str(caught.value).startswith(f"Rank 1 on {HOST} raised StopIteration")


def use_a_pool(seconds):
    for _ in range(100):  # a signal that arrives while the helper starts
        if not (helper := os.fork()):
            time.sleep(60)
        os.kill(helper, signal.SIGTERM)
        assert os.waitpid(helper, 0)[1] == signal.SIGTERM
    with multiprocessing.get_context("fork").Pool(2) as pool:  # which ends them with SIGTERM
        squares = pool.map(abs, [-2, 3])
    fit(DataLoader(Deadly("not")), SyncGradients(), ShardData())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
    return squares


def test_a_signal_to_a_helper_is_not_one_to_its_rank():
    nothing = argparse.Namespace()
    # The grace would be over before the rank is.
    found = run_distributed(use_a_pool, (2.0,), options=nothing, nproc_per_node=2, grace=1.0)
    assert found == [[2, 3], [2, 3]]
