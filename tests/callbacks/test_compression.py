"""SyncGradients(compress=...): what is lost comes back, resumes are exact, DDP can have it too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
import torchbearer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback

from tests.callbacks.killed import KillAt, Killed
from tests.gradients.transport_cases import play_hosts
from tests.ranks import RankPool
from torchbearer_ddp import Checkpoint, Int8State, SyncGradients, SyncModel, int8_hook
from torchbearer_ddp.group import collectives

#: The host of each rank, by a name for the transport that is used then.
LAYOUTS = {"two hosts": "ab", "three hosts": "abc", "two hosts of two": "abba"}
BLOCK = 256
BATCH = 6


@pytest.fixture(scope="module", params=LAYOUTS)
def hosts(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks on several hosts: direct exchanges, exchanges of slices, and leaders."""
    layout = LAYOUTS[request.param]
    with RankPool(len(layout), lambda: play_hosts(layout)) as pool:
        yield pool


@pytest.fixture(scope="module", params=["ab", "abc"])
def flat_hosts(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks on hosts of their own."""
    layout = request.param
    with RankPool(len(layout), lambda: play_hosts(layout)) as pool:
        yield pool


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 4))


def samples(steps):
    generator = torch.Generator().manual_seed(50 + collectives.rank())
    x = torch.randn(steps * BATCH, 12, generator=generator)
    return x, torch.randn(steps * BATCH, 4, generator=generator)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def make_trial(model, callbacks, steps, rate=0.1, momentum=0.9, **options):
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum),
        nn.functional.mse_loss,
        callbacks=[SyncModel(), SyncGradients(**options), *callbacks],
        verbose=0,
    )
    return trial.with_train_generator(DataLoader(TensorDataset(*samples(steps)), BATCH))


def trained(*, steps=8, epochs=1, callbacks=(), **options):
    model = build()
    make_trial(model, callbacks, steps, **options).run(epochs)
    return flat(model)


class Seen(Callback):
    """The sum of the averaged gradients of all steps."""

    def __init__(self):
        super().__init__()
        self.total, self.steps = None, 0

    def on_backward(self, state):
        found = torch.cat([p.grad.reshape(-1) for p in state[torchbearer.MODEL].parameters()])
        self.total = found.double() if self.total is None else self.total + found.double()
        self.steps += 1


def mean_gradient(steps, **options):
    """The mean of the averaged gradients of equal steps."""
    model, seen = build(), Seen()
    trial = make_trial(model, [seen], 1, rate=0.0, **options)
    trial.run(steps)
    return seen.total / seen.steps


@pytest.mark.parametrize("kind", ["int8", "bf16", "fp16"])
def test_what_is_lost_in_a_step_comes_with_the_next(hosts, kind):
    def body():
        exact = mean_gradient(1)
        size = float(exact.abs().max())
        once = float((mean_gradient(1, compress=kind) - exact).abs().max()) / size
        with_feedback = mean_gradient(20, compress=kind, error_feedback=True)
        without = mean_gradient(20, compress=kind, error_feedback=False)
        assert once > 0
        off = float((with_feedback - exact).abs().max()) / size
        assert off < 0.2 * once + 1e-7
        assert float((without - exact).abs().max()) / size > 3 * off
        assert once < {"int8": 2e-2, "bf16": 1e-2, "fp16": 2e-3}[kind]

    hosts.run(body)


#: Ways to compress with error feedback; a state of PowerSGD of its own for each rank.
FEEDBACK = {
    "int8": lambda: {"compress": "int8"},
    "bf16": lambda: {"compress": "bf16", "error_feedback": True},
    "powersgd": lambda: {"compress": "powersgd", "rank": 2},
    "hook": lambda: {"hook": int8_hook, "hook_state": Int8State()},
}


@pytest.mark.parametrize("way", FEEDBACK)
def test_steps_with_fewer_samples_neither_enlarge_nor_lose_what_is_fed_back(flat_hosts, way):
    # Every sample is the same, so every batch has the same gradient, however many it has.
    sizes, rounds = [[8, 1, 8, 3, 2], [8, 1, 5, 8, 1], [8, 1, 8, 8, 0]], 12

    def mean_gradient(**options):
        model, seen = build(), Seen()
        (x, y), mine = samples(1), sizes[collectives.rank()]
        x, y = (collectives.broadcast(each[:1], "a sample") for each in (x, y))
        data = [(x.expand(n, -1), y.expand(n, -1)) for n in mine] * rounds
        callbacks = [SyncModel(), SyncGradients(loss="mean", **options), seen]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trial = Trial(model, optimizer, nn.functional.mse_loss, callbacks=callbacks, verbose=0)
        trial.with_train_generator(data).run(1)
        return seen.total / seen.steps

    def body():
        exact = mean_gradient()
        once = {"int8": 1e-2, "bf16": 5e-3, "powersgd": 1.0, "hook": 1e-2}[way]
        off = mean_gradient(**FEEDBACK[way]()) - exact
        # What is lost over all of the steps is no more than a few single losses.
        assert float(off.norm() / exact.norm()) < 4 * once / len(sizes[0]) / rounds + 1e-6

    flat_hosts.run(body)


def quantized(x):
    """Eight bits in blocks, by numpy."""
    out = numpy.empty_like(x)
    for first in range(0, len(x), BLOCK):
        block = x[first : first + BLOCK]
        scale = numpy.float32(numpy.abs(block).max() / 127)
        rounded = numpy.rint(block * numpy.float32(1 / scale)) if scale else 0 * block
        out[first : first + BLOCK] = rounded.astype(numpy.float32) * scale
    return out


def by_hand(steps):
    """Training in eight bits with error feedback: gradients of all ranks, arithmetic by numpy."""
    model, world, order = build(), collectives.world_size(), []
    handles = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numel = sum(p.numel() for p in model.parameters())
    lost = numpy.zeros((world, numel), "float32")
    lost_sum = numpy.zeros(numel, "float32")
    for x, y in DataLoader(TensorDataset(*samples(steps)), BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        while handles:
            handles.pop().remove()
        mine = torch.cat([p.grad.reshape(-1) for p in order]) / world
        everyone = [each.numpy() for each in collectives.all_gather(mine, "gradients")]
        total = numpy.zeros(numel, "float32")
        if world == 2:
            parts = [slice(0, numel)]
        else:
            share = -(-numel // world)
            step = -(-share // BLOCK) * BLOCK
            parts = [slice(i * step, min(numel, (i + 1) * step)) for i in range(world)]
        for rank, gradient in enumerate(everyone):
            wanted = gradient + lost[rank]
            sent = numpy.concatenate([quantized(wanted[part]) for part in parts])
            lost[rank] = wanted - sent
            total += sent
        if world > 2:
            wanted = total + lost_sum
            total = numpy.concatenate([quantized(wanted[part]) for part in parts])
            lost_sum = wanted - total
        for p, part in zip(
            order, torch.split(torch.from_numpy(total), [p.numel() for p in order]), strict=True
        ):
            p.grad.copy_(part.view(p.shape))
        optimizer.step()
    return flat(model)


def assert_near(found, expected, tolerance):
    moved = float((expected - flat(build())).abs().max())
    off = float((found - expected).abs().max())
    assert off <= tolerance * moved, f"off by {off}, moved by {moved}"
    everyone = collectives.all_gather(found, "parameters")
    assert all(torch.equal(each, everyone[0]) for each in everyone)


def test_eight_bits_are_a_loop_by_hand(flat_hosts):
    def body():
        assert_near(trained(compress="int8"), by_hand(8), 2e-3)

    flat_hosts.run(body)


def test_the_hook_for_ddp_is_the_same(flat_hosts):
    def body():
        expected = trained(compress="int8", bucket_mb=1e-3)
        found = trained(hook=int8_hook, hook_state=Int8State(), bucket_mb=1e-3)
        assert_near(found, expected, 1e-5)
        model = build()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-3)  # several buckets
        wrapped.register_comm_hook(Int8State(), int8_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in DataLoader(TensorDataset(*samples(8)), BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
        assert_near(flat(model), expected, 0.05)  # other buckets, other blocks

    flat_hosts.run(body)


@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_compressed_training_goes_where_the_exact_one_goes(hosts, kind):
    def body():
        exact = trained(epochs=8)
        found = trained(epochs=8, compress=kind)
        assert_near(found, exact, {"int8": 0.03, "powersgd": 0.7}[kind])

    hosts.run(body)


def test_powersgd_is_torchs_own(flat_hosts):
    def body():
        state = powersgd.PowerSGDState(
            None, 2, start_powerSGD_iter=10, orthogonalization_epsilon=1e-8
        )
        expected = trained(epochs=3, hook=powersgd.powerSGD_hook, hook_state=state)
        assert_near(trained(epochs=3, compress="powersgd", rank=2), expected, 1e-4)
        assert state.iter == 24  # once a step

    flat_hosts.run(body)


class HostBucket:
    """All gradients of a host as one bucket."""

    def __init__(self, buffer, parameters):
        self._buffer, self._parameters = buffer, parameters

    def index(self):
        return 0

    def buffer(self):
        return self._buffer

    def gradients(self):
        parts = torch.split(self._buffer, [p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self):
        return self._parameters

    def is_last(self):
        return True


def test_powersgd_between_hosts_is_that_of_their_sums():
    layout = "abba"

    def body():
        found = trained(epochs=3, compress="powersgd")
        leaders, rank = [0, 1], collectives.rank()
        group = dist.new_group(leaders)
        state = powersgd.PowerSGDState(
            group, 1, start_powerSGD_iter=10, orthogonalization_epsilon=1e-8
        )
        model, order = build(), []
        handles = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            for x, y in DataLoader(TensorDataset(*samples(8)), BATCH):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                while handles:
                    handles.pop().remove()
                mine = torch.cat([p.grad.reshape(-1) for p in order])
                everyone = collectives.all_gather(mine, "gradients")
                host = sum(
                    each for other, each in enumerate(everyone) if layout[other] == layout[rank]
                )
                result = None
                if rank in leaders:
                    bucket = HostBucket(host / 2, order)
                    result = powersgd.powerSGD_hook(state, bucket).wait()
                mean = collectives.broadcast(result, "the mean")
                for p, part in zip(
                    order, torch.split(mean, [p.numel() for p in order]), strict=True
                ):
                    p.grad.copy_(part.view(p.shape))
                optimizer.step()
        assert_near(found, flat(model), 1e-3)

    with RankPool(4, lambda: play_hosts(layout)) as pool:
        pool.run(body)


class Failing(nn.Module):
    """Fails in the middle of a backward pass, on every rank."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 40), nn.Linear(40, 4)
        self.fails = False

    def forward(self, x):
        hidden = self.first(x)
        if self.fails:
            hidden.register_hook(self._fail)
        return self.last(hidden)

    def _fail(self, gradient):
        raise Killed


def test_a_backward_pass_that_failed_leaves_the_residuals_as_they_were(hosts):
    def body():
        torch.manual_seed(3)
        model = Failing()
        trial = make_trial(model, [], 4, compress="int8", bucket_mb=1e-4)
        trial.run(1)
        gradients = next(
            c for c in trial.state[torchbearer.CALLBACK_LIST] if isinstance(c, SyncGradients)
        )
        memory = gradients.local_states()["compression"]

        def residuals():
            return {k: each.clone() for k, each in memory.state_dict()["residuals"].items()}

        before = residuals()
        assert any(float(each.abs().max()) > 0 for each in before.values())
        model.fails = True
        with pytest.raises(Killed):
            trial.run(2)
        after = residuals()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        model.fails = False
        trial.run(2)
        assert not all(torch.equal(before[key], residuals()[key]) for key in before)

    hosts.run(body)


@pytest.mark.parametrize("kind", ["int8", "bf16", "powersgd", "hook"])
def test_a_resumed_run_is_the_run_that_was_never_killed(hosts, kind, tmp_path):
    def body(folder):
        def options():
            if kind == "hook":
                return {"hook": int8_hook, "hook_state": Int8State()}
            feedback = {"error_feedback": True} if kind == "bf16" else {}
            return {"compress": kind, "bucket_mb": 1e-3, **feedback}

        def saving():
            return Checkpoint(folder, every_steps=1, background=False, monitor=None)

        expected = trained(epochs=3, **options())
        with pytest.raises(Killed):
            trained(epochs=3, callbacks=[saving(), KillAt(2, 3)], **options())
        found = trained(epochs=3, callbacks=[saving()], **options())
        assert torch.equal(found, expected)

    hosts.run(body, (str(tmp_path),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "int4"}, r"compress is 'int4': it is one of 'bf16'"),
        ({"rank": 2}, r"rank is 2: it is an option of compress='powersgd' alone"),
        ({"compress": "powersgd", "rank": 0}, r"rank is 0: the matrices"),
        ({"error_feedback": True}, r"error_feedback is True without compress"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SyncGradients(**options)
