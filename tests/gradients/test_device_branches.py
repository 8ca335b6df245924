"""What happens for gradients on a GPU, with tensors that only say so (see tests/stand_ins)."""

import threading
from unittest import mock

import pytest
import torch
import torchbearer
from torch import nn
from torchbearer.callbacks import Callback

from tests.gradients.transport_cases import bucket, make, pool_for
from tests.ranks import run_ranks
from tests.stand_ins import cuda, nccl
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.errors import DistributedError, PeerLost
from torchbearer_ddp.gradients.buckets import GradientBucket
from torchbearer_ddp.gradients.exchange import Options, Trained
from torchbearer_ddp.gradients.header import RankReport
from torchbearer_ddp.gradients.hooks import EarlySends, Marks
from torchbearer_ddp.gradients.host_copy import HostCopy
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.gradients.target_weights import EarlyTotal, TargetWeights
from torchbearer_ddp.gradients.timing import Timing, clock_for
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.gradients.weights import Average
from torchbearer_ddp.group import collectives, membership, replicas


@pytest.fixture(scope="module")
def pool():
    with pool_for(nccl.NAME) as ranks:
        yield ranks


def on_gpus(body):
    """Runs a test on two ranks with a pretended GPU each."""

    def on_a_rank():
        with cuda.pretended():
            body()

    def test(pool):
        pool.run(on_a_rank)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


