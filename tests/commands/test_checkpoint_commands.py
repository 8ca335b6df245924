"""``python -m torchbearer_ddp inspect`` and ``export``."""

import json
import os
import shutil
import sys

import pytest
import torch
import torchbearer

from tests.processes import Program
from tests.requirements import unavailable
from torchbearer_ddp import Checkpoint, CheckpointError, data_parallel
from torchbearer_ddp.__main__ import main


class Tied(torch.nn.Module):
    """A model in which two layers are one."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = self.first
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


class Counting(Tied):
    """A model that keeps a number besides its tensors."""

    def get_extra_state(self):
        return 3

    def set_extra_state(self, state):
        assert state == 3


def train(folder, model):
    data = torch.randn(12, 6), torch.randint(0, 6, (12,))
    callbacks = [*data_parallel(), Checkpoint(folder, keep=None)]
    optimizer = torch.optim.Adam(model.parameters())
    criterion = torch.nn.CrossEntropyLoss()
    trial = torchbearer.Trial(model, optimizer, criterion, ["loss"], callbacks, verbose=0)
    trial.with_train_data(*data, batch_size=4).run(3)
    return trial


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of three checkpoints, and the trial that wrote them."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder, Tied())


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "run", symlinks=True)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def inspected(capsys, *words):
    main(["inspect", *map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_folder_shows_its_newest_checkpoint(folder, trained, capsys):
    found = inspected(capsys, folder)
    loss = trained[1].state[torchbearer.HISTORY][-1]["loss"]
    assert found["file"] == str(folder / "epoch-0003.pt")
    assert (found["epochs"], found["step"], found["world size"]) == (3, 9, 1)
    assert found["metrics"]["loss"] == pytest.approx(loss)
    assert found["versions"]["torch"] == str(torch.__version__)
    assert len(found["checksum"]) == 8
    state = trained[1].state[torchbearer.MODEL].state_dict()
    assert found["model"]["elements"] == sum(each.numel() for each in state.values())
    tensors = sum(each.numel() * each.element_size() for each in state.values())
    assert tensors <= found["parts"]["model"] <= tensors + 500
    assert {"model", "optimizer", "rank 0"} <= set(found["parts"])


def test_text_is_for_people(folder, capsys):
    main(["inspect", str(folder / "epoch-0002.pt"), "--tensors"])
    text = capsys.readouterr().out
    assert "saved       after epoch 2, step 6" in text
    assert "checksum    right" in text
    assert "norm.running_mean         (6,) float32" in text


def test_damaged_files_are_passed_over_and_nothing_is_changed(folder, capsys):
    flip_a_bit(folder / "epoch-0003.pt")
    before = {each.name: each.lstat().st_mtime_ns for each in folder.iterdir()}
    link = (folder / "latest").readlink()
    found = inspected(capsys, folder)
    assert found["file"] == str(folder / "epoch-0002.pt")
    assert len(found["damaged"]) == 1
    assert "epoch-0003.pt is damaged" in found["damaged"][0]
    assert {each.name: each.lstat().st_mtime_ns for each in folder.iterdir()} == before
    assert (folder / "latest").readlink() == link
    with pytest.raises(CheckpointError, match=r"epoch-0003\.pt is damaged: the CRC-32"):
        main(["inspect", str(folder / "epoch-0003.pt")])
    for path in folder.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole"):
        main(["inspect", str(folder)])


def test_a_damaged_label_does_not_make_a_file_foreign(folder):
    path = folder / "epoch-0003.pt"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"serial": 3', b'"serial": 7'))
    with pytest.raises(CheckpointError, match="has no label at its end"):
        main(["inspect", str(path)])


def test_an_error_ends_with_its_message_and_code_1(tmp_path):
    command = (sys.executable, "-m", "torchbearer_ddp", "inspect", str(tmp_path))
    with Program(*command, raw=True) as program:
        assert program.code() == 1, program.text()
        assert "torchbearer_ddp: There is no checkpoint in" in program.text()
        assert "Traceback" not in program.text()


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_nothing_in_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, "bomb.pt")
    for words in (["inspect", "bomb.pt"], ["export", "bomb.pt", "out.pt"]):
        with pytest.raises(CheckpointError, match="nothing in it was run"):
            main(words)
    assert [path.name for path in tmp_path.iterdir()] == ["bomb.pt"]


def test_a_models_own_state_dict_is_shown(tmp_path, capsys):
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "weights.pt")
    found = inspected(capsys, tmp_path / "weights.pt", "--tensors")
    assert found["tensors"] == {"weight": [[2, 3], "float32"], "bias": [[2], "float32"]}
    assert (found["checksum"], found["step"], found["world size"]) == (None, None, None)
    main(["inspect", str(tmp_path / "weights.pt")])
    assert "none: not written by Checkpoint" in capsys.readouterr().out


def test_exported_weights_are_those_of_the_model(folder, trained, tmp_path, capsys):
    expected = trained[1].state[torchbearer.MODEL].state_dict()
    main(["export", str(folder), str(tmp_path / "out.pt")])
    assert f"{len(expected)} tensors of {folder / 'epoch-0003.pt'}" in capsys.readouterr().out
    assert_equal(torch.load(tmp_path / "out.pt"), expected)
    Tied().load_state_dict(torch.load(tmp_path / "out.pt"))
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(folder), str(tmp_path / "out.pt")])
    assert "--force" in capsys.readouterr().err
    flip_a_bit(folder / "epoch-0003.pt")
    main(["export", str(folder), str(tmp_path / "out.pt"), "--force"])
    assert "passed over: " in capsys.readouterr().out
    assert any((torch.load(tmp_path / "out.pt")[name] != expected[name]).any() for name in expected)


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_safetensors(folder, trained, tmp_path):
    try:
        from safetensors.torch import load_file
    except ImportError:
        unavailable("no package safetensors here; pip install safetensors")
    main(["export", str(folder), str(tmp_path / "out.safetensors")])
    expected = trained[1].state[torchbearer.MODEL].state_dict()
    found = load_file(tmp_path / "out.safetensors")
    assert_equal({name: found[name] for name in expected}, expected)
    assert len(found) == len(expected)


def test_what_cannot_be_exported_leaves_no_file(tmp_path, monkeypatch):
    train(tmp_path / "run", Counting())
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    out = tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        main(["export", str(tmp_path / "run"), str(out)])
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="parts that are not tensors"):
        main(["export", str(tmp_path / "run"), str(out)])
    with pytest.raises(CheckpointError, match=r"cannot be written \(No such file or directory\)"):
        main(["export", str(tmp_path / "run"), str(tmp_path / "nowhere" / "out.pt")])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
