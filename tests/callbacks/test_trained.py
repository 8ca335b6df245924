"""Everything that a run trains is averaged, wherever it is and whoever steps."""

import contextlib
import copy
import functools
import itertools
import os

import pytest
import torch
import torchbearer
from torch import nn
from torchbearer import Trial
from torchbearer.callbacks import on_step_training

from tests import proc
from tests.callbacks.averaging import (
    SIZE,
    STEPS,
    UNEVEN,
    Chosen,
    Probe,
    add_two_batches,
    adversaries,
    assert_close,
    assert_replicas_equal,
    batches,
    joined,
    mine,
    net,
    on_every_transport,
    on_two_ranks,
    run,
    summed,
    sync,
)
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.rank_zero import RankZeroOnly
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives

TOGGLES = int(os.environ.get("TORCHBEARER_DDP_TOGGLES", "400"))


@pytest.mark.parametrize("freeze", [False, True])
def test_two_optimizers_with_a_closure_each(freeze, transport_ranks):
    @on_every_transport
    def body():
        g, d, loss, more = adversaries(freeze)
        run(g, sync(), mine(), criterion=loss, epochs=2, **more)
        one_g, one_d, one_loss, one_more = adversaries(freeze)
        run(one_g, [], joined(), criterion=one_loss, epochs=2, **one_more)
        assert_close(g, one_g)
        assert_close(d, one_d)

    body(transport_ranks)


@pytest.mark.parametrize("found", [True, False])
def test_a_callback_that_trains_a_layer_of_its_own(found, transport_ranks):
    @on_every_transport
    def body():
        model, probe = net(), Probe(found)
        run(model, [*sync(), probe], mine(), epochs=2)
        one, one_probe = net(), Probe(found)
        run(one, [one_probe], joined(), epochs=2)
        assert_close(model, one)
        assert_close(probe.layer(), one_probe.layer())

    body(transport_ranks)


@on_two_ranks
def test_a_step_that_only_some_ranks_take_is_named():
    class Sometimes(Probe):
        def on_step_training(self, state):
            if collectives.rank() == 0 or state[torchbearer.BATCH] != 1:
                super().on_step_training(state)

    with pytest.raises(DesyncError, match=r"rank 0 before the step of callbacks\[2\].*in batch 1"):
        run(net(), [*sync(), Sometimes()], mine())


@on_two_ranks
def test_what_rank_zero_or_skip_leaves_alone():
    alone = Probe()
    run(net(), [*sync(), RankZeroOnly(alone)], mine())
    moved = not torch.equal(alone.layer()[0].weight, Probe().layer()[0].weight)
    assert moved == collectives.is_rank_zero()
    own = Probe()
    run(net(), [*sync(skip=[own.layer()]), own], mine())
    everyone = collectives.all_gather(own.layer()[0].weight.detach(), "own layers")
    assert not torch.equal(everyone[0], everyone[1])


@on_every_transport
def test_a_loss_that_sums():
    model, one = net(), net()
    run(model, sync(), mine(), criterion=summed, epochs=2)
    run(one, [], joined(), criterion=summed, epochs=2)
    assert_close(model, one)


@on_two_ranks
def test_sums_on_top_of_sums_are_refused_when_they_are_used():
    with pytest.raises(DesyncError, match="The loss is a sum, and SGD is about to step"):
        run(net(), sync(loss="sum"), mine(), closure=add_two_batches)
    with pytest.raises(ValueError, match="loss is 'median'"):
        SyncGradients(loss="median")
    mean = net()
    run(mean, sync(loss="mean"), mine(), closure=add_two_batches)  # an average of averages is one
    assert_replicas_equal(mean)


