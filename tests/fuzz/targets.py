"""Everything that reads what it did not write itself, as functions of any bytes.

Each returns, or raises what is not an error of this package: that is then a finding. The tests here
call them with hypothesis, ``make fuzz`` with atheris.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torchbearer import Trial

from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checked import Unexpected
from torchbearer_ddp.checkpoints import contents, file, form
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.errors import CheckpointError, DesyncError, LaunchError
from torchbearer_ddp.group import (
    board,
    debugging,
    device_backend,
    posts,
    rendezvous,
    roll_call,
    wire,
)
from torchbearer_ddp.launch.flags import merge, read_flags
from torchbearer_ddp.launch.node_lists import Counts, expand_hosts
from torchbearer_ddp.launch.planner import make_plan
from torchbearer_ddp.slurm import job

warnings.filterwarnings("ignore", module="torch")

MESSAGE = bytes(
    wire.encode(
        {
            "a": [1, 2.5, None, True, float("inf"), -(2**70), 10**3000],
            "t": torch.randn(3, 4),
            "u": torch.randn(2, 3).t(),
            "s": torch.eye(3).to_sparse(),
            "c": torch.eye(3).to_sparse_csr(),
            "b": b"abc",
            "n": torch.arange(3).numpy(),
            "x": {1, "b"},
            3: (torch.tensor([True, False]), ()),
        }
    ).tolist()
)
PIECES = (b"[", b"]", b"{", b"null", b'"', b"9", b"-", b"1e999", b",", b'"tensor"', b"\xff", b"\0")


def edited(base: bytes, edits: bytes) -> bytes:
    """The base, changed as the bytes say: flipped bits, pieces left out, put in and moved."""
    changed = bytearray(base)
    for at in range(0, len(edits) - 3, 4):
        kind, high, low, value = edits[at : at + 4]
        place = (high * 256 + low) * max(1, len(changed)) // 65536
        if kind % 4 == 0 and changed:
            changed[place] ^= 1 << value % 8
        elif kind % 4 == 1:
            del changed[place : place + 1 + value % 16]
        elif kind % 4 == 2:
            changed[place:place] = PIECES[value % len(PIECES)]
        else:
            other = value * len(changed) // 256
            changed[place : place + 8] = changed[other : other + 8]
    return bytes(changed)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)


def message(data: bytes) -> None:
    """What another rank sends: any bytes, and a good message that was changed."""
    for each in (data, edited(MESSAGE, data), len(data).to_bytes(8, "little") + data):
        with contextlib.suppress(Unexpected):
            wire.encode(wire.decode(as_tensor(each)))


POSTS = {
    "waiting": (board._WAITING, {"sequence": 1, "activity": "a", "poll": 1}),
    "failure": (board._FAILURE, {"rank": 1, "host": "h", "what": "w", "trace": ""}),
    "conclusion": (board._CONCLUSION, {"kind": "PeerLost", "message": "m"}),
    "farewell": (rendezvous._FAREWELL, {"rank": 1, "why": "w", "sequence": 1}),
    "debugger": (debugging._ENTRY, {"rank": 1, "place": "p"}),
    "roll": (roll_call._ROLL, {"refused": "no", "roll": []}),
    "registered": (
        roll_call._ENTRY,
        {
            "rank": 1, "world_size": 2, "host": "h", "machine": "m", "pid": 1, "seed": 0,
            "local_rank": -1, "local_world_size": 1, "device": "cpu", "backend": "gloo", "gpus": [],
        },
    ),
    "report": (
        job._REPORT,
        {
            "rank": 0, "host": "h", "what": "w", "message": "", "exitcode": 1, "cause": None,
            "cause_host": None, "restart": 0, "secondary": False, "time": 1.5,
        },
    ),
}  # fmt: skip
assert device_backend._FAILED


def post(data: bytes) -> None:
    """What somebody writes into the store, or into the folder of a Slurm job."""
    for key, (shape, good) in POSTS.items():
        assert posts.parse(json.dumps(good).encode(), key, shape) == good
        for each in (data, edited(json.dumps(good).encode(), data)):
            with contextlib.suppress(DesyncError):
                posts.parse(each, key, shape)


class Files:
    """A real checkpoint, and folders of this process for changed ones."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name)
        self.path = path / "changed.pt"
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
        trial = Trial(
            model,
            optimizer,
            torch.nn.MSELoss(),
            ["loss"],
            callbacks=[Checkpoint(path / "run", every_steps=1)],
        ).with_train_generator(torch.utils.data.DataLoader(data, 2))
        trial.run(1, verbose=0)
        self.payload = file.read(path / "run" / "step-0000001.pt")
        file.write(path / "small.pt", {"model": {"weight": torch.arange(40.0)}}, Label(1, 1, 1))
        self.small = (path / "small.pt").read_bytes()
        torch.save({"weight": torch.ones(3)}, path / "legacy", _use_new_zipfile_serialization=False)
        self.legacy = (path / "legacy").read_bytes()


