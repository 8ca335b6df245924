"""Gradients of several batches, added up in the precision of their parameters."""

import random

import pytest
import torch
import torchbearer
from torch import nn
from torchbearer import Trial

from tests.ranks import ranks
from torchbearer_ddp import SyncGradients, SyncModel
from torchbearer_ddp.group import collectives

#: Gradients of about a thousand: times the ratio of two batch sizes they leave the range of fp16.
SCALE = 8000.0


class Net(nn.Module):
    """A layer in half precision, whose result is in single precision."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2).to(dtype)

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


def loss(y_pred, y_true):
    return SCALE * nn.functional.mse_loss(y_pred, y_true)


@pytest.mark.parametrize("sizes", [(256, 2), (2, 256), (256, 2, 64), (2, 256, 2)])
def test_batches_of_very_different_sizes_stay_in_the_range_of_half_precision(sizes):
    model, exact = Net(torch.float16), Net(torch.float32)
    torch.manual_seed(1)
    batches = [(torch.randn(size, 4), torch.randn(size, 2)) for size in sizes]
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / SCALE)
    callbacks = [SyncGradients(accumulate=len(sizes))]
    trial = Trial(model, optimizer, loss, callbacks=callbacks, verbose=0)
    trial.with_train_generator(batches).run(1)
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    loss(exact(x), y).backward()
    torch.optim.SGD(exact.parameters(), 0.1 / SCALE).step()
    for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(found.float(), expected, atol=2e-3)


WINDOW, WINDOWS, RATE = 4, 2, 0.1
#: Losses by how their gradients are combined, with the options that say so.
LOSSES = {
    "mean": (nn.MSELoss(), {}),
    "equal": (nn.MSELoss(), {"weighted": False}),
    "sum": (nn.MSELoss(reduction="sum"), {"loss": "sum"}),
}


class Closure:
    """Skips some batches, and clears gradients before or after it tells of its loss."""

    def __init__(self, skipped, *, clears_late, skips, to_none):
        self._skipped, self._to_none = skipped, to_none
        self._clears_late, self._skips = clears_late, skips

    def __call__(self, state):
        optimizer, callbacks = state[torchbearer.OPTIMIZER], state[torchbearer.CALLBACK_LIST]
        is_skipped = state[torchbearer.BATCH] in self._skipped
        if is_skipped and self._skips != "late":
            if self._skips != "at once":  # gradients of the last step stay where they are
                optimizer.zero_grad(set_to_none=self._skips == "cleared")
            return
        if not self._clears_late:
            optimizer.zero_grad(set_to_none=self._to_none)
        found = state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.LOSS] = state[torchbearer.CRITERION](found, state[torchbearer.Y_TRUE])
        callbacks.on_criterion(state)
        if self._clears_late or is_skipped:
            optimizer.zero_grad(set_to_none=self._to_none or is_skipped)
        if not is_skipped:
            state[torchbearer.LOSS].backward()
            callbacks.on_backward(state)


def drawn(seed, kind):
    """The batches of two ranks, which of them each skips, and how the closure is written."""
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [[numbers.randint(1, 6) for _ in range(WINDOW * WINDOWS)] for _ in range(2)]
    batches = [[(torch.randn(n, 3), torch.randn(n, 2)) for n in mine] for mine in sizes]
    skipped = [{i for i in range(len(mine)) if numbers.random() < 0.35} for mine in sizes]
    skips = numbers.choice(["late", "at once", "cleared", "zeroed"])
    words = {"clears_late": numbers.random() < 0.5, "skips": skips}
    # A sum that is cleared in place is refused.
    return batches, skipped, {**words, "to_none": kind == "sum" or numbers.random() < 0.5}


def by_hand(kind, batches, skipped):
    """The layer after the steps that a loop by hand would take on all batches of all ranks."""
    layer, criterion = layer_of(3, 2), LOSSES[kind][0]
    for window in range(WINDOWS):
        total, weight = [torch.zeros_like(p) for p in layer.parameters()], 0.0
        for mine, left_out in zip(batches, skipped, strict=True):
            for index in set(range(window * WINDOW, (window + 1) * WINDOW)) - left_out:
                x, y = mine[index]
                counts = len(x) if kind == "mean" else 1
                found = torch.autograd.grad(counts * criterion(layer(x), y), layer.parameters())
                total = [a + b for a, b in zip(total, found, strict=True)]
                weight += counts
        divisor = {"mean": weight, "equal": len(batches) * WINDOW, "sum": 1}[kind]
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters(), total, strict=True):
                parameter -= RATE * gradient / (divisor or 1)
    return list(layer.parameters())


def layer_of(inputs, outputs):
    torch.manual_seed(7)
    return nn.Linear(inputs, outputs)


def accumulated(kind, batches, closure):
    layer, (criterion, options) = layer_of(3, 2), LOSSES[kind]
    callbacks = [SyncModel(), SyncGradients(accumulate=WINDOW, **options)]
    optimizer = torch.optim.SGD(layer.parameters(), RATE)
    trial = Trial(layer, optimizer, criterion, callbacks=callbacks, verbose=0)
    trial.with_closure(closure).with_train_generator(batches).run(1)
    return list(layer.parameters())


@pytest.mark.parametrize("kind", LOSSES)
def test_closures_may_skip_batches_and_clear_gradients_at_any_moment(kind):
    def check(rank, ranks_there, seed):
        batches, skipped, words = drawn(seed, kind)
        batches, skipped = batches[:ranks_there], skipped[:ranks_there]
        found = accumulated(kind, batches[rank], Closure(skipped[rank], **words))
        for mine, expected in zip(found, by_hand(kind, batches, skipped), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6, msg=f"seed {seed}")

    for seed in range(20):
        check(0, 1, seed)

    @ranks(2)
    def body():
        for seed in range(20):
            check(collectives.rank(), 2, seed)

    body()


def test_sparse_and_dense_gradients_of_one_parameter_are_added():
    table = nn.Embedding(5, 2, sparse=True)
    start = table.weight.detach().clone()

    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        found = table(state[torchbearer.X]) if state[torchbearer.BATCH] % 2 else table.weight
        state[torchbearer.LOSS] = found.square().mean()
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        state[torchbearer.LOSS].backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)

    for batches in (2, 3):
        with torch.no_grad():
            table.weight.copy_(start)
        optimizer = torch.optim.SGD(table.parameters(), RATE)
        callbacks = [SyncGradients(accumulate=batches, loss="mean")]
        trial = Trial(table, optimizer, nn.MSELoss(), callbacks=callbacks, verbose=0)
        x = torch.tensor([1, 3])
        trial.with_closure(closure).with_train_generator([(x, x)] * batches).run(1)
        gradient = torch.zeros_like(start)
        for index in range(batches):
            if index % 2:
                gradient.index_add_(0, x, start[x] * 2 / 4)
            else:
                gradient += start * 2 / 10
        torch.testing.assert_close(table.weight.detach(), start - RATE * gradient / batches)


def test_gradients_that_lie_in_buckets_of_torch_are_held_whole():
    torch.manual_seed(0)
    batches = [[(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(6)] for _ in range(2)]

    @ranks(2)
    def body():
        layer = layer_of(3, 2)
        optimizer = torch.optim.SGD(layer.parameters(), RATE)
        wrapped = nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=True)
        callbacks = [SyncModel(), SyncGradients(accumulate=2)]
        trial = Trial(wrapped, optimizer, nn.MSELoss(), callbacks=callbacks, verbose=0)
        trial.with_train_generator(batches[collectives.rank()]).run(1)

        expected = layer_of(3, 2)
        for window in range(0, 6, 2):
            parts = [part for mine in batches for part in mine[window : window + 2]]
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            found = torch.autograd.grad(
                nn.functional.mse_loss(expected(x), y), expected.parameters()
            )
            with torch.no_grad():
                for parameter, gradient in zip(expected.parameters(), found, strict=True):
                    parameter -= RATE * gradient
        for mine, other in zip(layer.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)

    body()


def test_a_batch_that_cannot_tell_the_loss_may_be_skipped_after_it():
    """The kind of the loss is asked once for each batch, also of a rank that makes no gradient."""
    torch.manual_seed(0)
    batches = [[(torch.randn(1, 3), torch.randn(1, 2)) for _ in range(2 * WINDOW)] for _ in "ab"]
    skipped = [{0, 5}, set()]

    @ranks(2)
    def body():
        rank = collectives.rank()
        closure = Closure(skipped[rank], clears_late=False, skips="late", to_none=True)
        found = accumulated("mean", batches[rank], closure)
        for mine, expected in zip(found, by_hand("mean", batches, skipped), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)

    body()
