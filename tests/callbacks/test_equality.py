"""N ranks end where one process ends: same parameters, same metrics, same predictions."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

from tests.gradients.transport_cases import option
from tests.ranks import run_ranks
from torchbearer_ddp.callbacks.parallel import data_parallel
from torchbearer_ddp.group import collectives

STEPS = 50
GLOBAL_BATCH = 16


def train_and_predict(optimizer_name, transport="auto"):
    torch.manual_seed(0)
    data = torch.randn(STEPS * GLOBAL_BATCH, 10), torch.randint(0, 4, (STEPS * GLOBAL_BATCH,))
    evaluated = TensorDataset(torch.randn(103, 10), torch.randint(0, 4, (103,)))
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[optimizer_name](model.parameters())
    trial = Trial(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=data_parallel(transport=transport),
        verbose=0,
    )
    batch = GLOBAL_BATCH // collectives.world_size()
    trial.with_generators(
        DataLoader(TensorDataset(*data), batch),
        DataLoader(evaluated, 8),
        DataLoader(evaluated, 8),
    )
    history = trial.run(1)
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "history": history,
        "evaluated": trial.evaluate(verbose=0),
        "predicted": trial.predict(verbose=0),
    }


@pytest.mark.parametrize("optimizer_name", ["momentum", "adam"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_end_where_one_process_ends(world_size, optimizer_name):
    alone = train_and_predict(optimizer_name)
    for result in run_ranks(train_and_predict, world_size, (optimizer_name,)):
        for mine, one in zip(result["parameters"], alone["parameters"], strict=True):
            assert (mine - one).abs().max() <= 1e-6
        for name in ("acc", "loss", "val_acc", "val_loss"):
            assert result["history"][0][name] == pytest.approx(alone["history"][0][name], abs=1e-6)
        for name, value in alone["evaluated"].items():
            assert result["evaluated"][name] == pytest.approx(value, abs=2e-6), name
        assert torch.allclose(result["predicted"], alone["predicted"], atol=1e-5)
        assert result["predicted"].shape == (103, 4)


def test_every_transport_ends_there(transport_ranks):
    transport, pool = transport_ranks
    alone = train_and_predict("momentum")
    for result in pool.run(train_and_predict, ("momentum", option(transport))):
        for mine, one in zip(result["parameters"], alone["parameters"], strict=True):
            assert (mine - one).abs().max() <= 1e-6
