"""Saving a model on a GPU, with tensors that only say so: only the file waits for the copies."""

import contextlib
import threading
from unittest import mock

import torch
import torchbearer
from torch.overrides import TorchFunctionMode

from tests.stand_ins import cuda, cuda_devices
from tests.stand_ins.cuda import CudaTensor
from torchbearer_ddp.checkpoints import file
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.checkpoints.runs import Runs
from torchbearer_ddp.checkpoints.save import Moment, Saver
from torchbearer_ddp.checkpoints.snapshot import Snapshot


class Late(TorchFunctionMode):
    """Asynchronous copies to the host arrive when their event is waited for, and not before."""

    def __init__(self):
        super().__init__()
        self.pending = []
        self.delivered_by = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        asynchronous = func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking")
        result = func(*args, **(kwargs or {}))
        if asynchronous and isinstance(args[1], CudaTensor):
            self.pending.append((args[0], args[0].clone()))
            args[0].zero_()
        return result

    def deliver(self):
        for memory, value in self.pending:
            memory.copy_(value)
        self.pending.clear()
        self.delivered_by.append(threading.current_thread().name)


@contextlib.contextmanager
def a_late_gpu():
    late = Late()
    synchronize = mock.patch.object(cuda._Event, "synchronize", late.deliver)
    with cuda.pretended() as counts, cuda_devices.visible("GPU-a"), synchronize, late:
        counts.late = late
        yield counts


def test_a_copy_from_a_gpu_blocks_nothing_and_is_there_after_a_wait():
    value = torch.arange(6.0).view(2, 3)
    with a_late_gpu() as counts:
        snapshot = Snapshot()
        for step in range(2):  # the second copy uses the memory of the first
            on_gpu = CudaTensor(value + step)
            counts.clear()
            copied = snapshot.copy({"it": on_gpu, "again": on_gpu, "n": 1}, "checkpoint")
            assert counts.blocking == []
            assert copied["it"] is copied["again"]
            assert not torch.equal(copied["it"], value + step)
            snapshot.wait()
            assert torch.equal(copied["it"], value + step)
            assert type(copied["it"]) is torch.Tensor


def test_memory_that_cannot_be_pinned_is_no_error():
    empty_like = torch.empty_like

    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty_like(*args, **kwargs)

    with a_late_gpu(), mock.patch.object(torch, "empty_like", refuse):
        snapshot = Snapshot()
        copied = snapshot.copy({"it": CudaTensor(torch.ones(2))}, "checkpoint")
        snapshot.wait()
        assert torch.equal(copied["it"], torch.ones(2))


def model_on_gpu():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(CudaTensor(parameter.detach())))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, CudaTensor(buffer))
    return model


def test_only_the_file_waits_for_the_copies(tmp_path):
    with a_late_gpu() as counts:
        model = model_on_gpu()
        expected = {name: each.on_cpu.clone() for name, each in model.state_dict().items()}
        trial = torchbearer.Trial(model, torch.optim.SGD(model.parameters(), 0.1), verbose=0)
        trial.state.update({torchbearer.HISTORY: [], torchbearer.STOP_TRAINING: False})
        folder = Folder(tmp_path)
        saver, runs = Saver(folder, background=True), Runs(folder)
        runs.log.append([1, 0, 0])
        saver.open()
        counts.clear()
        moment = Moment(trial.state, 1, None, runs, has_local_parts=False)
        assert saver.save(moment, lambda: ["step-0000001.pt"])
        # The checksums of the buffers come back as one tensor; nothing else waits for the GPU.
        assert counts.blocking == ["cpu"]
        with torch.no_grad():
            for parameter in model.parameters():  # training goes on
                parameter.on_cpu.fill_(7.0)
        saver.finish()
        saver.close()
        (waiter,) = counts.late.delivered_by
    assert waiter.startswith("torchbearer_ddp-checkpoint")
    saved = file.read(tmp_path / "step-0000001.pt")["model"]
    assert {name: each.tolist() for name, each in saved.items()} == {
        name: each.tolist() for name, each in expected.items()
    }
