"""The known problems of torchbearer that a page lists: each still exists, and its cure works."""

import functools
import importlib.metadata
import pickle
from pathlib import Path

import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial, callbacks


def plain_trial(*listed, model=None):
    """A Trial without our callbacks, with three batches in an epoch."""
    model = model or torch.nn.Linear(3, 2)
    data = TensorDataset(torch.randn(12, 3), torch.randn(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trial = Trial(model, optimizer, torch.nn.functional.mse_loss, ["loss"], list(listed), verbose=0)
    return trial.with_generators(DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))


def norms(model, clip):
    found = []
    note = callbacks.on_step_training(lambda _: found.append(model.weight.grad.norm().item()))
    plain_trial(clip, note, model=model).run(1)
    return found


def test_clipping_without_parameters_acts_on_the_first_batch_only():
    first, *others = norms(torch.nn.Linear(3, 2), callbacks.GradientNormClipping(0.001))
    assert first <= 0.0011
    assert min(others) > 0.0011
    model = torch.nn.Linear(3, 2)
    clip = callbacks.GradientNormClipping(0.001, params=list(model.parameters()))
    assert max(norms(model, clip)) <= 0.0011


def test_a_scheduler_with_verbose_raises():
    with pytest.raises(TypeError, match="verbose"):
        plain_trial(callbacks.ReduceLROnPlateau()).run(1)
    kind = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=9.0)
    trial = plain_trial(callbacks.TorchScheduler(kind, monitor="val_loss"))
    trial.run(2)
    assert trial.state[torchbearer.OPTIMIZER].param_groups[0]["lr"] == pytest.approx(0.001)


def test_schedulers_save_nothing():
    scheduler = callbacks.StepLR(1)
    plain_trial(scheduler).run(2)
    assert scheduler.state_dict() == {}


@pytest.mark.parametrize("kind", [callbacks.Best, callbacks.MostRecent])
def test_the_old_file_is_gone_before_the_new_one_is_written(kind, tmp_path, monkeypatch):
    there = []
    save = torch.save

    def note(*args, **kwargs):
        there.append(len(list(tmp_path.glob("*.pt"))))
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", note)
    plain_trial(kind(str(tmp_path / "{epoch}.pt"))).run(2)
    assert there == [0, 0]
    plain_trial(callbacks.Interval(str(tmp_path / "kept-{epoch}.pt"))).run(2)
    assert len(list(tmp_path.glob("kept-*.pt"))) == 2


def test_files_of_its_checkpointers_need_trust(tmp_path):
    file = str(tmp_path / "model.pt")
    plain_trial(callbacks.Interval(file)).run(1)
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
        torch.load(file)
    assert torch.load(file, weights_only=False)


def test_a_requirement_is_not_declared():
    declared = " ".join(importlib.metadata.requires("torchbearer") or [])
    assert "packaging" not in declared
    source = Path(torchbearer.__file__).parent
    assert any("packaging" in path.read_text() for path in source.rglob("*.py"))
