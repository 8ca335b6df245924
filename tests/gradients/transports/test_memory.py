"""What compression remembers: in the unit of the gradients, and with the buckets it belongs to."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from torchbearer_ddp.gradients.transports.int8_hook import Int8State
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.gradients.transports.memory import Memory


def bucket(*shape):
    parameter = torch.zeros(*shape)
    return Bucket(torch.float32, parameter.device, parameter.numel(), parameters=[parameter])


def powersgd():
    state = PowerSGDState(None)
    state.error_dict[0] = torch.full((6,), 4.0)
    return state


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("unit", [1.0, 2.0**16])
def test_what_was_saved_with_a_loss_scale_is_read_in_the_unit_of_now(unit, is_late):
    saving, state = Memory(), powersgd()
    saving.begin([bucket(2, 3)], state)
    saving.set_unit(2.0**10)  # as the scaler decides, in mid-run
    state.error_dict[0].fill_(4.0)
    saving.residual("0", torch.zeros(6)).current.fill_(4.0)
    saved = saving.state_dict()
    buckets, like, read = [bucket(2, 3)], torch.zeros(6), powersgd()
    loading = Memory()
    if not is_late:
        loading.begin(buckets, read)
        loading.residual("0", like)
        loading.load_state_dict(saved)
    loading.set_unit(unit)
    if is_late:
        loading.load_state_dict(saved)
        loading.begin(buckets, read)
    for found in (loading.residual("0", like).current, read.error_dict[0]):
        assert torch.equal(found, torch.full((6,), 4.0 * unit / 2**10))
    loading.set_unit(1.0)
    assert torch.equal(read.error_dict[0], torch.full((6,), 4.0 / 2**10))


def test_a_file_without_a_unit_is_taken_as_it_is():
    saving = Memory()
    saving.begin([bucket(2, 3)])
    saving.residual("0", torch.zeros(6)).current.fill_(4.0)
    saved = saving.state_dict()
    del saved["unit"]
    loading = Memory()
    loading.set_unit(8.0)
    loading.load_state_dict(saved)
    loading.begin([bucket(2, 3)])
    assert torch.equal(loading.residual("0", torch.zeros(6)).current, torch.full((6,), 4.0))


def test_errors_of_an_exchange_that_did_not_end_stay_with_their_buckets():
    memory, state = Memory(), powersgd()
    memory.begin([bucket(2, 3)], state)
    memory.begin_exchange(1.0)  # backward fails
    memory.begin([bucket(3, 2)], state)  # of the same size
    assert state.error_dict == {}
    memory.begin_exchange(1.0)
    assert state.error_dict == {}


def test_what_is_loaded_replaces_the_errors_of_an_exchange_that_did_not_end():
    memory, state = Memory(), powersgd()
    buckets = [bucket(2, 3)]
    memory.begin(buckets, state)
    saved = memory.state_dict()
    saved["hook"] = {**saved["hook"], "error_dict": {0: torch.full((6,), 9.0)}}
    memory.begin_exchange(0.5)
    memory.load_state_dict(saved)
    memory.begin_exchange(1.0)
    assert torch.equal(state.error_dict[0], torch.full((6,), 9.0))


def test_an_exchange_that_did_not_end_is_undone_in_the_same_buckets():
    memory, state = Memory(), powersgd()
    buckets = [bucket(2, 3)]
    memory.begin(buckets, state)
    memory.begin_exchange(0.5)
    state.error_dict[0] = torch.ones(6)
    memory.begin(buckets, state)
    assert torch.equal(state.error_dict[0], torch.full((6,), 4.0))


@pytest.mark.parametrize("unit", [1.0, 2.0**16])
def test_a_hook_that_remembers_by_itself_has_the_unit_of_now_too(unit):
    def begun(state):
        memory = Memory()
        memory.set_unit(2.0**10)
        memory.begin([bucket(2, 3)], state)
        return memory

    like, saving = torch.zeros(6), Int8State()
    memory = begun(saving)
    saving._memory.residual("0", like).current.fill_(4.0)
    saved = memory.state_dict()
    reading = Int8State()
    loading = begun(reading)
    loading.load_state_dict(saved)
    loading.set_unit(unit)
    found = reading._memory.residual("0", like).current
    assert torch.equal(found, torch.full((6,), 4.0 * unit / 2**10))