@pytest.mark.parametrize("loss", ["sum", None])
def test_sums_left_by_the_run_before_are_refused_too(loss, two_ranks):
    def body():
        def closure(state):  # never clears anything
            state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
            state[torchbearer.LOSS] = summed(state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
            state[torchbearer.LOSS].backward()
            state[torchbearer.CALLBACK_LIST].on_backward(state)

        model = net()
        run(model, sync(loss=loss), mine()[:1], criterion=summed)
        with pytest.raises(DesyncError, match="The loss is a sum, and SGD is about to step"):
            run(model, sync(loss=loss), mine()[:1], criterion=summed, closure=closure)

    two_ranks.run(body)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_batches_of_different_sizes_count_by_their_samples(accumulate, transport_ranks):
    @on_every_transport
    def body():
        world = collectives.world_size()
        model, one = net(), net()
        run(model, sync(accumulate=accumulate), mine(UNEVEN), epochs=2)
        data = joined(UNEVEN[:world])
        merged = [
            tuple(map(torch.cat, zip(*data[begin : begin + accumulate], strict=True)))
            for begin in range(0, len(data), accumulate)
        ]
        run(one, [], merged, epochs=2)
        assert_close(model, one)

    body(transport_ranks)


@on_every_transport
def test_equal_weights_on_request():
    world = collectives.world_size()
    model, one = net(), net()
    run(model, sync(weighted=False), mine(UNEVEN))

    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        parts = [batches(r, UNEVEN[r])[state[torchbearer.BATCH]] for r in range(world)]
        sum(nn.functional.mse_loss(one(x), y) / world for x, y in parts).backward()

    run(one, [], joined(UNEVEN[:world]), closure=closure)
    assert_close(model, one)


@on_every_transport
def test_padded_targets_count_by_their_tokens():
    def padded(rank):
        generator = torch.Generator().manual_seed(rank)
        found = []
        for step in range(3):
            x = torch.randn(4, 6, generator=generator)
            y = torch.randint(0, 2, (4,), generator=generator)
            y[: (rank * 2 + step) % 4] = -100
            if rank == 1 and step == 2:
                y[:] = -100  # nothing to learn: its own mean is no number
            found.append((x, y))
        return found

    world = [padded(rank) for rank in range(collectives.world_size())]
    together = [tuple(map(torch.cat, zip(*s, strict=True))) for s in zip(*world, strict=True)]
    model, one = net(), net()
    run(model, sync(), world[collectives.rank()], criterion=nn.CrossEntropyLoss())
    run(one, [], together, criterion=nn.CrossEntropyLoss())
    assert_close(model, one)


def gradients_in_fp16(sizes, gradient, callbacks):
    """What callbacks see of a constant gradient of a model in fp16, for batches of these sizes."""
    model, seen = nn.Linear(6, 2, bias=False).half(), []

    @on_step_training
    def look(state):
        seen.append(model.weight.grad.float())

    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        lambda p, _: gradient * p.mean() * 2,
        callbacks=[*callbacks, look],
        verbose=0,
    ).to(torch.float16)
    data = [(torch.ones(n, 6).half(), torch.zeros(n, 2).half()) for n in sizes]
    trial.with_train_generator(data).run(1)
    return torch.stack(seen)


@on_every_transport
def test_half_precision_stays_in_range():
    rank = collectives.rank()
    for options in ({}, {"compress": "fp16"}):
        seen = gradients_in_fp16([256 - rank], 300.0, sync(**options))
        assert torch.allclose(seen, torch.full_like(seen, 300.0), rtol=2e-3)
    # A batch that is far smaller or larger than the first one, of which nothing was known.
    for sizes in ([256, 1], [1, 256], [1, 512, 3]):
        for gradient in (300.0, 1e-3):
            seen = gradients_in_fp16([n + rank for n in sizes], gradient, sync())
            shares = [torch.tensor(sizes) + r for r in range(collectives.world_size())]
            of_each = [gradients_in_fp16(each.tolist(), gradient, []) for each in shares]
            total = sum(n[:, None, None] * g for n, g in zip(shares, of_each, strict=True))
            exact = total / sum(shares)[:, None, None]
            assert torch.allclose(seen, exact, rtol=2e-3, atol=1e-7), (seen - exact).abs().max()


