"""Checkpoints and faults: killed runs, full disks, damaged files, two runs in one folder."""

import functools
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
import torchbearer
from torchbearer.callbacks import on_step_training

from tests import ranks as ranks_module
from tests.forked import Killable
from tests.programs import EPOCHS, assert_same, build, launch, train, train_with_events
from tests.ranks import ranks, run_ranks
from torchbearer_ddp import Checkpoint, CheckpointError, WorkerError
from torchbearer_ddp.checkpoints import file
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives

KILLS = int(os.environ.get("TORCHBEARER_DDP_KILLS", "50"))


def telling(tell, folder, **options):
    """Trains, tells each step before it is saved, and stays at the last one to be killed."""

    @on_step_training
    def step(state):
        tell(state[torchbearer.BATCH])
        steps_left = state[torchbearer.STEPS] - state[torchbearer.BATCH] - 1
        if state[torchbearer.EPOCH] == EPOCHS - 1 and not steps_left:
            threading.Event().wait(60)  # the kill comes long before

    train(folder, [step], **options)


def quietly(body, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        return body(*args, **kwargs)


@pytest.mark.parametrize("options", [{"every_steps": 2}, {}])
def test_killed_at_a_random_moment_and_resumed_bit_for_bit(tmp_path, options):
    expected = run_ranks(train, 2)
    run = Killable(functools.partial(telling, folder=tmp_path, **options), 2)
    draw = random.SystemRandom()  # earlier tests have seeded Python's own generator
    steps, delay = draw.randint(4, 14), draw.uniform(0, 0.05)
    print(f"killed {delay:.4f} s after step {steps}")  # shown if the test fails
    assert run.wait_for(steps)
    time.sleep(delay)
    run.kill()
    resumed = run_ranks(functools.partial(quietly, train), 2, (tmp_path,), options)
    for found, wanted in zip(resumed, expected, strict=True):
        assert_same(found, wanted)


def save_for_ever(tell, folder):
    torch.set_num_threads(1)
    model = torch.nn.Linear(200, 100)

    @on_step_training
    def step(state):
        tell(checkpoint.global_step)

    checkpoint = Checkpoint(folder, every_epochs=None, every_steps=1, keep=3, monitor=None)
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam(model.parameters()),
        torch.nn.functional.mse_loss,
        callbacks=[step, checkpoint],
        verbose=0,
    )
    data = torch.utils.data.TensorDataset(torch.zeros(8, 200), torch.ones(8, 100))
    trial.with_train_generator(torch.utils.data.DataLoader(data, batch_size=8), steps=10**6)
    trial.run(1)


def tell_pipe(descriptor, told):
    os.write(descriptor, b".")


def kill_many(folder, kills, pipe):
    """Forks run after run from one process that has imported everything, and kills each."""
    newest = left_behind = 0
    for _ in range(kills):
        reader, writer = os.pipe()
        run = os.fork()
        if not run:
            save_for_ever(functools.partial(tell_pipe, writer), folder)
        os.close(writer)
        for _ in range(random.randint(1, 4)):
            assert os.read(reader, 1)
        os.close(reader)
        time.sleep(random.uniform(0, 0.02))
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        left_behind += len(list(folder.glob(".tmp-*")))
        last = whole_up_to(folder)
        assert last >= newest
        newest = last
    pipe.send((newest, left_behind))


def whole_up_to(folder):
    """The last step saved; every file is whole, and the three newest saves stand."""
    found = {file.read_label(path).step: path for path in folder.glob("step-*.pt")}
    for path in found.values():
        file.read(path)  # raises if it is not whole
    last = max(found, default=0)
    # Without a gap: a new one comes before an old one goes.
    assert set(range(max(1, last - 2), last + 1)) <= set(found)
    # It is made right after the first file, moves right after each other one, and never dangles.
    if len(found) > 1 or (folder / "latest").is_symlink():
        assert file.read(folder / "latest")["torchbearer_ddp"]["global_step"] in (last, last - 1)
    return last


@pytest.mark.timeout(30 + 4 * KILLS)
def test_no_kill_in_mid_save_costs_a_checkpoint(tmp_path):
    receiver, sender = ranks_module._context.Pipe(duplex=False)
    nursery = ranks_module._context.Process(target=kill_many, args=(tmp_path, KILLS, sender))
    nursery.start()
    sender.close()
    try:
        assert receiver.poll(3 * KILLS)
        newest, left_behind = receiver.recv()
    finally:
        nursery.kill()
        nursery.join()
    assert newest > KILLS / 2
    assert left_behind, "no kill came in mid-save: the test does not test"
    Folder(tmp_path).open()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_an_error_on_all_ranks(tmp_path, background):
    @ranks(2)
    def body():
        steps = []

        @on_step_training
        def fill(state):
            steps.append(state[torchbearer.BATCH])
            if len(steps) == 3 and collectives.is_rank_zero():
                finish_writing()
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))

        trial = build(fill, Checkpoint(tmp_path, every_steps=2, background=background))
        with pytest.raises(CheckpointError, match=r"step-0000004\.pt could not be written \(File"):
            trial.run(50)
        # At the next step, or when rank zero has had the time to notice.
        assert 4 <= len(steps) <= (6 if background else 4)
        assert set(collectives.all_gather(len(steps), "steps")) == {len(steps)}

    body()
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "latest", "step-0000002.pt"}
    assert file.read(tmp_path / "latest")["torchbearer_ddp"]["global_step"] == 2


