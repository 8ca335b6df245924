"""SyncGradients: the average on every rank, for every kind of parameter, and one stop for all."""

import copy
import gc
import warnings

import pytest
import torch
import torchbearer
from torch import nn
from torchbearer import Trial
from torchbearer.callbacks import (
    Callback,
    GradientClipping,
    on_criterion,
    on_end_epoch,
    on_step_training,
)

from tests import proc
from tests.callbacks.averaging import (
    Branches,
    Chosen,
    assert_replicas_equal,
    flat,
    on_every_transport,
    on_two_ranks,
    sync,
    train,
)
from tests.ranks import ranks
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives, membership, stop_request


class Spy(Callback):
    """Keeps the gradients that a callback after backward sees."""

    def __init__(self):
        self.seen = []

    def on_backward(self, state):
        self.seen.append(
            [
                None if p.grad is None else p.grad.clone()
                for p in state[torchbearer.MODEL].parameters()
            ]
        )


@on_every_transport
def test_every_rank_has_the_average_of_all():
    torch.manual_seed(collectives.rank())
    model = nn.Linear(6, 2)
    spy = Spy()
    rank = collectives.rank()
    data = torch.full((4, 6), 1.0 + rank), torch.zeros(4, 2)
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        nn.functional.mse_loss,
        callbacks=[spy, *sync()],
        verbose=0,
    )
    reference = copy.deepcopy(model)
    trial.with_train_data(*data, batch_size=4, num_workers=0).run(1)
    world = collectives.world_size()
    total = sum(
        nn.functional.mse_loss(reference(torch.full((4, 6), 1.0 + r)), torch.zeros(4, 2))
        for r in range(world)
    )
    (total / world).backward()
    assert torch.allclose(spy.seen[0][0], reference.weight.grad, atol=1e-6)
    assert torch.allclose(spy.seen[0][1], reference.bias.grad, atol=1e-6)


@on_every_transport
def test_replicas_stay_equal_whatever_each_rank_sees():
    torch.manual_seed(collectives.rank())
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2))
    train(model, sync(), steps=5, epochs=2)
    assert_replicas_equal(model)


@on_every_transport
def test_every_kind_of_parameter():
    torch.manual_seed(collectives.rank())
    model, spy = Branches(), Spy()
    frozen = model.frozen.weight.clone()
    train(model, [spy, *sync()])
    assert_replicas_equal(model)
    grads = dict(zip([n for n, _ in model.named_parameters()], spy.seen[-1], strict=True))
    assert grads["never.weight"] is None
    assert grads["frozen.weight"] is None
    assert grads["some.weight"].abs().sum() > 0
    assert grads["coarse"].dtype == torch.bfloat16
    assert grads["fine"].dtype == torch.float64
    assert grads["conv.weight"].shape == model.conv.weight.shape
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()
    everyone = collectives.all_gather([g for g in spy.seen[-1] if g is not None], "gradients")
    for first, *others in zip(*everyone, strict=True):
        assert all(torch.equal(first, other) for other in others)
    rank_zeros = collectives.broadcast(frozen, "rank 0's frozen layer")
    assert torch.equal(model.frozen.weight, rank_zeros)


@on_every_transport
def test_a_model_of_another_dtype():
    for dtype in (torch.bfloat16, torch.float64):
        model = nn.Linear(6, 2).to(dtype)
        trial = Trial(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            nn.functional.mse_loss,
            callbacks=sync(),
            verbose=0,
        ).to(dtype)
        torch.manual_seed(collectives.rank())
        trial.with_train_data(torch.randn(8, 6), torch.randn(8, 2), 4, num_workers=0).run(1)
        assert_replicas_equal(model)


@on_every_transport
def test_parameters_frozen_and_unfrozen_during_training():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    before = model[0].weight.clone()
    seen = []

    @on_step_training
    def thaw(state):
        seen.append(model[0].weight.clone())
        model[0].requires_grad_(state[torchbearer.BATCH] == 1)

    model[0].requires_grad_(False)
    train(model, [thaw, *sync()], steps=4)
    initial = collectives.broadcast(before, "rank 0's weights")
    assert torch.equal(seen[1], initial)
    assert not torch.equal(seen[2], initial)
    assert torch.equal(seen[3], seen[2])
    assert_replicas_equal(model)


@on_every_transport
def test_freezing_on_one_rank_only_is_a_desync_on_both():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))

    @on_step_training
    def freeze(state):
        if collectives.rank() == 1:
            model[0].requires_grad_(False)

    with pytest.raises(DesyncError, match=r"disagree on 0\.bias \(what is trained"):
        train(model, [freeze, *sync()], steps=4)