_files: list[Files] = []


def files() -> Files:
    if not _files:
        _files.append(Files())
    return _files[0]


def checkpoint_file(data: bytes) -> None:
    """A file in the folder of a run: it is read as it was written, or it is not good."""
    found = files()
    for each in (data, edited(found.small, data), data + found.small, found.small + data):
        found.path.write_bytes(each)
        file.read_label(found.path)
        with contextlib.suppress(CheckpointError):
            loaded = file.read(found.path)
            assert torch.equal(loaded["model"]["weight"], torch.arange(40.0))


def foreign_file(data: bytes) -> None:
    """A file of any origin that a user loads."""
    found = files()
    for each in (data, edited(found.small, data), edited(found.legacy, data)):
        found.path.write_bytes(each)
        with contextlib.suppress(CheckpointError, Unexpected):
            loaded = file.read_foreign(found.path)
            form.check_trial(contents.from_torchbearer(loaded, "it"), "it")


ODD: tuple[Any, ...] = (
    None, True, -1, 2.5, "x", b"x", [], {}, [[]], (1,), {"a": 1}, {1: 2}, torch.ones(2), [None],
    torch.ones(2, dtype=torch.uint8), {1}, 2**70, torch.eye(2).to_sparse(),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested data."""
    yield path
    if isinstance(value, dict | list | tuple):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The data with something else at one place."""
    if not path:
        return new
    if isinstance(value, dict):
        return {k: replaced(v, path[1:], new) if k == path[0] else v for k, v in value.items()}
    return type(value)(
        replaced(v, path[1:], new) if k == path[0] else v for k, v in enumerate(value)
    )


def checkpoint_contents(data: bytes) -> None:
    """A checkpoint whose checksums are right, with other things at some of its places."""
    payload: Any = files().payload
    form.check_payload(payload, "it")
    for at in range(0, len(data) - 2, 3):
        every = list(places(payload))
        place = every[(data[at] * 256 + data[at + 1]) * len(every) // 65536]
        payload = replaced(payload, place, ODD[data[at + 2] % len(ODD)])
    with contextlib.suppress(Unexpected, CheckpointError):
        form.check_payload(payload, "it")
    section = files().payload["torchbearer_ddp"]
    packed = wire.decode(section["ranks"][0]["packed"])
    for at in range(0, len(data) - 2, 3):
        every = list(places(packed))
        place = every[(data[at] * 256 + data[at + 1]) * len(every) // 65536]
        packed = replaced(packed, place, ODD[data[at + 2] % len(ODD)])
    odd = [{**section["ranks"][0], "packed": wire.encode(packed)}]
    with contextlib.suppress(Unexpected, CheckpointError):
        changed = {**section, "ranks": odd}
        form.check_payload({**files().payload, "torchbearer_ddp": changed}, "it")


SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "node[07-08]",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHBEARER_DDP_TOKEN": "0123456789abcdef",
}  # fmt: skip


def environment(data: bytes) -> None:
    """Variables of Slurm and torchrun, one of which is anything."""
    for known in (SLURM, TORCHRUN):
        for number, name in enumerate(known):
            if data[:1] and data[0] % len(known) != number:
                continue
            for value in (os.fsdecode(data), os.fsdecode(edited(known[name].encode(), data))):
                with contextlib.suppress(LaunchError):
                    plan = make_plan({}, {**known, name: value.replace("\0", "")}, 0)
                    assert 0 <= plan.member.rank < plan.member.world_size
                    assert plan.member.local_rank >= -1
    for text in (os.fsdecode(data), os.fsdecode(edited(b"gpu[07-08,12],login", data))):
        with contextlib.suppress(Unexpected):
            assert next(expand_hosts(text))
        with contextlib.suppress(Unexpected):
            assert Counts(text, "it").nodes >= 0


COMMANDS = (
    b"--nproc-per-node 2 --device cuda:0",
    b"--world-size 2 --rank 0 --host h --port 1 --timeout 5",
    b"--nnodes 2 --node-rank 0 --nproc-per-node gpu --host h --seed 1",
)


def flags(data: bytes) -> None:
    """A command line."""
    for command in COMMANDS:
        words = os.fsdecode(edited(command, data)).split()
        if {"-h", "--help"} & set(words):
            continue
        with contextlib.suppress(ValueError, LaunchError):
            make_plan(merge(read_flags(words), {}), {}, 2)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        message,
        post,
        checkpoint_file,
        foreign_file,
        checkpoint_contents,
        environment,
        flags,
    )
}