def network(*devices):
    """Layers on these devices."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in devices]
    for layer, device in zip(layers, devices, strict=True):
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(cuda.CudaTensor(parameter.detach(), device)))
    return nn.Sequential(*layers)


def reducer_of(model, **options):
    parameters = list(reversed(list(model.parameters())))
    return Reducer(membership.current(), [Trained(p) for p in parameters], Options(**options))


def one_step(model, reducer, weight=1.0):
    model.zero_grad()
    x = cuda.CudaTensor(torch.full((3, 6), 1.0 + collectives.rank()))
    reducer.begin(Average.WEIGHTED, weight)
    model(x).square().mean().backward()
    return reducer.reduce(RankReport(weight=weight), Average.WEIGHTED)


@on_gpus
def test_a_step_blocks_for_nothing_and_takes_one_copy_and_one_product_for_each_bucket():
    model = network(*["cuda:0"] * 3)
    reducer = reducer_of(model, bucket_bytes=200)
    assert reducer.choice == f"gradients: {nccl.NAME} (the gradients are on cuda)"
    one_step(model, reducer)
    cuda.Counts.clear()
    summary = one_step(model, reducer, weight=3.0 + collectives.rank())
    assert cuda.Counts.blocking == []
    assert list(summary.weights) == [3.0, 4.0]
    buckets = 2
    assert cuda.Counts.kernels.count("aten._foreach_copy_.default") == buckets
    assert cuda.Counts.kernels.count("aten.mul_.Tensor") == 2 * buckets  # and the correction
    assert cuda.Counts.kernels.count("aten.copy_.default") == 2  # the header, there and back
    everyone = collectives.all_gather([p.grad.on_cpu for p in model.parameters()], "gradients")
    for mine, theirs in zip(*everyone, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()
        assert mine.abs().sum() > 0


@on_gpus
def test_gradients_that_a_rank_lacks_are_zeroed_together():
    model = network(*["cuda:0"] * 3)
    reducer = reducer_of(model)
    if collectives.rank() == 0:
        for parameter in model.parameters():
            parameter.grad = cuda.CudaTensor(torch.ones(parameter.shape))
    cuda.Counts.clear()
    reducer.reduce(RankReport(), Average.EQUAL)
    together = ["aten._foreach_copy_.default", "aten._foreach_zero_.default"]
    assert cuda.Counts.kernels.count(together[collectives.rank()]) == 1
    assert cuda.Counts.blocking == []
    for parameter in model.parameters():
        assert torch.equal(parameter.grad.on_cpu, torch.full(parameter.shape, 0.5))


@on_gpus
def test_a_model_on_two_gpus_of_one_process():
    model = network("cuda:0", "cuda:1", "cuda:0")
    collectives.broadcast_tensors(list(model.parameters()), "a model on two devices")
    reducer = reducer_of(model)
    for parameter in model.parameters():
        value = 1.0 + 2 * collectives.rank()
        parameter.grad = cuda.CudaTensor(torch.full(parameter.shape, value), parameter.device)
    reducer.reduce(RankReport(), Average.EQUAL)
    for parameter in model.parameters():
        assert parameter.grad.device == parameter.device
        assert torch.equal(parameter.grad.on_cpu, torch.full(parameter.shape, 2.0))
    assert replicas.fingerprint(model.named_parameters()).unique().numel() == 6


@pytest.mark.parametrize("backend", [nccl.NAME, nccl.GPU_NAME])
def test_a_model_partly_on_the_cpu(backend):
    def body():
        model = network("cuda:0", "cuda:0")
        model.append(nn.Linear(6, 2))
        reducer = reducer_of(model)
        for parameter in model.parameters():
            gradient = torch.full(parameter.shape, 1.0 + 2 * collectives.rank())
            on_cpu = parameter.device.type == "cpu"
            parameter.grad = gradient if on_cpu else cuda.CudaTensor(gradient)
        nccl.behaviour.log.clear()  # of joining
        reducer.reduce(RankReport(), Average.EQUAL)
        for parameter in model.parameters():
            found = getattr(parameter.grad, "on_cpu", parameter.grad)
            assert torch.equal(found, torch.full(parameter.shape, 2.0))
        return len([kind for kind, *_ in nccl.behaviour.log if kind == "start"])

    def on_a_rank():
        with cuda.pretended():
            return body()

    # NCCL has nothing for tensors on the CPU: they take another way.
    messages = 2 if backend == nccl.NAME else 1
    assert run_ranks(on_a_rank, 2, backend=backend) == [messages] * 2


def test_checksums_are_computed_on_the_device_and_come_back_together():
    with cuda.pretended() as counts:
        tensors = [torch.randn(1000), torch.randn(30, 7).t(), torch.arange(11) > 4, torch.ones(0)]
        on_device = [("", cuda.CudaTensor(tensor)) for tensor in tensors]
        first = replicas.fingerprint(on_device)
        assert counts.blocking == ["cpu"]
        assert torch.equal(first, replicas.fingerprint(on_device))
    assert first.device.type == "cpu"
    assert first.unique().numel() == len(tensors)
    exchanged = tensors[0].clone()
    exchanged[3], exchanged[900] = tensors[0][900], tensors[0][3]
    flipped = tensors[0].clone()
    flipped.view(torch.int32)[17] ^= 1
    reversed_ = tensors[0].flip(0)
    seen = [replicas.device_checksum([each]) for each in (exchanged, flipped, reversed_)]
    assert len({int(first[0]), *map(int, seen)}) == 4
    strided = tensors[1].contiguous()
    assert int(replicas.device_checksum([strided])) == int(first[1])  # strides do not matter


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 2.0, 1.0])])
def test_the_weights_of_targets_are_summed_early_and_read_without_waiting(weight):
    target = torch.tensor([0, 1, 1, -100, 2])
    with cuda.pretended() as counts:
        on_device = None if weight is None else cuda.CudaTensor(weight)
        weights = TargetWeights(on_device)
        state = {torchbearer.Y_TRUE: cuda.CudaTensor(target.clone())}
        totals = EarlyTotal()
        expected = TargetWeights(weight).total(target)
        assert totals.of(weights, state[torchbearer.Y_TRUE]) == expected
        assert counts.blocking == ["aten._local_scalar_dense.default"]
        counts.clear()
        for _ in range(3):
            totals.begin(state)
            # A criterion is described anew at each step.
            assert totals.of(TargetWeights(on_device), state[torchbearer.Y_TRUE]) == expected
        assert counts.blocking == []
        totals.begin(state)
        state[torchbearer.Y_TRUE].fill_(-100)  # a callback changes the targets
        assert totals.of(weights, state[torchbearer.Y_TRUE]) == 0.0
        state[torchbearer.Y_TRUE] = cuda.CudaTensor(target.clone())
        assert totals.of(weights, state[torchbearer.Y_TRUE]) == expected


def test_the_times_of_a_device_are_those_of_its_events():
    class Event:
        """An event of a stream whose clock the test sets."""

        def __init__(self, device, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = now[0]

        def elapsed_time(self, end):
            return 1000 * (end.at - self.at)

    now = [0.0]
    with cuda.pretended(), mock.patch.object(torch, "Event", Event):
        clock = clock_for(torch.device("cuda:0"))
        parts = []
        # Each step: 3 s of this rank's own work, 2 s of waiting for a rank that took 5, 1 s moving.
        for _ in range(3):
            now[0] += 3
            sent = clock.begin_exchange()
            now[0] += 3
            parts.append(clock.end_exchange(slowest=sent and 5.0))
    assert parts == [Timing(), Timing(3.0, 2.0, 1.0), Timing(3.0, 2.0, 1.0)]


def test_two_threads_of_backward_send_each_bucket_once_and_in_order():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    made = [GradientBucket(torch.float32, torch.device("cpu"), indices=[i]) for i in range(3)]
    hooks = EarlySends(parameters, [None] * 3, Marks(), made)
    other_thread_came = threading.Event()
    sent = []

    def send(index):
        if index == 0:
            other_thread_came.wait(0.3)
        sent.append(index)

    hooks.arm(send)
    first = threading.Thread(target=hooks._appeared, args=(0, parameters[0]))
    first.start()
    second = threading.Thread(
        target=lambda: (hooks._appeared(1, parameters[1]), other_thread_came.set())
    )
    second.start()
    first.join(10)
    second.join(10)
    assert sent == [0, 1]


def test_the_line_names_the_backend_that_the_group_has_for_the_device():
    def body():
        on_gpu = Bucket(torch.float32, torch.device("cuda:0"), 10)
        with cuda.pretended():
            transport, line = make("auto", [bucket(10), on_gpu])
        assert (transport.name, line) == ("gloo", "gradients: gloo (the gradients are on cuda)")
        with cuda.pretended(), pytest.raises(DistributedError, match="'nccl' is not possible here"):
            make("nccl", [on_gpu])

    run_ranks(body, 2)


@on_gpus
def test_a_trial_on_a_gpu_blocks_for_nothing():
    class Watch(Callback):
        def on_sample(self, state):
            cuda.Counts.clear()

        def on_step_training(self, state):
            blocking.append(list(cuda.Counts.blocking))

    blocking = []
    model = network(*["cuda:0"] * 2)
    generator = torch.Generator().manual_seed(collectives.rank())
    batches = [
        (
            cuda.CudaTensor(torch.randn(4, 6, generator=generator)),
            cuda.CudaTensor(torch.randint(0, 6, (4,), generator=generator)),
        )
        for _ in range(7)
    ]
    batches[2][1][0] = -100  # one rank's loss may divide by fewer
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        callbacks=[SyncModel(), Watch(), SyncGradients(bucket_mb=1e-4)],
        verbose=0,
    )
    trial.state[torchbearer.DEVICE] = "cuda:0"
    trial.with_train_generator(batches, 7).run(1)
    # At steps 1, 2, 4, 8 and so on of the first epoch the loss is examined.
    assert [blocking[step - 1] for step in (3, 5, 6, 7)] == [[]] * 4
    everyone = collectives.all_gather([p.on_cpu for p in model.parameters()], "parameters")
    for mine, theirs in zip(*everyone, strict=True):
        assert torch.equal(mine, theirs)


def test_a_header_that_does_not_come_leaves_the_host_free_to_look_around():
    class Waiting:
        """A wait that fails when it looks at the other ranks for the second time."""

        timeout = 0.05
        looks = 0

        def poll(self):
            self.looks += 1
            if self.looks == 2:
                raise PeerLost("rank 1 is dead")

    with (
        cuda.pretended() as counts,
        mock.patch.object(cuda.Event, "query", return_value=False),
        pytest.raises(PeerLost, match="rank 1 is dead"),
    ):
        HostCopy(torch.zeros(3, device="cuda:0")).receive(Waiting())
    assert counts.blocking == []
