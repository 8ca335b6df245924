"""What ``prove`` finds: nothing in scripts that are right, and the reason in those that are not."""

from __future__ import annotations

import dataclasses
import functools
import json
from html.parser import HTMLParser

import pytest
import torch

from tests.commands.prove_scripts import CORRECT, FAULTS, script
from tests.commands.proving import PoolRunner
from tests.projects.moving import PROGRAMS, moved
from tests.ranks import RankPool
from torchbearer_ddp.commands.proving import html, numbers, text
from torchbearer_ddp.commands.proving.comparison import LIMIT, unreproducible
from torchbearer_ddp.commands.proving.job import RANDOM, Job
from torchbearer_ddp.commands.proving.proof import CouldNotRun, Proof, prove
from torchbearer_ddp.commands.proving.sketch import distance, norm, sketch

#: Programs that differ by nature: a loss that couples its samples, random numbers for each batch.
DIFFERENT = ("balanced", "contrastive", "mixing", "segmentation")
#: Programs whose batches a rank takes whole.
WHOLE_BATCHES = ("stopping", "zipped")
#: Those that also run on three ranks.
ON_THREE = ("batch_of_each_rank", "padded", "stopping")
STEPS, ROUNDINGS = 8, 2


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with RankPool(1) as one, RankPool(2) as two, RankPool(3) as three:
        yield PoolRunner(tmp_path_factory.mktemp("proofs"), {1: one, 2: two, 3: three})


@pytest.fixture(scope="module")
def proof_of(runner):
    """Proves a script, once for all tests that look at it."""

    @functools.cache
    def proof(source: str, world_size: int = 2, **changes) -> Proof:
        job = Job(runner.script(source), world_size=world_size, steps=STEPS)
        return prove(runner, dataclasses.replace(job, **changes), ROUNDINGS)

    return proof


def correct_script(name: str) -> str:
    if name in CORRECT:
        return CORRECT[name]
    return moved(name, "" if name in WHOLE_BATCHES else "global_batch=True")


PROVEN = [*(name for name in PROGRAMS if name not in DIFFERENT), *CORRECT]
CASES = [*((name, 2) for name in PROVEN), *((name, 3) for name in ON_THREE)]


def test_there_are_enough_correct_scripts():
    assert len(PROVEN) >= 20


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_nothing_is_found_in_a_correct_script(proof_of, name, world_size, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    proof = proof_of(correct_script(name), world_size)
    assert proof.is_equal, "\n".join(text.lines(proof))
    assert proof.reasons == []
    assert proof.comparison.steps >= 8
    stages = {each.stage for each in proof.comparison.differences}
    assert stages == {"start", "loss", "gradient", "parameter", "metric"}
    # What rounding does is a fraction of the bound.
    assert proof.comparison.worst().ratio < LIMIT / 2


@pytest.mark.parametrize("name", FAULTS)
def test_the_reason_is_recognised(proof_of, name):
    source, kinds = FAULTS[name]
    proof = proof_of(source)
    assert not proof.is_equal
    assert [each.kind for each in proof.reasons] == kinds, "\n".join(text.lines(proof))
    first = proof.comparison.first
    assert first is None or first.step == 0


def test_a_loss_that_is_alike_by_chance_hides_no_other_numbers():
    def recording(loss, gradient):
        gradients = {"weight": sketch(torch.full((4,), gradient))}
        step = {"trial": 0, "loss": loss, "gradients": gradients, "parameters": {}}
        step["rows"] = torch.arange(4)
        facts = {"eps": torch.finfo(torch.float32).eps}
        return {"initial": [], "steps": [step], "passes": [], "facts": facts}

    alone = recording(0.7, 0.5)
    assert unreproducible(alone, recording(0.7, 0.5)) is None
    assert unreproducible(alone, recording(0.70001, 0.500001)) is None
    assert unreproducible(alone, recording(0.8, 0.5)) == "the loss at step 0"
    assert unreproducible(alone, recording(0.70001, 0.6)) == "the gradient at step 0"


@pytest.mark.parametrize("name", ["batch_norm", "dropout", "both", "coupled", "sum_taken_for_mean"])
def test_what_one_process_can_imitate_is_confirmed(proof_of, name):
    proof = proof_of(FAULTS[name][0])
    assert all(each.is_confirmed for each in proof.reasons)
    assert proof.explained is not None
    assert proof.explained.is_equal
    assert proof.explained.worst().ratio < LIMIT / 2
    assert "Apart from that all differences are rounding." in "\n".join(text.lines(proof))


def test_reasons_on_three_ranks_are_confirmed_too(proof_of):
    proof = proof_of(FAULTS["both"][0].replace("data, 12", "data, 15"), 3)
    assert [each.kind for each in proof.reasons] == ["batch_norm", "dropout"]
    assert proof.explained is not None


def test_random_layers_compare_by_the_sample(proof_of):
    proof = proof_of(FAULTS["dropout"][0], imitates=(RANDOM,))
    assert proof.is_equal
    assert any("numbers that belong to the sample" in note for note in proof.notes)


def test_half_precision_is_named(proof_of):
    for name in ("bf16", "fp16"):
        (note, *_) = proof_of(CORRECT[name]).notes
        assert note.startswith("MixedPrecision computed in single precision here")


def test_random_augmentation_is_named(proof_of):
    notes = proof_of(CORRECT["augmented"]).notes
    assert any("the data set draws random numbers" in note for note in notes)
    assert not any("draws random" in note for note in proof_of(CORRECT["adam"]).notes)


WRONG_GRADIENT = """\
class Wrong(torchbearer.callbacks.Callback):
    def on_backward(self, state):
        if world_size() > 1 and state[torchbearer.BATCH] == 4:
            {change}"""


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ("[p.grad.mul_(1.001) for p in model.parameters()]", "gradient"),
        ("model[0].bias.data.add_(1e-4)", "parameter"),
    ],
)
def test_a_small_fault_at_one_step_is_found(proof_of, change, stage):
    before = WRONG_GRADIENT.format(change=change)
    proof = proof_of(script(before=before, callbacks="Wrong(), "))
    first = proof.comparison.first
    assert first is not None
    assert (first.step, first.stage) == (4, stage)
    assert proof.reasons == []
    assert "No reason recognised" in "\n".join(text.lines(proof))


