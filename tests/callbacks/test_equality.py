"""N ranks end where one process ends: same parameters, same metrics, same predictions."""

import pytest

from tests.equality import assert_equal, train_and_predict
from tests.gradients.transport_cases import option
from tests.ranks import run_ranks


@pytest.mark.parametrize("optimizer_name", ["momentum", "adam"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_end_where_one_process_ends(world_size, optimizer_name):
    alone = train_and_predict(optimizer_name)
    assert_equal(run_ranks(train_and_predict, world_size, (optimizer_name,)), alone)


def test_every_transport_ends_there(transport_ranks):
    transport, pool = transport_ranks
    alone = train_and_predict("momentum")
    for result in pool.run(train_and_predict, ("momentum", option(transport))):
        for mine, one in zip(result["parameters"], alone["parameters"], strict=True):
            assert (mine - one).abs().max() <= 1e-6