@on_every_transport
def test_sparse_gradients_stay_sparse():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 2, sparse=True)

        def forward(self, x):
            return self.table(x[:, 0].long())

    model, spy = Words(), Spy()
    rank = collectives.rank()
    x = torch.full((4, 1), float(rank))
    train(
        model,
        [spy, *sync()],
        data=(x, torch.zeros(4, 2)),
        steps=1,
        optimizer=torch.optim.SparseAdam(model.parameters()),
    )
    gradient = spy.seen[0][0]
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[*range(collectives.world_size())]]
    assert_replicas_equal(model)


@on_every_transport
def test_weighted_by_batch_size():
    def gradient(weighted):
        model, spy = nn.Linear(1, 1, bias=False), Spy()
        nn.init.zeros_(model.weight)
        rank = collectives.rank()
        n = 3 if rank % 2 else 1
        trial = Trial(
            model,
            torch.optim.SGD(model.parameters(), 0.0),
            lambda p, t: ((p - t) ** 2).mean(),
            callbacks=[spy, *sync(weighted=weighted)],
            verbose=0,
        )
        x, y = torch.ones(n, 1), torch.full((n, 1), 1.0 if rank % 2 else 5.0)
        trial.with_train_data(x, y, batch_size=4, num_workers=0).run(1)
        return spy.seen[0][0].item()

    assert gradient(False) == pytest.approx(-6.0)  # the mean of -10 and -2
    assert gradient(True) == pytest.approx(-4.0)  # (1 * -10 + 3 * -2) / 4


@on_two_ranks
def test_clipping_sees_the_average_wherever_it_stands_in_the_list():
    def last_weights(callbacks):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        train(model, callbacks)
        return model.weight.detach().clone()

    first = last_weights([GradientClipping(0.01), *sync()])
    last = last_weights([*sync(), GradientClipping(0.01)])
    assert torch.equal(first, last)


@on_two_ranks
def test_an_optimizer_that_calls_the_closure_more_than_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            closure()
            super().step()

    model = nn.Linear(6, 2)
    train(model, sync(), optimizer=Twice(model.parameters(), lr=0.1))
    assert_replicas_equal(model)


@on_two_ranks
def test_lbfgs_decides_alike_on_every_rank():
    model = nn.Linear(6, 2)

    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.LOSS] = state[torchbearer.CRITERION](
            state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE]
        )
        state[torchbearer.LOSS].backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)
        return state[torchbearer.LOSS]

    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=7)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        train(model, sync(), optimizer=optimizer, closure=closure, steps=4)
    assert not [each for each in shown if "requires_grad" in str(each.message)]
    assert_replicas_equal(model)


@on_every_transport
def test_a_closure_without_on_backward_is_averaged_all_the_same():
    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad()
        predicted = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.LOSS] = nn.functional.mse_loss(predicted, state[torchbearer.Y_TRUE])
        state[torchbearer.LOSS].backward()

    def weights(**options):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        train(model, sync(loss="mean"), **options)
        assert_replicas_equal(model)
        return flat(model)

    assert torch.equal(weights(closure=closure), weights())


@pytest.mark.parametrize("compiled", ["not", "inside", "outside"])
def test_a_model_wrapped_in_ddp_is_reduced_by_ddp_alone(two_ranks, compiled):
    def compile_if(wanted, module):
        return torch.compile(module, backend="eager") if wanted == compiled else module

    def body():
        inner = compile_if("inside", nn.Linear(6, 2))
        model = compile_if("outside", nn.parallel.DistributedDataParallel(inner))
        gradients, ours = SyncGradients(), []

        @on_step_training
        def look(state):
            # A second average would change nothing: what counts is that there is none to make.
            ours.append(len(gradients.reducer._parameters))

        train(model, [SyncModel(), gradients, look], steps=3)
        assert ours == [0, 0, 0]
        assert_replicas_equal(model)

    two_ranks.run(body)