@on_every_transport
def test_a_frozen_layer_that_holds_a_gradient():
    def closure_for(model):
        def closure(state):
            state[torchbearer.OPTIMIZER].zero_grad()
            predicted = model(state[torchbearer.X])
            nn.functional.mse_loss(predicted, state[torchbearer.Y_TRUE]).backward()
            model[0].requires_grad_(False)
            model(state[torchbearer.X]).square().mean().backward()
            state[torchbearer.CALLBACK_LIST].on_backward(state)
            model[0].requires_grad_(True)

        return closure

    model, one = net(), net()
    run(model, sync(loss="mean"), mine(), closure=closure_for(model))
    run(one, [], joined(), closure=closure_for(one))
    assert_close(model, one)


CONVERSIONS = {
    "half and back": lambda m: m.half().float(),
    "double": lambda m: m.double().float(),
    "shared": lambda m: m.share_memory(),
    "copied": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_averaging_goes_on_after_a_conversion(conversion, transport_ranks):
    convert = CONVERSIONS[conversion]

    @on_every_transport
    def body():
        @on_step_training
        def change(state):
            if state[torchbearer.BATCH] == 1:
                convert(state[torchbearer.MODEL])

        model, one = net(), net()
        run(model, [*sync(), change], mine(), epochs=2)
        run(one, [change], joined(), epochs=2)
        assert_close(model, one, tolerance=1e-3 if "half" in conversion else 1e-5)

    body(transport_ranks)


@on_two_ranks
def test_a_layer_added_in_mid_epoch():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([net(4, (6, 2))])

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    @on_step_training
    def grow(state):
        if state[torchbearer.BATCH] == 1:
            layer = net(5, (6, 2))
            state[torchbearer.MODEL].layers.append(layer)
            state[torchbearer.OPTIMIZER].add_param_group({"params": list(layer.parameters())})

    model, one = Growing(), Growing()
    run(model, [*sync(), grow], mine(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    run(one, [grow], joined(), optimizer=torch.optim.SGD(one.parameters(), 0.1))
    assert_close(model, one)


class Words(nn.Module):
    """An embedding with sparse gradients, tied to a dense layer or not."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(12, 2))
        self.tied = tied

    def forward(self, x):
        indices = (x[:, :2] * 100).long().abs() % 12
        found = nn.functional.embedding(indices, self.table, sparse=True).sum(1)
        return found @ (self.table.t() @ self.table) / 20 if self.tied else found


@on_every_transport
def test_the_optimizer_sees_the_layout_of_one_process():
    for tied in (False, True):
        layouts = []

        @on_step_training
        def look(state, layouts=layouts):
            layouts.append(state[torchbearer.MODEL].table.grad.is_sparse)

        model, one = Words(tied), Words(tied)
        plain = [torch.optim.SGD(each.parameters(), 0.01) for each in (model, one)]
        run(model, [*sync(), look], mine(UNEVEN), optimizer=plain[0])
        run(one, [look], joined(UNEVEN[: collectives.world_size()]), optimizer=plain[1])
        assert layouts == [not tied] * 8
        assert_close(model, one)


@on_two_ranks
def test_a_learned_loss_beside_a_model_in_ddp():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, predicted, target):
            return ((predicted * self.scale - target) ** 2).mean()

    def trained(wrap, callbacks, data):
        inner, loss = net(), Learned()
        model = nn.parallel.DistributedDataParallel(inner) if wrap else inner
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
        run(model, callbacks, data, optimizer=optimizer, criterion=loss)
        return inner, loss

    ours, one = trained(True, sync(), mine()), trained(False, [], joined())
    assert_close(ours[0], one[0])
    assert_close(ours[1], one[1])


@on_two_ranks
def test_lbfgs_decides_on_the_loss_of_all_samples():
    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        predicted = state[torchbearer.MODEL](state[torchbearer.X].double())
        target = state[torchbearer.Y_TRUE].double()
        state[torchbearer.LOSS] = nn.functional.mse_loss(predicted, target)
        state[torchbearer.LOSS].backward()
        if state[torchbearer.BATCH] % 2:  # with and without
            state[torchbearer.CALLBACK_LIST].on_backward(state)
        return state[torchbearer.LOSS]

    def solved(callbacks, data):
        model = net().double()
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.5, line_search_fn="strong_wolfe", max_iter=5
        )
        run(model, callbacks, data, optimizer=optimizer, closure=closure)
        return model

    assert_close(solved(sync(), mine(UNEVEN)), solved([], joined(UNEVEN[:2])), tolerance=1e-3)
    with pytest.raises(ValueError, match="accumulate does not work with LBFGS"):
        solved(sync(accumulate=2), mine())


class Broken(ValueError):
    """Ends a run."""


@pytest.mark.parametrize("moment", ["stop", "exception in a callback", "exception in backward"])
def test_a_run_starts_clean_whatever_ended_the_one_before(moment, transport_ranks):
    @on_every_transport
    def body():
        model = net()
        ends, backwards = [moment != "exception in backward"], itertools.count(1)

        @on_step_training
        def end(state):
            if state[torchbearer.BATCH] == 0 and ends[0]:
                if moment != "stop":
                    raise Broken
                state[torchbearer.STOP_TRAINING] = True

        def fail(gradient):
            if moment == "exception in backward" and next(backwards) == 2:
                raise Broken
            return gradient

        hook = model[0].weight.register_hook(fail)
        trial = Trial(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            nn.functional.mse_loss,
            callbacks=[*sync(accumulate=3), end],
            verbose=0,
        )
        trial.with_train_generator(mine())
        with contextlib.suppress(Broken):
            trial.run(1)
        ends[0] = False
        one = copy.deepcopy(model)
        trial.state[torchbearer.HISTORY].clear()
        trial.run(1)
        hook.remove()
        data = joined()
        first = tuple(map(torch.cat, zip(*data[:3], strict=True)))
        run(one, [], [first, *data[3:]], optimizer=torch.optim.SGD(one.parameters(), 0.1))
        assert_close(model, one)

    body(transport_ranks)


@on_every_transport
def test_a_batch_that_every_rank_skips():
    def closure_for(fails):
        def closure(state):
            state[torchbearer.OPTIMIZER].zero_grad()
            predicted = state[torchbearer.MODEL](state[torchbearer.X])
            loss = nn.functional.mse_loss(predicted, state[torchbearer.Y_TRUE])
            state[torchbearer.LOSS] = loss
            state[torchbearer.CALLBACK_LIST].on_criterion(state)
            if state[torchbearer.BATCH] == 2 and fails:
                handle = state[torchbearer.MODEL][0].weight.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                handle.remove()
                state[torchbearer.OPTIMIZER].zero_grad()
                return
            loss.backward()
            state[torchbearer.CALLBACK_LIST].on_backward(state)

        return closure

    model, one = net(), net()
    run(model, sync(loss="mean"), mine(), closure=closure_for(True), epochs=2)
    run(one, [], joined(), closure=closure_for(True), epochs=2)
    assert_close(model, one)


@on_every_transport
def test_a_batch_that_one_rank_skips():
    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        if state[torchbearer.BATCH] == 2 and collectives.rank() == 1:
            return
        predicted = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.LOSS] = nn.functional.mse_loss(predicted, state[torchbearer.Y_TRUE])
        state[torchbearer.LOSS].backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)

    model, one = net(), net()
    run(model, sync(loss="mean"), mine(), closure=closure)
    data = joined()
    data[2] = tuple(torch.cat([each[:SIZE], each[2 * SIZE :]]) for each in data[2])
    run(one, [], data)
    assert_close(model, one)


def without_rank_1(batch):
    """A batch of one process without the samples of rank 1."""
    return tuple(torch.cat([each[:SIZE], each[2 * SIZE :]]) for each in batch)


def together(*data):
    return tuple(map(torch.cat, zip(*data, strict=True)))


@on_every_transport
def test_a_lone_last_batch_that_counts_nothing_on_one_rank():
    def weight(state):
        is_empty = state[torchbearer.BATCH] == 2 and collectives.rank() == 1
        return 0.0 if is_empty else float(len(state[torchbearer.X]))

    ours, one = net(widths=(6, 8, 8, 2)), net(widths=(6, 8, 8, 2))
    callbacks = sync(accumulate=2, weight=weight, bucket_mb=1e-4)
    run(ours, callbacks, mine()[:3], epochs=2)
    first, second, last = joined()[:3]
    run(one, [], [together(first, second), without_rank_1(last)], epochs=2)
    assert_close(ours, one)


@pytest.mark.parametrize("clears", [False, True])
def test_a_batch_that_is_skipped_after_its_loss_counts_nothing(clears, transport_ranks):
    @on_every_transport
    def body():
        def closure(state):
            state[torchbearer.OPTIMIZER].zero_grad()
            predicted = state[torchbearer.MODEL](state[torchbearer.X])
            state[torchbearer.LOSS] = nn.functional.mse_loss(predicted, state[torchbearer.Y_TRUE])
            state[torchbearer.CALLBACK_LIST].on_criterion(state)
            if state[torchbearer.BATCH] == 1 and collectives.rank() == 1:
                if clears:
                    state[torchbearer.OPTIMIZER].zero_grad()
                return
            state[torchbearer.LOSS].backward()
            state[torchbearer.CALLBACK_LIST].on_backward(state)

        ours, one = net(), net()
        run(ours, sync(accumulate=2, loss="mean"), mine(), closure=closure)
        first, second, *others = joined()
        run(one, [], [together(first, without_rank_1(second)), together(*others)])
        assert_close(ours, one)

    body(transport_ranks)


@on_every_transport
def test_a_backward_pass_that_fails_on_one_rank_alone():
    def fail(_):
        raise ZeroDivisionError

    def closure(state):
        model, last = state[torchbearer.MODEL], state[torchbearer.BATCH] == 2
        state[torchbearer.OPTIMIZER].zero_grad()
        predicted = model(state[torchbearer.X])
        state[torchbearer.LOSS] = nn.functional.mse_loss(predicted, state[torchbearer.Y_TRUE])
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        handle = model[0].weight.register_hook(
            fail if last and collectives.rank() == 1 else torch.clone
        )
        try:
            state[torchbearer.LOSS].backward()
            state[torchbearer.CALLBACK_LIST].on_backward(state)
        except ZeroDivisionError:
            state[torchbearer.OPTIMIZER].zero_grad()
        handle.remove()

    transport = Chosen.options["transport"]
    if transport == "shm":  # nothing was sent before
        run(net(), sync(loss="mean"), mine(), closure=closure)
        return
    with pytest.raises(DesyncError, match="The backward pass of rank 1 failed"):
        run(net(widths=(6, 8, 8, 2)), sync(loss="mean"), mine(), closure=closure)


@functools.partial(on_every_transport, timeout=60.0 + TOGGLES / 5)
def test_thousands_of_changes_of_requires_grad_leak_nothing():
    model, counts = net(), []

    @on_step_training
    def toggle(state):
        model[0].requires_grad_(not model[0].weight.requires_grad)
        counts.append((proc.count_descriptors(), proc.count_threads()))

    run(model, [*sync(), toggle], mine() * 50, epochs=TOGGLES // (50 * STEPS))
    # Fewer are no leak: what the test before has left is closed at some time.
    assert all(last <= first for first, last in zip(counts[20], counts[-1], strict=True))
    assert_replicas_equal(model)


@on_two_ranks
def test_random_numbers_are_common_outside_of_runs():
    def drawn():
        numbers = collectives.all_gather(torch.rand(2), "random numbers")
        return torch.equal(numbers[0], numbers[1])

    inside = []

    @on_step_training
    def draw(state):
        inside.append(torch.rand(1))
        if fails and state[torchbearer.BATCH] == 1:
            raise KeyboardInterrupt

    fails = False
    assert drawn()
    run(net(), [*sync(), draw], mine())
    assert drawn()
    fails = True
    with pytest.raises(KeyboardInterrupt):
        run(net(), [*sync(), draw], mine())
    assert drawn()
    everyone = collectives.all_gather(torch.cat(inside), "numbers of the runs")
    assert not (everyone[0] == everyone[1]).any()
