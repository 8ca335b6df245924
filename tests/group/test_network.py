"""What gloo prints about its connections in older versions of torch."""

import os

import pytest

from torchbearer_ddp.group import network


@pytest.mark.parametrize(
    ("quiet_from", "expected"), [((99, 0), "mine\n"), ((0, 0), "[Gloo] Rank 0 is here\nmine\n")]
)
def test_lines_of_gloo_are_left_out_of_stdout_and_others_are_not(
    quiet_from, expected, monkeypatch, capfd
):
    monkeypatch.setattr(network, "_QUIET_TORCH", quiet_from)
    with network.quiet_gloo():
        os.write(1, b"[Gloo] Rank 0 is here\nmine\n")
    os.write(1, b"later\n")
    assert capfd.readouterr().out == f"{expected}later\n"
