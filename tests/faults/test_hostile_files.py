"""Files that are not what their names say: each is named, in time, and an older one is used."""

import contextlib
import csv
import io
import os
import pickle
import re
import threading
import time
import warnings
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torchbearer
from torchbearer import Trial
from torchbearer.callbacks import Callback, EarlyStopping, StepLR

from tests.fuzz.targets import ODD, places, replaced
from tests.ranks import run_ranks
from torchbearer_ddp import Checkpoint, data_parallel, rank
from torchbearer_ddp.checkpoints import file, folder, form, source
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import wire

SECONDS = 5.0


def momentum(parameters, rate):
    return torch.optim.SGD(parameters, rate, momentum=0.5)


def trial(
    *callbacks, model=None, optimizer=momentum, criterion=torch.nn.MSELoss, metrics=("loss",)
):
    torch.manual_seed(0)
    model = model or torch.nn.Linear(2, 1)
    steps = optimizer(model.parameters(), 0.1)
    made = Trial(model, steps, criterion(), list(metrics), callbacks=list(callbacks))
    data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
    return made.with_train_generator(torch.utils.data.DataLoader(data, 2))


@pytest.fixture(scope="module")
def payload(tmp_path_factory):
    """What a real run saves."""
    path = tmp_path_factory.mktemp("run")
    trial(Checkpoint(path, every_steps=1)).run(1, verbose=0)
    return file.read(path / "step-0000001.pt")


def two_checkpoints(path, payload):
    run = Folder(path)
    run.open()
    for epoch in (1, 2):
        run.put(payload, [folder.epoch_name(epoch)], Label(epoch, epoch, epoch))
    return run


def newest(run):
    """What a run would continue from, within a time."""
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path, found = source.find(run, "auto")
    assert time.monotonic() - started < SECONDS
    assert found is not None
    return Path(path).name, [str(each.message) for each in said]


@pytest.mark.parametrize("kind", ["pipe", "zeros", "directory", "nowhere", "loop", "self"])
def test_a_special_file_named_like_a_checkpoint(tmp_path, payload, kind):
    run = two_checkpoints(tmp_path, payload)
    strange = tmp_path / "epoch-0003.pt"
    if kind == "pipe":
        os.mkfifo(strange)
    elif kind == "directory":
        strange.mkdir()
    else:
        targets = {"zeros": "/dev/zero", "nowhere": tmp_path / "gone", "loop": strange}
        strange.symlink_to(targets.get(kind, "/proc/self/mem"))
    name, said = newest(run)
    assert name == "epoch-0002.pt"
    assert len(said) == 1
    assert str(strange) in said[0]
    assert run.next_serial() == 3
    # It is neither removed nor does it count among those that are kept.
    kept = Folder(tmp_path, keep=1)
    kept.remove_old()
    assert {p.name for p in tmp_path.glob("epoch-*")} == {"epoch-0002.pt", "epoch-0003.pt"}


