"""This reader takes any bytes, or refuses them with an error of ours."""

from tests.fuzz import targets
from tests.fuzz.examples import any_bytes


@any_bytes(350)
def test_any_bytes(data):
    targets.foreign_file(data)
