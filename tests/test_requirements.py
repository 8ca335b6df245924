"""Where something is missing, tests are skipped, or fail if skipping is forbidden."""

import pytest
import torch

from tests.requirements import GPU_TESTS_ON, NO_SKIP, gpu_tests_on, unavailable


@pytest.mark.parametrize("value", [None, "", "0"])
def test_skipping_is_allowed(monkeypatch, value):
    monkeypatch.delenv(NO_SKIP, raising=False)
    if value is not None:
        monkeypatch.setenv(NO_SKIP, value)
    with pytest.raises(pytest.skip.Exception, match="no such program; install it"):
        unavailable("no such program; install it")


@pytest.mark.parametrize("value", ["1", "yes"])
def test_skipping_is_forbidden(monkeypatch, value):
    monkeypatch.setenv(NO_SKIP, value)
    with pytest.raises(pytest.fail.Exception, match=rf"no such program.*NO_SKIP is {value}"):
        unavailable("no such program; install it")


def test_missing_gpus_are_never_a_failure(monkeypatch):
    monkeypatch.setenv(NO_SKIP, "1")
    monkeypatch.delenv(GPU_TESTS_ON, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(pytest.skip.Exception, match=r"torch sees 1 GPUs here, and these .* need 2"):
        gpu_tests_on()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_tests_on() == "cuda"


def test_the_tests_of_gpus_can_be_tried_on_cpus(monkeypatch):
    monkeypatch.setenv(GPU_TESTS_ON, "cpu")
    assert gpu_tests_on() == "cpu"
    monkeypatch.setenv(GPU_TESTS_ON, "tpu")
    with pytest.raises(pytest.fail.Exception, match="it can be cpu or cuda"):
        gpu_tests_on()