def test_ranks_that_part_are_named(proof_of):
    before = WRONG_GRADIENT.format(change="model[0].bias.data.add_(1e-2 * rank())")
    proof = proof_of(script(before=before, callbacks="Wrong(), "))
    (reason,) = proof.reasons
    assert reason.kind == "replicas"
    assert "after step 4 the parameters of rank 1 are not those of rank 0" in reason.text
    # At the end of the epoch SyncModel has ended the run.
    assert any("DesyncError" in note for note in proof.notes)


WRITING = """\
from pathlib import Path
from torchbearer.callbacks import Best, CSVLogger
from torchbearer_ddp import Checkpoint, TensorBoard

folder = Path({folder!r})"""


def test_files_of_the_user_stay_as_they_are(proof_of, tmp_path):
    saved = tmp_path / "model.pt"
    torch.save({"precious": torch.ones(2)}, saved)
    (tmp_path / "log.csv").write_text("precious\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    source = script(
        imports=WRITING.format(folder=str(tmp_path)),
        # A checkpoint that is demanded, and not there.
        callbacks="Checkpoint(folder / 'runs', resume=True), TensorBoard(folder / 'logs'), "
        "Best(str(folder / 'best.pt')), CSVLogger(str(folder / 'log.csv')), ",
        run="trial.run(1)\ntorch.save(model.state_dict(), folder / 'model.pt')\n"
        "assert '0.weight' in torch.load(folder / 'model.pt')",
    )
    proof = proof_of(source)
    assert proof.is_equal
    assert [note for note in proof.notes if "failed" in note] == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_script_that_fails_after_equal_steps_is_not_proven(proof_of):
    failing = script(run="trial.run(1)\nraise ValueError('too late')")
    with pytest.raises(CouldNotRun, match=r"after 8 steps, which were equal: ValueError: too late"):
        proof_of(failing, steps=9)


# What is shown.


class _Checked(HTMLParser):
    """Counts tags, and refuses what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & dict(attrs).keys()
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("name", "badge", "pictures"), [("adam", "equal", 3), ("dropout", "differs", 4)]
)
def test_the_page_is_whole(proof_of, tmp_path, name, badge, pictures):
    proof = proof_of(CORRECT.get(name) or FAULTS[name][0])
    path = tmp_path / "proof.html"
    html.write(proof, str(path))
    page = path.read_text()
    parser = _Checked()
    parser.feed(page)
    assert parser.open == []
    assert parser.count["svg"] == pictures
    assert parser.count["circle"] == pictures * STEPS
    assert f'<span class="badge">{badge}</span>' in page
    assert ('class="beyond" cx' in page) == (badge == "differs")


def test_all_numbers_are_plain_data(proof_of):
    found = json.loads(json.dumps(numbers.of(proof_of(FAULTS["coupled"][0])), allow_nan=False))
    assert not found["equal"]
    assert found["reasons"][0]["kind"] == "coupled_loss"
    assert found["first"]["step"] == 0
    assert found["explained"]["first"] is None
    first = found["differences"][0]
    assert first.keys() == {"step", "stage", "name", "size", "found", "rounding", "ratio"}


# The sketches.


def test_a_sketch_tells_the_distance_of_large_tensors():
    torch.manual_seed(0)
    one = torch.randn(300, 1000)
    other = one.clone()
    other[17, 5] += 0.5
    assert distance(sketch(one), sketch(other)) == pytest.approx(0.5, rel=1e-3)
    noise = 1e-6 * torch.randn_like(one)
    far = distance(sketch(one), sketch(one + noise))
    assert far == pytest.approx(float((one + noise - one).norm()), rel=0.15)
    assert norm(sketch(one)) == pytest.approx(float(one.norm()), rel=0.15)
    assert sketch(one).numel() < 2000
    assert distance(sketch(one), sketch(one)) == 0


def test_a_small_tensor_is_kept_whole():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(sketch(values), values.flatten())
    assert distance(sketch(values), sketch(values + 3e-7)) > 0
    assert distance(sketch(values), sketch(values[0])) == float("inf")
    broken = torch.tensor([float("nan"), 1.0])
    assert distance(broken, broken) == 0
    assert distance(broken, torch.ones(2)) == float("inf")