@on_two_ranks
def test_parameters_that_only_the_optimizer_knows_are_averaged_too():
    model = nn.Linear(6, 2)
    scale = nn.Parameter(torch.full((1,), 1.0 + collectives.rank()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    x, y = torch.randn(8, 6) * (1 + collectives.rank()), torch.randn(8, 2)
    trial = Trial(
        model, optimizer, lambda p, t: ((p * scale - t) ** 2).mean(), callbacks=sync(), verbose=0
    )
    trial.with_train_data(x, y, batch_size=4, num_workers=0).run(1)
    values = collectives.all_gather(scale.detach(), "scales")
    assert torch.equal(values[0], values[1])
    assert values[0].item() != 1.0


def steps_taken(callbacks, **kwargs):
    count = [0]

    @on_step_training
    def counter(state):
        count[0] += 1

    model = nn.Linear(6, 2)
    trial = train(model, [counter, *callbacks], **kwargs)
    assert_replicas_equal(model)
    return count[0], trial


@on_every_transport
def test_a_stop_in_mid_epoch_on_one_rank_stops_all_at_the_same_step():
    @on_step_training
    def stop(state):
        if collectives.rank() == 1 and state[torchbearer.BATCH] == 2:
            state[torchbearer.STOP_TRAINING] = True

    taken, _ = steps_taken([*sync(), stop], steps=10)
    assert set(collectives.all_gather(taken, "steps taken")) == {4}


@on_every_transport
def test_a_stop_at_the_last_step_or_at_the_end_of_an_epoch():
    @on_step_training
    def at_last_step(state):
        if collectives.rank() == 1 and state[torchbearer.BATCH] == 3:
            state[torchbearer.STOP_TRAINING] = True

    taken, trial = steps_taken([at_last_step, *sync()], steps=4, epochs=3)
    assert set(collectives.all_gather(taken, "steps")) == {4}

    @on_end_epoch
    def at_epoch(state):
        if collectives.rank() == 1 and state[torchbearer.EPOCH] == 1:
            state[torchbearer.STOP_TRAINING] = True

    taken, trial = steps_taken([at_epoch, *sync()], steps=4, epochs=5)
    assert set(collectives.all_gather(taken, "steps")) == {8}
    assert len(trial.state[torchbearer.HISTORY]) == 2


class Wisher(Callback):
    """Wishes at some batches, on some ranks, and notes at each batch what was granted."""

    def __init__(self, gradients, at, on=(1,)):
        self.gradients, self.at, self.on = gradients, at, on
        self.batch = 0
        self.granted, self.signals = [], []
        self.wish = gradients.register_wish(
            lambda: self.batch in self.at and collectives.rank() in self.on
        )

    def on_sample(self, state):
        self.batch = state[torchbearer.BATCH]
        assert not self.gradients.granted(self.wish)

    def on_end_training(self, state):
        self.signals.append(self.gradients.stop_signal)

    def on_step_training(self, state):
        # Registered after SyncGradients, and called before it: the exchange is over all the same.
        self.granted.append(self.gradients.granted(self.wish))
        self.signals.append(self.gradients.stop_signal)


@on_every_transport
def test_a_wish_of_any_rank_is_granted_on_all_at_the_same_step():
    model, gradients = sync()
    first, second = Wisher(gradients, at=(1, 4)), Wisher(gradients, at=(1, 2), on=(0, 1))
    train(nn.Linear(6, 2), [first, model, gradients, second], steps=5, epochs=2)
    assert first.granted == [False, True, False, False, True] * 2
    assert second.granted == [False, True, True, False, False] * 2
    assert first.signals == [0] * 12


@on_two_ranks
def test_no_wish_is_granted_while_gradients_are_held():
    model, gradients = sync(accumulate=3)
    wisher = Wisher(gradients, at=(0, 1, 2, 3, 4, 6))
    train(nn.Linear(6, 2), [model, gradients, wisher], steps=7)
    assert wisher.granted == [False, False, True, False, False, False, True]


@on_two_ranks
def test_all_ranks_know_the_signal_that_stops_them():
    model, gradients = sync()

    @on_step_training
    def receive(state):
        if collectives.rank() == 1 and state[torchbearer.BATCH] == 1:
            stop_request.request(15)

    wisher = Wisher(gradients, at=())
    train(nn.Linear(6, 2), [receive, model, gradients, wisher], steps=5)
    assert wisher.signals == [0, 0, 15, 15]


def test_wishes_in_a_single_process():
    gradients = SyncGradients()
    wisher = Wisher(gradients, at=(1,), on=(0,))
    train(nn.Linear(6, 2), [wisher, gradients], steps=3)
    assert wisher.granted == [False, True, False]
    with pytest.raises(ValueError, match="register_wish was called 20 times before"):
        for _ in range(20):
            gradients.register_wish(bool)


@on_two_ranks
def test_a_run_can_follow_a_stopped_one():
    @on_step_training
    def stop_first_epoch(state):
        if collectives.rank() == 0 and state[torchbearer.BATCH] == 1 and not stopped:
            stopped.append(True)
            state[torchbearer.STOP_TRAINING] = True

    stopped = []
    model = nn.Linear(6, 2)
    trial = train(model, [stop_first_epoch, *sync()], steps=4)
    trial.run(2)
    assert len(trial.state[torchbearer.HISTORY]) == 2
    assert_replicas_equal(model)


def going_backward(backward, announced=True, **zero):
    """A closure that runs a backward of its own, after on_criterion if announced."""

    def closure(state):
        state[torchbearer.OPTIMIZER].zero_grad(**zero)
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.LOSS] = nn.functional.mse_loss(
            state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE]
        )
        if announced:
            state[torchbearer.CALLBACK_LIST].on_criterion(state)
        backward(state[torchbearer.LOSS], state[torchbearer.MODEL])
        state[torchbearer.CALLBACK_LIST].on_backward(state)

    return closure


