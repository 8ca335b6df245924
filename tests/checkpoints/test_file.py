"""Checkpoint files and their folder: atomic, verified, named, kept, locked."""

import contextlib
import errno
import os
import pickle
import resource
import stat
import subprocess
import sys
import threading
import time
import types
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from torchbearer_ddp.checkpoints import contents, file, folder
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.checkpoints.snapshot import Snapshot
from torchbearer_ddp.checkpoints.writer import Writer, finish_writing
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import wire
from torchbearer_ddp.group.plain_data import DEEPEST

PAYLOAD = {"model": {"weight": torch.arange(1000.0)}, "history": [{"loss": 0.5}], "big": 2**100}


def names(path):
    return {each.name for each in path.iterdir()}


def test_what_is_written_is_read_and_loads_with_plain_torch(tmp_path):
    path = tmp_path / "a.pt"
    file.write(path, PAYLOAD, Label(3, 2, 20))
    for loaded in (file.read(path), torch.load(path, weights_only=True)):
        assert torch.equal(loaded["model"]["weight"], PAYLOAD["model"]["weight"])
        assert loaded["history"] == [{"loss": 0.5}]
        assert loaded["big"] == 2**100
    assert file.read_label(path) == Label(3, 2, 20)
    assert names(tmp_path) == {"a.pt"}


def nested(depth, wrap):
    value = wrap(None)
    for _ in range(depth - 2):  # the dict of the test is one as well
        value = wrap(value)
    return value


ODD_BUT_PLAIN = {
    "empty": [b"", "", (), [], {}, set()],
    "bytes": b"\0\xff",
    "large": [2**2038, -(2**2038)],
    "keys": {(1, (2,)): 3, None: 1, 2.5: 1, b"x": 1, b"": 2},
    "texts": ["\udcff", "\0"],
    "deep lists": nested(DEEPEST, lambda value: [value]),
    "deep tuples": nested(DEEPEST, lambda value: (value,)),
    "deep dicts": nested(DEEPEST, lambda value: {"a": value}),
}


@pytest.mark.parametrize("kind", ODD_BUT_PLAIN)
def test_what_can_be_saved_can_be_read(tmp_path, kind):
    value = {"value": ODD_BUT_PLAIN[kind]}
    file.write(tmp_path / "a.pt", Snapshot().copy(value, "checkpoint"), Label(1, 1, 1))
    found = file.read(tmp_path / "a.pt")
    assert found == value
    assert wire.decode(wire.encode(contents.as_plain_data(found))) == value


def test_what_could_not_be_read_is_refused_when_it_is_saved():
    with pytest.raises(CheckpointError, match="2040 bits is larger than a checkpoint can hold"):
        Snapshot().copy({"value": -(2**2039)}, "checkpoint")
    itself = []
    itself.append(itself)
    for value in (itself, nested(DEEPEST + 1, lambda value: [value])):
        with pytest.raises(CheckpointError, match=r"checkpoint holds .* Make it flatter"):
            Snapshot().copy({"value": value}, "checkpoint")