def test_a_link_is_followed_only_where_nobody_else_can_have_made_it(tmp_path, payload):
    run = two_checkpoints(tmp_path / "a", payload)
    elsewhere = tmp_path / "elsewhere.pt"
    (tmp_path / "a" / "epoch-0002.pt").rename(elsewhere)
    (tmp_path / "a" / "epoch-0002.pt").symlink_to(elsewhere)
    assert newest(run) == ("epoch-0002.pt", [])
    (tmp_path / "a").chmod(0o777)
    with pytest.warns(UserWarning, match=r"a can be written by others \(mode 0777\)"):
        run.open()
    name, said = newest(run)
    assert name == "epoch-0001.pt"
    assert "epoch-0002.pt is a symbolic link, not a file" in said[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Folder(tmp_path / "a", folder_mode=0o770).open()  # wished so


@pytest.mark.parametrize("kind", ["symbolic link", "name", "pipe", "folder", "device"])
def test_the_lock_is_a_file_and_nothing_that_it_leads_to_is_changed(tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    lock = tmp_path / "run" / ".lock"
    lock.parent.mkdir()
    if kind == "symbolic link":
        lock.symlink_to(precious)
    elif kind == "name":
        lock.hardlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to("/dev/null")
        kind = "symbolic link"
    with pytest.raises(CheckpointError, match=rf"\.lock is .*{kind}"):
        Folder(tmp_path / "run").open()
    assert precious.read_text() == "mine"


def test_what_is_left_is_said_as_it_is(tmp_path, payload):
    run = two_checkpoints(tmp_path / "run", payload)
    (tmp_path / "run" / "epoch-0003.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"could not be written .* still holds 3 checkpoints"):
        run.put(payload, ["epoch-0003.pt"], Label(3, 3, 3))
    for each in (tmp_path / "run").iterdir():
        each.rmdir() if each.is_dir() else each.unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(CheckpointError, match="The folder is gone, and the earlier checkpoints"):
        run.put(payload, ["epoch-0003.pt"], Label(3, 3, 3))
    run.close()


def test_latest_being_a_folder_is_said_at_the_start_and_by_its_name(tmp_path, payload):
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"latest is a folder"):
        Folder(tmp_path).open()
    with pytest.raises(CheckpointError, match=r"epoch-0001.pt is written, but latest could not be"):
        Folder(tmp_path).put(payload, ["epoch-0001.pt"], Label(1, 1, 1))
    assert file.read(tmp_path / "epoch-0001.pt")["torchbearer_ddp"]


def labelled(path, payload, label):
    """A file with any label, whose checksums are right."""
    torch.save(payload, path)
    with zipfile.ZipFile(path, "a") as archive:
        label = label.replace(b"RECORDS", str(file._records_crc(archive)).encode())
        archive.comment = file._MARK + label + b" %08x" % zlib.crc32(label)


@pytest.mark.parametrize("serial", [b"null", b'"9"', b"[1]", b"1e400", b"9" * 300, b"true", b"{}"])
def test_a_label_with_an_odd_serial_is_not_the_newest(tmp_path, payload, serial):
    run = two_checkpoints(tmp_path, payload)
    label = b'{"serial": %s, "epochs": 9, "step": 9, "records": RECORDS}' % serial
    labelled(tmp_path / "epoch-0009.pt", payload, label)
    name, said = newest(run)
    assert name == "epoch-0002.pt" if said else serial.isdigit()
    assert run.next_serial() >= 3


def test_odd_parts_are_refused_or_put_back(tmp_path, payload):
    """Whatever is at any place: a run continues, from this file or the older one, or says why."""
    run = two_checkpoints(tmp_path, payload)
    found = list(places(payload))[::2]
    # In the middle of an epoch, so that every kind of part is used.
    outcomes = {"newest": 0, "older": 0, "refused": 0}
    for number, path in enumerate(found):
        odd = replaced(payload, path, ODD[number % len(ODD)])
        run.put(odd, ["epoch-0003.pt"], Label(3, 3, 3))
        made = trial(Checkpoint(tmp_path, every_epochs=None))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made.run(1, verbose=0)
            except CheckpointError as error:
                said = str(error)
                outcomes["refused"] += "epoch-0003.pt" in said and "\n" not in said
            else:
                used = (tmp_path / "latest").readlink().name
                outcomes["newest" if used == "epoch-0003.pt" else "older"] += 1
        run.close()
    assert all(outcomes.values()), outcomes
    assert sum(outcomes.values()) == len(found)


def rich_trial(*callbacks):
    """One with every kind of state: statistics, moments, metrics, a scheduler, an early stop."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    made = trial(
        *data_parallel(),
        EarlyStopping("running_loss", patience=5, step_on_batch=True),
        StepLR(2),
        *callbacks,
        model=model,
        optimizer=torch.optim.Adam,
        criterion=torch.nn.CrossEntropyLoss,
        metrics=["acc", "loss"],
    )
    data = torch.utils.data.TensorDataset(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    return made.with_train_generator(torch.utils.data.DataLoader(data, 2))


#: Of another kind than anything that a run saves, but for texts, lists and dicts.
STRANGE_KINDS = (b"x", {1, "a"}, "x", torch.eye(2).to_sparse(), [["x"]], {"a": {}})
#: What is no part of a file but another setting, value or history, and goes as what it is.
FREE = ("values", "history", "batch_size", "name", "_kwargs", "_batch_size", "_step_size")


def test_an_odd_part_of_a_rank_is_found_while_an_older_file_can_be_used(tmp_path):
    rich_trial(Checkpoint(tmp_path / "a", every_steps=1, keep=None)).run(1, verbose=0)
    payload = file.read(tmp_path / "a" / "step-0000002.pt")
    run = two_checkpoints(tmp_path / "b", payload)
    packed = wire.decode(payload["torchbearer_ddp"]["ranks"][0]["packed"])
    found = [path for path in places(packed) if not set(path) & set(FREE)]
    used, refused = [], {}
    for number, path in enumerate(found):
        part = replaced(packed, path, STRANGE_KINDS[number % len(STRANGE_KINDS)])
        odd = replaced(payload, ("torchbearer_ddp", "ranks", 0, "packed"), wire.encode(part))
        run.put(odd, ["epoch-0003.pt"], Label(3, 3, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                rich_trial(Checkpoint(tmp_path / "b", every_epochs=None)).run(1, verbose=0)
                used.append((tmp_path / "b" / "latest").readlink().name)
            except CheckpointError as error:
                refused[path[-1]] = str(error)
        run.close()
    assert len(used) > 60
    assert used.count("epoch-0002.pt") > 8 * used.count(
        "epoch-0003.pt"
    )  # what is of no consequence
    assert refused == {}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("optimizer", "param_groups", 0, "lr"), "x", "'lr' of its group 0 is 'x'"),
        (("optimizer", "param_groups", 0, "amsgrad"), 7, "'amsgrad' of its group 0 is 7"),
        (("optimizer", "param_groups", 0, "lr"), torch.ones(2), "not one number"),
        (("optimizer", "state", 0, "exp_avg"), None, "'exp_avg' of its parameter 0 is None"),
        (("torchbearer_ddp", "callbacks", "EarlyStopping", "best"), "x", "is 'x', not a number"),
        (("torchbearer_ddp", "callbacks", "EarlyStopping", "best"), torch.ones(2), "one number"),
        (("torchbearer_ddp", "callbacks", "EarlyStopping", "wait"), None, "None, not a number"),
        (("torchbearer_ddp", "callbacks", "EarlyStopping"), [], "callback EarlyStopping"),
        (("torchbearer_ddp", "callbacks", "Checkpoint"), {"best": {"loss": "x"}}, "not a number"),
        (("torchbearer_ddp", "schedulers", "StepLR", "base_lrs"), 7, "is 7, not a list"),
        # What exists only after the start of the scheduler's callback.
        (("torchbearer_ddp", "schedulers", "StepLR", "base_lrs"), [], "not a list of 1"),
        (("torchbearer_ddp", "schedulers", "StepLR", "step_size"), "x", "scheduler of StepLR"),
        (("torchbearer_ddp", "schedulers", "StepLR", "gamma"), torch.ones(2), "not one number"),
        (("torchbearer_ddp", "schedulers", "StepLR", "gamma"), None, "is None, not a number"),
        (("torchbearer_ddp", "schedulers", "StepLR", "last_epoch"), 2.5, "not a whole number"),
        (("torchbearer_ddp", "schedulers", "StepLR"), {"a": 1}, "not a whole number"),
        (("torchbearer_ddp", "schedulers"), {}, "scheduler of StepLR"),
        (
            ("optimizer", "param_groups", 0, "initial_lr"),
            torch.ones(2),
            "'initial_lr' of its group",
        ),
    ],
)
def test_what_cannot_be_put_back_is_said_and_an_older_file_is_used(tmp_path, place, value, words):
    rich_trial(Checkpoint(tmp_path, every_steps=1, keep=None)).run(1, verbose=0)
    newest, older = tmp_path / "step-0000002.pt", tmp_path / "step-0000001.pt"
    for path in set(tmp_path.glob("*.pt")) - {newest, older}:
        path.unlink()
    file.write(newest, replaced(file.read(newest), place, value), Label(9, 0, 2))
    with pytest.warns(UserWarning, match=rf"step-0000002.*Instead, {older} is used") as said:
        rich_trial(Checkpoint(tmp_path)).run(1, verbose=0)
    assert any(words in str(each.message) for each in said)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        rich_trial(Checkpoint(tmp_path / "b", resume=newest)).run(1, verbose=0)


def test_a_file_that_fits_nowhere_is_refused_with_what_is_wrong_with_the_newest(tmp_path):
    trial(Checkpoint(tmp_path, every_steps=1)).run(3, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=r"epoch-0003.pt: .* is not of this model"):
            trial(Checkpoint(tmp_path), model=torch.nn.Linear(2, 3)).run(3, verbose=0)


def test_a_file_of_another_model_is_named_when_it_is_loaded(tmp_path):
    torch.save({"weight": torch.ones(5)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other.pt: The checkpoint is not of this model"):
        Checkpoint.load(trial(), tmp_path / "other.pt")


class Refusing(Callback):
    """A callback whose state one rank alone cannot take back."""

    def state_dict(self):
        return {"epochs": self.epochs}

    def on_start_epoch(self, state):
        self.epochs = state[torchbearer.EPOCH]

    def load_state_dict(self, state_dict):
        if state_dict["epochs"] == 1 and rank() == 1:
            raise KeyError("the user's own")


def resume_where_one_rank_refuses(path):
    said = []
    for epochs in (2, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = trial(*data_parallel(), Checkpoint(path), Refusing())
            made.run(epochs, verbose=0)
        said = [str(each.message) for each in caught if "Instead" in str(each.message)]
    return len(made.state[torchbearer.HISTORY]), made.state[torchbearer.MODEL].weight, said


def test_what_one_rank_cannot_put_back_is_passed_over_by_all(tmp_path):
    found = run_ranks(resume_where_one_rank_refuses, 2, (tmp_path,))
    (_, weight, said), (_, other, silent) = found
    assert torch.equal(weight, other)
    assert [each[0] for each in found] == [3, 3]
    assert len(said) == 1
    assert "Rank 1: " in said[0]
    assert "the user's own" in said[0]
    assert said[0].endswith(f"Instead, {tmp_path / 'epoch-0001.pt'} is used.")
    assert silent == []


@pytest.mark.parametrize("name", ["epoch", "generators", "metrics", "history"])
def test_the_part_of_a_rank_is_checked_before_the_file_is_chosen(tmp_path, payload, name):
    run = two_checkpoints(tmp_path, payload)
    packed = payload["torchbearer_ddp"]["ranks"][0]["packed"]
    part = {**wire.decode(packed), name: 7}
    odd = replaced(payload, ("torchbearer_ddp", "ranks", 0, "packed"), wire.encode(part))
    run.put(odd, ["epoch-0003.pt"], Label(3, 3, 3))
    chosen, said = newest(run)
    assert chosen == "epoch-0002.pt"
    assert f"the part of rank 0 in {tmp_path / 'epoch-0003.pt'}[{name!r}] is 7" in said[0]


def test_a_file_of_a_newer_version_is_refused_and_not_passed_over(tmp_path, payload):
    run = two_checkpoints(tmp_path, payload)
    newer = replaced(payload, ("torchbearer_ddp", "format"), 99)
    run.put(newer, ["epoch-0003.pt"], Label(3, 3, 3))
    with pytest.raises(CheckpointError, match="has format 99, but this version"):
        source.find(run, "auto")


def small_and_large(path, kind):
    """A few bytes that stand for far more."""
    if kind == "compressed":
        torch.save({"model": {"weight": torch.zeros(2**20)}}, path)
        with zipfile.ZipFile(path) as archive:
            records = {record: archive.read(record) for record in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for record, data in records.items():
                archive.writestr(record, data)
        return
    model = {"weight": torch.zeros(1).expand(2**48)}
    if kind == "nested":
        model = {"weight": []}
        for _ in range(40):
            model = {"weight": [model, model]}
    elif kind == "endless":
        model["weight"] = endless = []
        endless.append(endless)
    torch.save({"model": model}, path)


@pytest.mark.parametrize("kind", ["compressed", "expanded", "nested", "endless"])
def test_a_small_file_that_stands_for_a_large_one(tmp_path, kind):
    path = tmp_path / "a.pt"
    small_and_large(path, kind)
    started = time.process_time()
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        source.read_any(path, trust=False)
    assert time.process_time() - started < SECONDS


def forged(path, pickled, *, legacy):
    """A file that torch would load, with another pickle in it."""
    torch.save(1, path, _use_new_zipfile_serialization=not legacy)
    if legacy:
        first = b"".join(pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, {}))
        path.write_bytes(first + pickled)
        return
    with zipfile.ZipFile(path) as archive:
        records = {record: archive.read(record) for record in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for record, data in records.items():
            archive.writestr(record, pickled if record.endswith("data.pkl") else data)


def a_key_of_tuples(depth):
    """A dict with one key, which is hashed in 2 ** depth steps."""
    return b"\x80\x02}K\x01" + depth * b"q\x00h\x00\x86" + b"K\x01s."


def encoded_again(times):
    """Bytes that are written in base 16 so many times."""
    start = b"\x80\x02" + times * b"c_codecs\nencode\n" + b"c_codecs\nencode\n"
    first = b"X\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R"
    return start + first + times * b"X\x03\x00\x00\x00hex\x86R" + b"."


BOMBS = {
    "a key of tuples": (a_key_of_tuples(60), "a tuple of too many parts"),
    "wide tuples": (
        b"\x80\x02}K\x01" + 9 * (b"q\x00(" + 99 * b"h\x00" + b"t") + b"K\x01s.",
        "a tuple of too many parts",
    ),
    "encoded again": (encoded_again(40), "a tuple of too many parts"),
    "bytearray": (
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + (2**42).to_bytes(6, "little") + b"\x85R.",
        "holds a bytearray",
    ),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_pickle_that_would_take_any_time_or_memory(tmp_path, kind, legacy):
    path = tmp_path / "a.pt"
    pickled, words = BOMBS[kind]
    forged(path, pickled, legacy=legacy)
    started = time.process_time()
    with pytest.raises(CheckpointError, match=rf"a\.pt .*{words}"):
        source.read_any(path, trust=False)
    assert time.process_time() - started < SECONDS


def test_pickles_that_take_little_are_let_be(tmp_path):
    pair = (0.9, 0.999)
    values = {
        "shared": [(pair, pair)] * 100,
        "bytes": (b"x" * 1000, b"y" * 3000),
        "keys": {(1, (2, 3)): (pair,)},
        "tensors": tuple(torch.nn.Parameter(torch.ones(1)) for _ in range(300)),
    }
    for legacy in (False, True):
        torch.save(values, tmp_path / "a", _use_new_zipfile_serialization=not legacy)
        found = file.read_foreign(tmp_path / "a")
        assert [found[name] for name in values] == list(values.values())
    forged(tmp_path / "b", a_key_of_tuples(5), legacy=False)
    assert list(file.read_foreign(tmp_path / "b").values()) == [1]


def a_csv():
    text = io.StringIO()
    csv.writer(text).writerows([["a", "b"], [1, 2]])
    return text.getvalue().encode()


def a_cut_legacy_file():
    stream = io.BytesIO()
    torch.save(torch.nn.Linear(2, 1).state_dict(), stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()[:-5]


def saved(value, *, legacy=False):
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


LINEAR = torch.nn.Linear(2, 1).state_dict()
STRANGE = {
    "empty": lambda: b"",
    "csv": a_csv,
    "cut legacy file": a_cut_legacy_file,
    "sparse": lambda: saved({**LINEAR, "weight": torch.ones(1, 2).to_sparse()}),
    "sparse csr": lambda: saved({**LINEAR, "weight": torch.ones(1, 2).to_sparse_csr()}),
    "callback_list: {}": lambda: saved({"model": LINEAR, "callback_list": {}}),
    "callback_list: []": lambda: saved({"model": LINEAR, "callback_list": []}),
    "callback_list: None in it": lambda: saved(
        {"model": LINEAR, "callback_list": {"callback_types": [None], "callback_states": [{}]}}
    ),
    "model: None": lambda: saved({"model": None}),
    "model: list": lambda: saved({"model": [1]}),
    "names that are numbers": lambda: saved({"model": {1: torch.ones(1)}}),
    "history: 7": lambda: saved({"model": LINEAR, "history": 7}),
    "history: [7]": lambda: saved({"model": LINEAR, "history": [7]}),
    "optimizer: 7": lambda: saved({"model": LINEAR, "optimizer": 7}),
    "optimizer: {}": lambda: saved({"model": LINEAR, "optimizer": {}}),
    "optimizer of another": lambda: saved(
        {"model": LINEAR, "optimizer": {"state": {0: 7}, "param_groups": [{"params": [0, 1]}]}}
    ),
    "section: 7": lambda: saved({"model": LINEAR, "torchbearer_ddp": 7}),
    "section with odd callbacks": lambda: saved(
        {"model": LINEAR, "torchbearer_ddp": {"callbacks": 7}}
    ),
    "a file of ours in torch's older form": lambda: saved(
        {"model": {}, "torchbearer_ddp": {"callbacks": {}, "ranks": []}}, legacy=True
    ),
    "a tensor": lambda: saved(torch.ones(2)),
    "a number": lambda: saved(7),
    "not numbers": lambda: saved({**LINEAR, "weight": "x"}),
    "zeros": lambda: bytes(10_000),
    "a momentum of another shape": lambda: saved(
        {
            "model": LINEAR,
            "optimizer": {
                "state": {0: {"momentum_buffer": torch.ones(3)}},
                "param_groups": [{"params": [0, 1]}],
            },
        }
    ),
    "another dtype": lambda: saved({**LINEAR, "weight": torch.ones(1, 2, dtype=torch.complex64)}),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_loading_what_is_no_checkpoint(tmp_path, kind):
    path = tmp_path / "a.pt"
    path.write_bytes(STRANGE[kind]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(CheckpointError):
            Checkpoint.load(trial(), path)
            assert kind in ("another dtype", "section: 7"), "nothing was refused"
        if kind == "another dtype":
            return
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.load(trial(), path)
    assert "\n" not in str(caught.value)


def test_loading_special_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(CheckpointError, match=f"is {words}, not a file"):
            Checkpoint.load(trial(), path)
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(CheckpointError):
            Checkpoint.load(trial(), path)


def test_a_file_of_ours_whose_label_is_damaged_is_verified_all_the_same(tmp_path, payload):
    path = tmp_path / "epoch-0001.pt"
    file.write(path, payload, Label(1, 1, 1))
    content = bytearray(path.read_bytes())
    content[-10] ^= 1  # in the label
    path.write_bytes(content)
    Checkpoint.load(trial(), path)
    weight = content.index(payload["model"]["weight"].numpy().tobytes())
    content[weight] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: the CRC-32 of its"):
        Checkpoint.load(trial(), path)


def test_sparse_indices_beyond_the_tensor_are_refused(tmp_path):
    weight = torch.sparse_coo_tensor(torch.tensor([[0], [7]]), torch.ones(1), (1, 2))
    stream = io.BytesIO()
    torch.save({"weight": weight}, stream)
    (tmp_path / "a.pt").write_bytes(stream.getvalue())
    with pytest.raises(CheckpointError, match="index"):
        file.read_foreign(tmp_path / "a.pt")


def writers():
    return [t for t in threading.enumerate() if "checkpoint" in t.name]


def test_a_writer_s_thread_ends_with_its_run(tmp_path):
    kept = []
    for number in range(30):
        kept.append(trial(Checkpoint(tmp_path / str(number))))
        kept[-1].run(1, verbose=0)
        assert writers() == []
    kept[0].run(2, verbose=0)  # its writer starts again
    assert (tmp_path / "0" / "epoch-0002.pt").exists()

    @torchbearer.callbacks.on_end_epoch
    def fail(state):
        raise OSError("the user's own")

    for number in range(30, 34):
        kept.append(trial(Checkpoint(tmp_path / str(number), every_steps=1), fail))
        with pytest.raises(OSError, match="the user's own"):
            kept[-1].run(1, verbose=0)
        assert len(writers()) <= 1


def test_the_parts_of_a_file_are_all_of_the_form(payload):
    form.check_payload(payload, "it")
    assert payload["torchbearer_ddp"]["format"] == form.FORMAT
