"""Tensors of every layout: sent and copied with their strides, written into whatever they are."""

import copy
import io

import pytest
import torch

from torchbearer_ddp.checkpoints.snapshot import Snapshot
from torchbearer_ddp.group import layouts, wire

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype)", "ignore:Sparse invariant")


def through_the_wire(tensor):
    return wire.decode(wire.encode([b"odd", tensor]))[1]


def through_a_file(snapshot):
    def copy(tensor):
        stream = io.BytesIO()
        torch.save(snapshot.copy({"it": tensor}, "checkpoint"), stream)
        stream.seek(0)
        return torch.load(stream, weights_only=True)["it"]

    return copy


WAYS = {
    "wire": through_the_wire,
    "copied": through_a_file(Snapshot()),
    "borrowed": through_a_file(Snapshot(borrow=True)),
}
STRIDED = {
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "inside another": torch.randn(6, 6, 6)[1:3, :, ::2].permute(2, 0, 1),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "empty": torch.empty(2, 0, 3).transpose(0, 2),
    "number": torch.tensor(2.5),
    "float8": torch.randn(3, 2).to(torch.float8_e4m3fn).t(),
    "uint16": torch.tensor([1, 65535]).to(torch.uint16),
    "conjugate": torch.randn(3, 2, dtype=torch.complex64).t().conj(),
}
SPARSE = {
    "coo": torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 3)).coalesce(),
    "coo with repeats": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3)),
    "csr": torch.eye(3).to_sparse_csr(),
    "csc": torch.eye(3).to_sparse_csc(),
    "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
}


def bits(tensor):
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STRIDED)
def test_strided_tensors_come_back_bitwise_in_their_order(name, way):
    tensor = STRIDED[name]
    back = WAYS[way](tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    if tensor.numel():
        assert torch.equal(bits(back), bits(tensor))
        assert layouts.dense(back).stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_come_back_sparse(name, way):
    tensor = SPARSE[name]
    back = WAYS[way](tensor)
    assert back.layout is tensor.layout
    assert layouts.is_coalesced(back) == layouts.is_coalesced(tensor)
    for found, wanted in zip(layouts.sparse_parts(back), layouts.sparse_parts(tensor), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(back.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_taken_apart_is_refused_by_name(way):
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
    with pytest.raises(Exception, match=r"\[(1|'it')\] is a torch.Tensor"):
        WAYS[way](nested)


@pytest.mark.parametrize("name", [*STRIDED, *SPARSE])
def test_every_tensor_can_be_overwritten(name):
    value = (STRIDED | SPARSE)[name]
    target = value.clone() if name in SPARSE else torch.zeros_like(value)
    if name == "expanded":
        target = torch.zeros(1, 1).expand(3, 4)
    if name == "csr":
        target = torch.ones(3, 3).to_sparse_csr()  # with more elements
    if name == "bsc":
        target = torch.ones(4, 4).to_sparse_bsc((2, 2))
    alias = target
    layouts.overwrite(target, value)
    assert torch.equal(bits(alias.to_dense()), bits(value.to_dense()))


def test_the_next_copy_uses_the_same_memory():
    snapshot, tensor = Snapshot(), STRIDED["channels_last"].clone()
    first = snapshot.copy({"it": tensor}, "checkpoint")["it"]
    tensor.add_(1)
    second = snapshot.copy({"it": tensor}, "checkpoint")["it"]
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second, tensor)
    other = snapshot.copy({"it": tensor.contiguous()}, "checkpoint")["it"]
    assert other.stride() == tensor.contiguous().stride()


def test_an_optimizer_s_state_gets_the_strides_of_its_parameters():
    """Also from a file whose tensors are contiguous: earlier versions wrote such files."""
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    expected = saved["state"][0]["exp_avg"].clone()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].contiguous()
    layouts.load_optimizer(optimizer, saved)
    held = optimizer.state[model.weight]["exp_avg"]
    assert held.stride() == model.weight.stride()
    assert torch.equal(held, expected)


def stepped(optimizer, model):
    """A step, after which there is a state."""
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_a_rate_in_a_tensor_stays_that_tensor():
    """A captured graph reads the memory of the rate and of the state."""
    model = torch.nn.Linear(3, 2)
    rate, beta = torch.tensor(0.1), torch.tensor(0.9)
    made = {"betas": (beta, torch.tensor(0.99)), "fused": True}
    optimizer = stepped(torch.optim.Adam(model.parameters(), lr=rate, **made), model)
    saved = copy.deepcopy(optimizer.state_dict())
    average = optimizer.state[model.weight]["exp_avg"]
    expected = average.clone()
    optimizer.param_groups[0]["capturable"] = True  # it takes no steps on the CPU
    rate.fill_(7.0)
    beta.fill_(7.0)
    average.fill_(7.0)
    layouts.load_optimizer(optimizer, saved)
    (group,) = optimizer.param_groups
    assert group["lr"] is rate
    assert group["betas"][0] is beta
    assert optimizer.state[model.weight]["exp_avg"] is average
    assert (rate.item(), beta.item()) == (pytest.approx(0.1), pytest.approx(0.9))
    assert torch.equal(average, expected)
    assert saved["param_groups"][0]["lr"] is not rate


@pytest.mark.parametrize(
    "kind",
    [
        each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and each not in (torch.optim.Optimizer, torch.optim.LBFGS)
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_state_of_every_optimizer_of_torch_is_let_in(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=kind.__name__ != "Muon")
    sparse = {"grad": torch.ones(2, 3).to_sparse()} if kind is torch.optim.SparseAdam else {}
    parameters = [model.weight] if sparse or kind.__name__ == "Muon" else model.parameters()
    first = kind(parameters, lr=0.01)
    if sparse:
        model.weight.grad = sparse["grad"]
        first.step()
    else:
        stepped(first, model)
    parameters = [model.weight] if sparse or kind.__name__ == "Muon" else model.parameters()
    second = kind(parameters, lr=0.02)
    layouts.load_optimizer(second, first.state_dict())
    assert second.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"capturable": True}, {"capturable": False}),  # saved on a GPU, continued on the CPU
        ({"fused": True}, {"foreach": True}),
        ({"foreach": True}, {"fused": True}),
        ({"lr": torch.tensor(0.5), "fused": True}, {"lr": 0.1, "foreach": True}),
        ({"lr": 0.5}, {"lr": torch.tensor(0.1), "fused": True}),
    ],
)
def test_how_a_step_is_computed_is_the_live_optimizer_s_choice(then, now):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    saved = stepped(torch.optim.Adam(model.parameters(), lr=0.5), model).state_dict()
    saved["param_groups"][0].update(then)
    optimizer = torch.optim.Adam(model.parameters(), **now)
    layouts.load_optimizer(optimizer, saved)
    (group,) = optimizer.param_groups
    chosen = {name: group[name] for name in ("fused", "foreach", "capturable")}
    assert chosen == {name: now.get(name, group[name]) for name in chosen}
    assert chosen["capturable"] is False
    assert type(group["lr"]) is type(now.get("lr", 0.5))
    assert float(group["lr"]) == 0.5
    stepped(optimizer, model)
    assert int(optimizer.state[model.weight]["step"]) == 2