@pytest.mark.parametrize("done", [0, 1, 2])
def test_names_that_a_kill_has_prevented_are_made_at_the_next_start(done, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    monitors = ["val_loss", "val acc/1", "x" * 200]
    bests = [folder.best_name(each) for each in monitors]
    run = Folder(tmp_path)
    run.put(PAYLOAD, ["epoch-0001.pt", *bests], Label(1, 1, 1))
    made, link = [], os.link

    def killed(*paths):
        if len(made) == done:
            raise Killed
        made.append(paths)
        link(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(Killed):
            run.put({"epoch": 2}, ["epoch-0002.pt", *bests], Label(2, 2, 2))
    assert file.read(tmp_path / bests[-1]) != {"epoch": 2}
    path, payload, _ = Folder(tmp_path).read_newest()
    assert (path.name, payload) == ("epoch-0002.pt", {"epoch": 2})
    assert all(file.read(tmp_path / name) == payload for name in bests)
    # An older best epoch stays what it is.
    run.put({"epoch": 3}, ["epoch-0003.pt"], Label(3, 3, 3))
    assert Folder(tmp_path).read_newest()[1] == {"epoch": 3}
    assert all(file.read(tmp_path / name) == payload for name in bests)


def test_a_name_that_stands_for_something_newer_or_unknown_stays(tmp_path):
    run, best = Folder(tmp_path), folder.best_name("val_loss")
    other = folder.best_name("val_acc")
    run.put(PAYLOAD, ["epoch-0001.pt", best, other], Label(1, 1, 1))
    run.put({"epoch": 2}, [best], Label(2, 2, 2))
    (tmp_path / other).unlink()
    (tmp_path / other).write_bytes(b"a file of the user's own")
    again = Folder(tmp_path)
    again.pass_over(tmp_path / best)  # it cannot be put back into the model as it is now
    assert again.read_newest()[0].name == "epoch-0001.pt"
    assert file.read(tmp_path / best) == {"epoch": 2}
    assert (tmp_path / other).read_bytes() == b"a file of the user's own"


def test_only_names_that_we_give_are_taken_from_a_label(tmp_path):
    (tmp_path / "run").mkdir()
    others = ["../outside.pt", "best-/../../outside.pt", "epoch-0009.pt", "latest", "best-ok.pt"]
    label = Label(1, 1, 1, names=others)
    file.write(tmp_path / "run" / "epoch-0001.pt", PAYLOAD, label)
    assert file.read_label(tmp_path / "run" / "epoch-0001.pt").names == others
    Folder(tmp_path / "run").read_newest()
    assert names(tmp_path / "run") == {"epoch-0001.pt", "latest", "best-ok.pt"}
    assert names(tmp_path) == {"run"}


def test_a_label_with_many_names_is_read_whole(tmp_path):
    run = Folder(tmp_path)
    bests = [folder.best_name(f"{index}" * 220) for index in range(10)]
    run.put(PAYLOAD, ["epoch-0001.pt", *bests], Label(1, 1, 1))
    assert len(file.read_label(tmp_path / "epoch-0001.pt").names) == file.MOST_NAMES
    assert len(names(tmp_path)) == 12


def test_modes_do_not_depend_on_the_umask(tmp_path):
    old = os.umask(0)
    try:
        run = Folder(tmp_path / "run")
        run.open()
        run.put(PAYLOAD, ["epoch-0001.pt", "best-loss.pt"], Label(1, 1, 1))
        shared = Folder(tmp_path / "shared", file_mode=0o640, folder_mode=0o750)
        shared.open()
        shared.put(PAYLOAD, ["epoch-0001.pt"], Label(1, 1, 1))
    finally:
        os.umask(old)

    def mode(name):
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    assert mode("run") == 0o700
    assert mode("run/epoch-0001.pt") == 0o600
    assert mode("run/best-loss.pt") == mode("run/.lock") == 0o600
    assert mode("shared") == 0o750
    assert mode("shared/epoch-0001.pt") == 0o640


def test_truncation_at_every_length_class_is_found(tmp_path):
    path = tmp_path / "a.pt"
    file.write(path, PAYLOAD, Label(1, 1, 1))
    whole = path.read_bytes()
    lengths = {0, 1, 3, 21, 22, 100, len(whole) // 2, len(whole) - 300, len(whole) - 65}
    for length in sorted(lengths | set(range(len(whole) - 30, len(whole)))):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"truncated|damaged"):
            file.read(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError):
        file.read(path)


def is_payload(loaded):
    return (
        loaded.keys() == PAYLOAD.keys()
        and torch.equal(loaded["model"]["weight"], PAYLOAD["model"]["weight"])
        and loaded["history"] == PAYLOAD["history"]
        and loaded["big"] == PAYLOAD["big"]
    )


def test_any_flipped_bit_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "a.pt"
    file.write(path, PAYLOAD, Label(1, 1, 1))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        record = next(r for r in archive.infolist() if r.file_size == 4000)
    data = whole.index(PAYLOAD["model"]["weight"].numpy().tobytes())
    tensor = range(data, data + 4000)
    listed = range(whole.index(b"PK\1\2"), len(whole))
    flips = [(position, 2) for position in range(0, listed.start, 7) if position not in tensor]
    # Every bit of the list of records: one of them makes torch skip a record.
    flips += [(position, bit) for position in listed for bit in range(8)]
    flips += [(position, 2) for position in tensor[::97]]
    found = 0
    with path.open("r+b", buffering=0) as opened:
        for position, bit in flips:
            os.pwrite(opened.fileno(), bytes([whole[position] ^ 1 << bit]), position)
            try:
                assert is_payload(file.read(path))
                assert file.read_label(path) == Label(1, 1, 1)
                # Padding, dates, copies of the sizes: nothing that torch looks at.
                assert position not in tensor
            except CheckpointError as error:
                found += 1
                message = str(error)
                if position in tensor and record.filename not in message:
                    pytest.fail(message)
            os.pwrite(opened.fileno(), bytes([whole[position]]), position)
    assert found > len(flips) / 2


@pytest.mark.parametrize(
    "label",
    [
        b'{"serial": true, "epochs": 1, "step": 1, "records": 0}',
        b'{"serial": 1.0, "epochs": 1, "step": 1, "records": 0}',
        b'{"serial": -1, "epochs": 1, "step": 1, "records": 0}',
        b'{"serial": 1, "epochs": 1}',
        b'{"serial": 1, "epochs": 1, "step": 1, "records": 0, "more": 0}',
        b"[1, 1, 1]",
        b"\xff",
    ],
)
def test_a_label_that_is_not_exactly_ours_is_none(tmp_path, label):
    path = tmp_path / "a.pt"
    torch.save(PAYLOAD, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = file._MARK + label + b" %08x" % zlib.crc32(label)
    assert file.read_label(path) is None
    with pytest.raises(CheckpointError, match="no label"):
        file.read(path)


def test_without_torch_s_checksums_nothing_is_written(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.raises(CheckpointError, match=r"set_crc32_options\(False\) is in force"):
            file.write(tmp_path / "a.pt", PAYLOAD, Label(1, 1, 1))
        with pytest.raises(CheckpointError, match=r"set_crc32_options\(False\) is in force"):
            Folder(tmp_path).open()
    finally:
        torch.serialization.set_crc32_options(True)
    assert names(tmp_path) == set()


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("form", ["ours", "torch", "legacy", "pickle"])
def test_a_pickle_bomb_runs_nothing(tmp_path, monkeypatch, form):
    crater = tmp_path / "crater"
    monkeypatch.setenv("BOMB", str(crater))
    path = tmp_path / "a.pt"
    if form == "ours":
        file.write(path, {"model": Bomb()}, Label(1, 1, 1))
    elif form == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({"model": Bomb()}, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(CheckpointError):
        file.read(path)
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        file.read_foreign(path)
    assert not crater.exists()
    with contextlib.suppress(CheckpointError):
        file.read_foreign(path, trust=True)  # it does go off where it is let
    assert crater.exists()


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary_one(tmp_path):
    run = Folder(tmp_path)
    run.open()
    run.put(PAYLOAD, ["epoch-0001.pt"], Label(1, 1, 1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        for name in ("epoch-0001.pt", "epoch-0002.pt"):
            with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
                run.put(PAYLOAD, [name], Label(2, 2, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == {".lock", "epoch-0001.pt", "latest"}
    assert file.read(tmp_path / "latest")["big"] == 2**100


def test_a_folder_that_cannot_be_made_or_written_is_an_error(tmp_path):
    (tmp_path / "plain").write_text("a file, not a folder")
    with pytest.raises(CheckpointError, match=r"plain/run cannot be used \(Not a directory\)"):
        Folder(tmp_path / "plain" / "run").open()


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    run = Folder(tmp_path, keep=2)
    run.open()
    for epoch in (1, 2, 3, 4):
        names = [folder.epoch_name(epoch)] + (["best-val_loss.pt"] if epoch == 2 else [])
        run.put(PAYLOAD, names, Label(run.next_serial(), epoch, 10 * epoch))
        run.remove_old()
        assert (tmp_path / "latest").readlink() == Path(folder.epoch_name(epoch))
    found = {p.name for p in tmp_path.glob("*.pt")}
    assert found == {"epoch-0003.pt", "epoch-0004.pt", "best-val_loss.pt"}
    assert file.read_label(tmp_path / "best-val_loss.pt") == Label(2, 2, 20)
    # After a return to an older checkpoint the next one written is the newest, not the highest.
    run.put(PAYLOAD, ["epoch-0003.pt"], Label(run.next_serial(), 3, 30))
    assert run.newest_first()[0].name == "epoch-0003.pt"
    # A kill right before ``latest`` moves on.
    (tmp_path / "latest").unlink()
    assert run.read_newest()[0] == tmp_path / "epoch-0003.pt"
    assert (tmp_path / "latest").readlink() == Path("epoch-0003.pt")


def test_a_damaged_newest_file_is_named_and_the_one_before_is_used(tmp_path):
    run = Folder(tmp_path, keep=2)
    run.open()
    for epoch in (1, 2, 3):
        run.put({"epoch": epoch}, [folder.epoch_name(epoch)], Label(epoch, epoch, epoch))
    newest = tmp_path / "epoch-0003.pt"
    newest.write_bytes(newest.read_bytes()[:-5])
    path, payload, problems = run.read_newest()
    assert (path.name, payload["epoch"]) == ("epoch-0002.pt", 2)
    assert len(problems) == 1
    assert "epoch-0003.pt" in problems[0]
    assert (tmp_path / "latest").resolve() == path
    # The damaged one does not count among those kept: the whole one before it stays.
    run.put({"epoch": 4}, ["epoch-0004.pt"], Label(4, 4, 4))
    run.remove_old()
    assert (tmp_path / "epoch-0002.pt").exists()
    path.write_bytes(b"")
    (tmp_path / "epoch-0004.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole"):
        run.read_newest()


def test_an_empty_folder_is_no_error(tmp_path):
    run = Folder(tmp_path / "new")
    run.open()
    assert run.read_newest() == (None, None, [])
    assert run.next_serial() == 1


def test_temporary_files_of_a_killed_run_are_swept_and_nothing_else(tmp_path):
    (tmp_path / ".tmp-123-epoch-0001.pt").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.pt").write_bytes(b"mine")
    run = Folder(tmp_path, keep=1)
    run.open()
    run.put(PAYLOAD, ["epoch-0001.pt"], Label(1, 1, 1))
    run.put(PAYLOAD, ["epoch-0002.pt"], Label(2, 2, 2))
    run.remove_old()
    expected = {".lock", "epoch-0002.pt", "latest", "notes.txt", "other.pt"}
    assert names(tmp_path) == expected


def test_without_links_there_are_copies_and_a_text_file(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    run = Folder(tmp_path)
    run.open()
    run.put(PAYLOAD, ["epoch-0001.pt", "best-loss.pt"], Label(1, 1, 1))
    assert (tmp_path / "latest").read_text() == "epoch-0001.pt\n"
    assert file.read(tmp_path / "best-loss.pt")["big"] == 2**100


@pytest.mark.parametrize("monitor", ["../../etc/x", "/abs", "a/b", "val loss", "..", "\n"])
def test_a_metric_s_name_cannot_leave_the_folder(tmp_path, monitor):
    path = tmp_path / folder.best_name(monitor)
    assert path.resolve().parent == tmp_path.resolve()


def test_two_runs_in_one_folder_are_refused(tmp_path):
    run = Folder(tmp_path)
    run.open()
    run.open()  # the same process may come again: a second Trial, a second run
    script = (
        "import sys; from pathlib import Path; from torchbearer_ddp.checkpoints.folder import "
        "Folder; Folder(Path(sys.argv[1])).open()"
    )

    def other():
        command = [sys.executable, "-c", script, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    result = other()
    assert result.returncode == 1
    assert f'"pid": {os.getpid()}' in result.stderr
    assert "a folder of its own" in result.stderr
    run.close()
    assert other().returncode == 0


def test_a_run_that_is_being_ended_is_waited_for(tmp_path, monkeypatch):
    script = (
        "import os, sys, time; from pathlib import Path; from torchbearer_ddp.checkpoints.folder "
        "import Folder; Folder(Path(sys.argv[1])).open(); os.write(1, b'.'); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.read(1) == b"."
        ended = []

        def end_it(seconds):
            """This run waits: now the other one ends."""
            other.kill()
            ended.append(other.wait(60))

        clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=end_it)
        monkeypatch.setattr(folder, "time", clock)
        run = Folder(tmp_path)
        run.open()
        run.close()
    assert ended == [-9]


def test_the_writer_keeps_an_error_until_it_is_taken():
    writer, gate = Writer(), threading.Event()

    def job():
        gate.wait(10)
        raise CheckpointError("full")

    writer.start(job)
    assert not writer.has_failed
    assert writer.take_error() is None
    gate.set()
    finish_writing()
    assert writer.has_failed
    assert str(writer.take_error()) == "full"
    assert writer.take_error() is None


def test_a_forked_child_does_not_wait_for_its_parent_s_writing():
    writer, gate = Writer(), threading.Event()
    writer.start(lambda: gate.wait(10) and None)
    child = os.fork()
    if not child:
        finish_writing()
        os._exit(0)
    try:
        # Should the child wait, it does so for ever: the time limit of the test says so.
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gate.set()
        finish_writing()


def test_a_process_does_not_end_before_its_file_stands(tmp_path):
    script = """if True:
        import sys, threading
        from pathlib import Path
        import torch
        from torchbearer_ddp.checkpoints.file import Label
        from torchbearer_ddp.checkpoints.folder import Folder
        from torchbearer_ddp.checkpoints.writer import Writer

        run, writer = Folder(Path(sys.argv[1])), Writer()
        run.open()
        script_is_over = threading.Event()
        threading._register_atexit(script_is_over.set)

        def job():
            script_is_over.wait(30)
            run.put({"x": torch.ones(2**20)}, ["epoch-0001.pt"], Label(1, 1, 1))

        writer.start(job)
    """
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, timeout=60, check=True)
    assert torch.equal(file.read(tmp_path / "epoch-0001.pt")["x"], torch.ones(2**20))
