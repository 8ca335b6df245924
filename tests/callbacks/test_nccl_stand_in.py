"""Trials over the backend that keeps NCCL's contract end with the bits that gloo gives them."""

import pytest
import torch
import torchbearer
from torch import nn

from tests.callbacks.averaging import Branches, adversaries, flat, mine, sync, train
from tests.callbacks.averaging import run as run_trial
from tests.gradients.transport_cases import option, pool_for
from tests.stand_ins import nccl
from torchbearer_ddp.group import collectives


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.table(x[:, 0].abs().mul(10).long() % 50))


def deep():
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)
    )


def unequal():
    """Two batches of 4 on rank 0; one of 4 and one of 3 on rank 1."""
    n = 8 - collectives.rank()
    generator = torch.Generator().manual_seed(collectives.rank())
    return torch.randn(n, 6, generator=generator), torch.randn(n, 2, generator=generator)


def trained(model, callbacks, **options):
    train(model, callbacks, epochs=2, **options)
    return flat(model)


def two_optimizers(transport):
    generator, discriminator, loss, more = adversaries(False)
    run_trial(generator, sync(transport=transport), mine(), criterion=loss, epochs=2, **more)
    return torch.cat([flat(generator), flat(discriminator)])


CASES = {
    "plain": lambda t: trained(deep(), sync(transport=t, bucket_mb=1e-3)),
    "weighted": lambda t: trained(deep(), sync(transport=t, bucket_mb=1e-3), data=unequal()),
    "accumulate": lambda t: trained(deep(), sync(transport=t, accumulate=2), steps=5),
    "bf16": lambda t: trained(deep(), sync(transport=t, bucket_mb=1e-3, compress="bf16")),
    "fp16": lambda t: trained(deep(), sync(transport=t, bucket_mb=1e-3, compress="fp16")),
    "unused, frozen, of many dtypes": lambda t: trained(Branches(), sync(transport=t)),
    "sparse": lambda t: trained(Words(), sync(transport=t)),
    "two optimizers": two_optimizers,
}


@pytest.fixture(scope="module")
def pools():
    with pool_for("gloo") as gloo, pool_for(nccl.NAME) as stand_in:
        yield {"gloo": gloo, nccl.NAME: stand_in}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_with_gloo(case, pools):
    def body(transport):
        torch.manual_seed(0)
        result = CASES[case](option(transport))
        return result, len(nccl.behaviour.log)

    gloo, stand_in = (pool.run(body, (transport,)) for transport, pool in pools.items())
    for (expected, unused), (found, messages) in zip(gloo, stand_in, strict=True):
        assert torch.equal(found, expected)
        assert torch.isfinite(found).all()
        assert messages > 0 == unused


def test_a_stop_that_one_rank_asks_for(pools):
    def body():
        @torchbearer.callbacks.on_step_training
        def stop(state):
            taken.append(state[torchbearer.BATCH])
            state[torchbearer.STOP_TRAINING] |= collectives.rank() == 1 and len(taken) == 3

        taken = []
        train(deep(), [*sync(bucket_mb=1e-3), stop], steps=10)
        return taken

    assert pools[nccl.NAME].run(body) == [[0, 1, 2, 3]] * 2
