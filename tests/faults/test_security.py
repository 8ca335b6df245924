"""What listens, what is unpickled, and what a failing rank can do to its launcher."""

import ast
import os
import pickle
from pathlib import Path

import cloudpickle
import pytest
import torch

import torchbearer_ddp
from tests import proc
from tests.processes import Program
from tests.programs import launch, train_with_events
from tests.ranks import run_ranks
from torchbearer_ddp import WorkerError
from torchbearer_ddp.group import collectives, wire

PACKAGE = Path(torchbearer_ddp.__file__).parent
#: Loopback as the kernel writes it: IPv4, IPv6, and IPv4 within IPv6.
LOOPBACK = ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F")


def test_a_local_run_listens_on_loopback_only():
    flags = ("--nproc-per-node", "2", "--steps", "10000", "--pause", "0.05")
    with Program("train", *flags) as program:
        ranks = program.pids(2)
        for pid in (program.process.pid, *ranks):
            addresses = proc.listening_addresses(pid)
            assert addresses, "nothing was found, so nothing was tested"
            assert set(addresses) <= set(LOOPBACK)


#: The modules that may pickle: a worker that is sent to a process which the same user has started,
#: and its result. A checkpoint's file only names the error that a bad file raises.
MAY_PICKLE = {
    "launch/pickling.py": {"cloudpickle"},
    "launch/supervisor.py": {"cloudpickle"},
    "launch/worker.py": {"cloudpickle", "pickle"},
    "checkpoints/file.py": {"pickle"},
}
PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "copyreg", "joblib"}


def test_only_the_launching_side_can_pickle():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            for name in PICKLERS & set(names):
                found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
        # torch's collectives of objects pickle, and so does its RPC.
        for name in ("_object(", "_object_list(", "distributed.rpc", "import multiprocessing"):
            assert name not in text, f"{path.name}: {name}"
    assert found == MAY_PICKLE
    assert "pickle.load" not in (PACKAGE / "checkpoints" / "file.py").read_text()


def forbidden(*args, **kwargs):
    raise AssertionError("something was pickled or unpickled")


def train_without_pickle():
    with pytest.MonkeyPatch.context() as patch:
        for module in (pickle, cloudpickle, torch):
            for name in ("load", "loads", "dump", "dumps", "save", "Pickler", "Unpickler"):
                patch.setattr(module, name, forbidden, raising=False)
        value = {"text": "a", "list": [1, 2.5, None], "bytes": b"\x80", "tensor": torch.ones(2)}
        everyone = collectives.all_gather(value, "plain data")
        assert everyone[1]["list"] == collectives.broadcast(value, "plain data")["list"]
        steps, _ = train_with_events([])
    return steps


def test_ranks_train_where_nothing_can_be_pickled():
    assert run_ranks(train_without_pickle, 2) == [10, 10]


class Bomb(Exception):
    """An error that runs code where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("crater",)


def explode():
    if collectives.rank() == 1:
        raise Bomb("tick")
    collectives.barrier()


def test_a_rank_s_error_reaches_the_launcher_as_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"Rank 1 on .* raised .*Bomb: tick"):
        launch(explode)
    assert not (tmp_path / "crater").exists()


def test_a_value_that_is_not_plain_is_refused_before_it_is_sent():
    with pytest.raises(TypeError, match=r"Bomb, which cannot be sent to other ranks"):
        wire.encode([Bomb()])