def weights_after(world_batch, callbacks, take, closure=None):
    """Trains on a fixed stream of samples, of which ``take`` selects this rank's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 6, generator=generator), torch.randn(96, 2, generator=generator)
    data = torch.utils.data.TensorDataset(x[take], y[take])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trial = Trial(model, optimizer, nn.functional.mse_loss, callbacks=callbacks, verbose=0)
    if closure:
        trial.with_closure(closure)
    trial.with_train_generator(torch.utils.data.DataLoader(data, world_batch)).run(2)
    return flat(model)


@on_every_transport
def test_accumulated_batches_step_like_one_larger_batch():
    world = collectives.world_size()
    one_process = weights_after(24, [], slice(None))
    unannounced = going_backward(lambda loss, _: loss.backward(), announced=False)
    for closure in (None, unannounced):
        # On each of 2 ranks 12 batches of 4, or on each of 4 of 2: 4 steps an epoch.
        take = slice(collectives.rank(), None, world)
        mine = weights_after(8 // world, sync(accumulate=3), take, closure)
        assert torch.allclose(mine, one_process, atol=1e-6)


def test_accumulation_in_a_single_process_and_with_a_rest():
    accumulated = weights_after(4, [SyncGradients(accumulate=5)], slice(0, 48))
    # 12 batches: steps on 5, 5 and the remaining 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 6, generator=generator), torch.randn(96, 2, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for start, end in ((0, 20), (20, 40), (40, 48)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[start:end]), y[start:end]).backward()
            optimizer.step()
    assert torch.allclose(accumulated, flat(model), atol=1e-6)


@on_two_ranks
def test_a_stop_asked_for_while_gradients_are_held():
    @on_step_training
    def stop(state):
        if collectives.rank() == 1 and state[torchbearer.BATCH] == 3:
            state[torchbearer.STOP_TRAINING] = True

    taken, _ = steps_taken([*sync(accumulate=3), stop], steps=12)
    assert collectives.all_gather(taken, "steps taken") == [6, 6]


def deep_weights(callbacks, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)], nn.Linear(6, 2))
    train(model, callbacks, steps=4, **options)
    return flat(model)


@on_every_transport
def test_what_is_done_during_backward_gives_the_same_average():
    assert torch.allclose(deep_weights(sync()), deep_weights(sync(bucket_mb=100)), atol=1e-7)


@on_every_transport
def test_a_closure_that_runs_backward_twice():
    def twice(loss, _):
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()

    closure = going_backward(twice)
    assert torch.allclose(deep_weights(sync()), deep_weights(sync(), closure=closure), atol=1e-6)


@on_every_transport
def test_gradients_that_are_zeroed_and_not_taken_away():
    closure = going_backward(lambda loss, _: loss.backward(), set_to_none=False)
    assert torch.allclose(deep_weights(sync()), deep_weights(sync(), closure=closure), atol=1e-7)


@on_every_transport
def test_gradients_with_other_strides_than_their_parameters():
    def by_columns(loss, model):
        loss.backward()
        for layer in model:
            layer.weight.grad = layer.weight.grad.t().contiguous().t()

    closure = going_backward(by_columns, announced=False)
    assert torch.allclose(deep_weights(sync()), deep_weights(sync(), closure=closure), atol=1e-7)


@on_every_transport
def test_gradients_that_are_differentiated_again():
    def flattened(loss, model):
        loss.backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters()).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.detach()

    closure = going_backward(flattened)
    plain = "auto" if Chosen.options["transport"] == "auto" else "gloo"
    one = deep_weights(sync(bucket_mb=100, transport=plain), closure=closure)
    assert torch.allclose(deep_weights(sync(), closure=closure), one, atol=1e-6)
    assert not torch.allclose(deep_weights(sync()), one, atol=1e-3), "the second pass was lost"


def on_gradients_of(layers, gradients, note):
    """Calls a function whenever a layer's gradient appears, after the first step."""
    hooks = []

    @on_criterion
    def watch(state):
        if gradients.reducer and not hooks:
            hooks.extend(
                layer.weight.register_post_accumulate_grad_hook(lambda _: note())
                for layer in layers
            )

    return watch