def test_an_error_in_the_background_surfaces_between_saves(tmp_path):
    @ranks(2)
    def body():
        steps = []

        @on_step_training
        def fill(state):
            steps.append(state[torchbearer.BATCH])
            if collectives.is_rank_zero():
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
            if len(steps) == 3:
                checkpoint.save_now(state)

        checkpoint = Checkpoint(tmp_path, every_steps=10**4, every_epochs=None)
        trial = build(fill, checkpoint, steps=10**5)
        with pytest.raises(CheckpointError, match="could not be written"):
            trial.run(1)
        assert len(steps) < 1000

    body()


@ranks(2)
def test_a_folder_that_cannot_be_used_is_an_error_on_all_ranks(tmp_path):
    if collectives.is_rank_zero():
        (tmp_path / "plain").write_text("not a folder")
    collectives.barrier()
    with pytest.raises(CheckpointError, match=r"plain/run cannot be used \(Not a directory\)"):
        train(tmp_path / "plain" / "run")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("crater",)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def plant_pickle(path):
    path.write_bytes(pickle.dumps(Bomb()))


def plant_labelled_bomb(path):
    file.write(path, {"model": Bomb()}, file.Label(99, 9, 9))


@pytest.mark.parametrize("damage", [truncate, flip, plant_pickle, plant_labelled_bomb])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = run_ranks(functools.partial(train, epochs=3), 2)
    folder = tmp_path / "run"
    run_ranks(functools.partial(train, folder, epochs=2, monitor=None), 2)
    damage(folder / "epoch-0002.pt")

    def resume():
        os.chdir(tmp_path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train(folder, epochs=3, monitor=None)
        return found, [str(w.message) for w in caught if "epoch-0002.pt" in str(w.message)]

    results = run_ranks(resume, 2)
    for rank, ((found, messages), wanted) in enumerate(zip(results, expected, strict=True)):
        assert_same(found, wanted)
        assert len(messages) == (1 if rank == 0 else 0)
        assert all("epoch-0001.pt is used" in message for message in messages)
    assert not (tmp_path / "crater").exists()


@pytest.mark.parametrize("end", ["raise", "os._exit after finish_writing()"])
def test_the_process_does_not_end_before_the_file_stands(tmp_path, end):
    script = f"""
import os, sys, torch, torchbearer
from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints.writer import finish_writing
model = torch.nn.Linear(1500, 1500)
@torchbearer.callbacks.on_sample
def end(state):
    if state[torchbearer.BATCH] == 1:
        if {end!r} == 'raise':
            raise SystemExit(3)
        finish_writing()
        os._exit(4)
trial = torchbearer.Trial(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss,
                          callbacks=[end, Checkpoint(sys.argv[1], every_steps=1)], verbose=0)
data = torch.utils.data.TensorDataset(torch.zeros(2, 1500), torch.ones(2, 1500))
trial.with_train_generator(torch.utils.data.DataLoader(data)).run(1)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == (3 if end == "raise" else 4), result.stderr
    assert file.read(tmp_path / "run" / "latest")["torchbearer_ddp"]["global_step"] == 1


def train_on_a_slow_disk(folder, seconds):
    """Rank one fails while rank zero is writing."""
    fsync = os.fsync

    def slow_fsync(descriptor):
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow_fsync
    train_with_events([{"rank": 1, "step": 3, "do": "raise"}], folder=folder)


def test_a_file_that_is_being_written_when_another_rank_fails(tmp_path):
    """Longer than a failed run may otherwise take to end; the file has the grace time."""
    started = time.monotonic()
    with pytest.raises(WorkerError, match="a bad sample"):
        launch(train_on_a_slow_disk, str(tmp_path), 5.0)
    assert time.monotonic() - started < 40
    assert file.read(tmp_path / "step-0000002.pt")["torchbearer_ddp"]["global_step"] == 2


def test_two_runs_at_once_in_one_folder(tmp_path):
    run = Killable(functools.partial(save_for_ever, folder=tmp_path), 1)
    assert run.wait_for(3)
    with pytest.raises(CheckpointError, match=r"Another run \(\{.*\"pid\": \d+.*folder of its own"):
        train(tmp_path)
    assert run.wait_for(3)  # the other one goes on
    run.kill()
    file.read(tmp_path / "latest")
