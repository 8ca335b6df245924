"""What a script sets up at its module level, and what of it a worker sees."""

import enum
import functools
import logging
import pickle
import sys
import warnings
from pathlib import Path
from typing import ClassVar

import torch
import torchbearer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import default_collate_fn_map
from torchbearer import metrics

from torchbearer_ddp import run_distributed

torch.set_default_dtype(torch.float64)
logging.basicConfig(format="%(levelname)s says %(message)s", level=logging.INFO)
warnings.simplefilter("error", DeprecationWarning)


@metrics.default_for_key("half")
@metrics.mean
class Half(metrics.Metric):
    def __init__(self):
        super().__init__("half")

    def process(self, state):
        return torch.tensor(0.5)


class Kind(enum.Enum):
    A = 1


class Config:
    rate = 0.1


class Sample:
    def __init__(self, value):
        self.value = value


def collate(batch, *, collate_fn_map=None):
    return torch.tensor([each.value for each in batch])


default_collate_fn_map[Sample] = collate


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Sample(float(index))


class Registered:
    names: ClassVar = []

    def __init_subclass__(cls):
        if cls.__name__ in Registered.names:
            raise ValueError(f"{cls.__name__} is there twice")
        Registered.names.append(cls.__name__)


class Plugin(Registered):
    pass


def work(method, option):
    with warnings.catch_warnings(record=False):
        try:
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            strict = False
        except DeprecationWarning:
            strict = True
    loader = DataLoader(Samples(), batch_size=2, num_workers=1, multiprocessing_context=method)
    trial = torchbearer.Trial(None, metrics=["half"])
    return {
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "logging": logging.getLogger().level,
        "warnings": strict,
        "metric": type(trial.state[torchbearer.METRIC_LIST]).__name__,
        "loaded": [batch.tolist() for batch in loader],
        "pickled": pickle.loads(pickle.dumps(Kind.A)) is Kind.A,
        "plugins": [*Registered.names, Plugin.__name__],
        "config": (Config.rate, option),
        "folder": Path(sys.path[0]).name,
    }


class Worker:
    def __call__(self, method):
        return work(method, "object")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # not at module level, but it changes results
    Config.rate = 0.5
    name, method = sys.argv[1], sys.argv[2]
    workers = {"partial": functools.partial(work, option="partial"), "object": Worker()}
    run = functools.partial(workers[name], method)
    for each in run_distributed(run):
        print(each)
