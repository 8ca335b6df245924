"""This reader takes any bytes, or refuses them with an error of ours."""

from tests.fuzz import targets
from tests.fuzz.examples import any_bytes


@any_bytes(500)
def test_any_bytes(data):
    targets.checkpoint_file(data)