@on_two_ranks
def test_a_gradient_is_in_its_bucket_before_the_next_appears():
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)], nn.Linear(6, 2))
    gradients = SyncGradients(transport="shm", bucket_mb=1e-4)
    places, placed = {}, []

    @on_step_training
    def remember(state):
        # After a step each gradient is a view into its bucket.
        places.update((p, p.grad.data_ptr()) for p in model.parameters())

    def note():
        found = [p for p in model.parameters() if p.grad is not None]
        placed.append(sum(p.grad.data_ptr() == places[p] for p in found))

    watch = on_gradients_of([model[0]], gradients, note)
    train(model, [SyncModel(), gradients, watch, remember], steps=3)
    # All but the one that appears last: the first layer's bias or its weight.
    assert placed[0] >= 13


@on_two_ranks
def test_shared_memory_is_kept_for_the_next_run_and_released_with_the_trial():
    gc.collect()  # tests before this one may have failed runs to collect
    mapped, others = [], proc.count_maps("torchbearer_ddp")

    @on_step_training
    def look(state):
        mapped.append(proc.count_maps("torchbearer_ddp") - others)

    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)], nn.Linear(6, 2))
    trial = train(model, [*sync(transport="shm", bucket_mb=1e-4), look])
    assert mapped == [1] * 3
    assert proc.count_maps("torchbearer_ddp") == others + 1
    del trial
    gc.collect()
    assert proc.count_maps("torchbearer_ddp") == others
    assert all(p.grad.isfinite().all() for p in model.parameters())


class Backwards(nn.Module):
    """Registers its layers in the order opposite to that in which it uses them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 2), *[nn.Linear(6, 6) for _ in range(5)]])

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@on_two_ranks
def test_buckets_follow_the_order_in_which_gradients_appear():
    model = Backwards()
    gradients = SyncGradients(transport="gloo", bucket_mb=1e-4)
    sent = []

    def note():
        sent.append(gradients.reducer._hooks.sent)

    watch = on_gradients_of(model.layers, gradients, note)
    train(model, [SyncModel(), gradients, watch], steps=3)
    assert sent[:6] == sorted(sent[:6])
    assert sent[5] >= 4, "buckets waited for gradients that appear later"
    assert_replicas_equal(model)


@on_every_transport
def test_the_first_step_needs_few_exchanges_however_many_buckets_there_are():
    class Counter(Callback):
        def on_criterion(self, state):
            self.before = membership.current().sequence

        def on_backward(self, state):
            self.exchanges.append(membership.current().sequence - self.before)

    def exchanges(bucket_mb):
        model, counter = nn.Sequential(*[nn.Linear(6, 6) for _ in range(60)]), Counter()
        counter.exchanges = []
        model.append(nn.Linear(6, 2))
        train(model, [*sync(bucket_mb=bucket_mb), counter], steps=3)
        return counter.exchanges

    one, many = exchanges(bucket_mb=100), exchanges(bucket_mb=1e-5)
    # The kind of the loss, what is trained (too long for one message), the transport with its
    # buckets (likewise), the shared memory, the channels between hosts, and then the gradients.
    assert one[1:] == many[1:] == [1, 1]
    assert one[0] <= 7
    assert many[0] <= one[0] + 1


@on_two_ranks
def test_another_model_after_a_run_that_failed_in_its_first_backward():
    def fail(_):
        raise ValueError("no gradient today")

    callbacks = sync(bucket_mb=1e-4)
    shallow, deep = nn.Linear(6, 2), Backwards()
    shallow.weight.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient today"):
        train(shallow, callbacks)
    train(deep, callbacks)
    assert_replicas_equal(deep)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_on_the_wire(half):
    @ranks(3)
    def body():
        def train_with(**options):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
            train(model, sync(transport="gloo", **options), steps=6)
            assert_replicas_equal(model)
            return flat(model)

        exact, rounded = train_with(), train_with(compress=half)
        assert not torch.equal(exact, rounded)
        assert torch.allclose(exact, rounded, atol=1e-2)

    body()


def test_options_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"compress is 'int4'.*'bf16', 'fp16', 'int8'"):
        SyncGradients(compress="int4")
    with pytest.raises(ValueError, match="accumulate is 0"):
        SyncGradients(accumulate=0)
    with pytest.raises(ValueError, match="bucket_mb is -1"):
        SyncGradients(bucket_mb=-1)
    with pytest.raises(ValueError, match="check is -1"):
        SyncModel(check=-1)
