"""``python -m torchbearer_ddp env``."""

import json
import re
import sys

import torch

from tests.processes import Program
from torchbearer_ddp.__main__ import main
from torchbearer_ddp.group import network
from torchbearer_ddp.version import __version__


def test_what_an_issue_needs_is_shown(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_JWT", "a secret")
    monkeypatch.setenv("MY_PASSWORD", "another secret")
    main(["env"])
    text = capsys.readouterr().out
    assert re.search(rf"^  torchbearer_ddp +{re.escape(__version__)}$", text, re.MULTILINE)
    assert re.search(r"^  torch threads +\d+$", text, re.MULTILINE)
    assert re.search(r"^  free shared memory +[\d.]+ [kMGT]B$", text, re.MULTILINE)
    assert re.search(r"^  lo +127\.0\.0\.1, ", text, re.MULTILINE)
    assert re.search(r"^  gloo uses +lo \(GLOO_SOCKET_IFNAME\)$", text, re.MULTILINE)
    assert re.search(r"^  SLURM_JOB_ID +41$", text, re.MULTILINE)
    assert "secret" not in text


def test_json_is_for_programs():
    with Program(sys.executable, "-m", "torchbearer_ddp", "env", "--json", raw=True) as program:
        assert program.code() == 0, program.text()
        found = json.loads("".join(program.output))
    assert found["versions"]["torch"] == str(torch.__version__)
    assert found["processor"]["usable cores"] >= 1
    assert {"name": "lo", "address": "127.0.0.1"}.items() <= found["network"]["interfaces"][
        0
    ].items()


def test_an_interface_that_does_not_exist_has_no_address():
    assert network.address_of("lo") == "127.0.0.1"
    assert network.address_of("nowhere0") is None
