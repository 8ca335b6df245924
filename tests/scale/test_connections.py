"""What a rank has open does not grow with the number of ranks, and the limit is named."""

import json
import os
import sys

import pytest

from tests.hosts import hosts
from tests.processes import Program, free_port, until
from torchbearer_ddp.group import environment

LATE = {"TORCH_GLOO_LAZY_INIT": "1"}
COUNTING = """
import os
from torchbearer_ddp import run_distributed
from torchbearer_ddp.group import collectives

def work():
    collectives.barrier()
    collectives.broadcast("all of them", "a word")
    return len(os.listdir("/proc/self/fd"))

if __name__ == "__main__":
    print(max(run_distributed(work)))
"""


def printed(*command, **options):
    with Program(sys.executable, *command, raw=True, **options) as program:
        assert program.code() == 0, program.text()
        return program.output[-1].strip()


def test_descriptors_are_as_many_for_more_ranks(tmp_path):
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    few, more = (
        int(printed(str(script), "--nproc-per-node", str(ranks), environment=LATE))
        for ranks in (3, 12)
    )
    assert more - few <= 6  # a ring has two neighbours, a tree a few more


def trained(*flags, environment=None):
    with Program("train", "--transport", "gloo", *flags, environment=environment) as program:
        assert program.code() == 0, program.text()
        return json.loads(program.output[-1])


def test_ranks_that_connect_when_they_first_talk_train_alike():
    flags = ("--nproc-per-node", "3", "--seed", "1")
    assert trained(*flags, environment=LATE) == trained(*flags)


def test_they_do_so_between_hosts_and_name_one_that_was_killed():
    place = ("--world-size", "2", "--port", "29500", "--steps", "10000", "--pause", "0.02")
    with hosts(2) as both:
        store = ("--host", both[0].address, "--transport", "gloo")
        survivor, victim = (
            Program(
                *("train", *place, *store, "--rank", str(rank)),
                before=host.command,
                environment=LATE,
            )
            for rank, host in enumerate(both)
        )
        with survivor, victim:
            until(lambda: survivor.output and victim.output, 60)
            victim.process.kill()
            assert survivor.code() == 1
            assert "rank 1" in survivor.said()


@pytest.mark.parametrize(("ranks", "is_late"), [(environment.MESH_RANKS, False), (65, True)])
def test_many_ranks_connect_when_they_first_talk(monkeypatch, ranks, is_late):
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    environment.prepare("127.0.0.1", "gloo", ranks)
    try:
        assert ("TORCH_GLOO_LAZY_INIT" in os.environ) == is_late
    finally:
        environment.restore()


def limited(soft, hard):
    return {"before": ("prlimit", f"--nofile={soft}:{hard}")}


@pytest.mark.parametrize(("holds_store", "hard", "soft"), [(True, 4096, 1064), (False, 500, 500)])
def test_the_limit_of_open_files_is_raised_as_far_as_possible(holds_store, hard, soft):
    program = (
        "import resource; from torchbearer_ddp.group import descriptors; "
        f"descriptors.allow(500, holds_store={holds_store}); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert printed("-c", program, **limited(100, hard)) == str(soft)


def test_a_limit_that_is_too_low_is_named_before_the_ranks_start():
    place = ("--world-size", "1000", "--rank", "0", "--host", "127.0.0.1")
    with Program("train", *place, "--port", str(free_port()), **limited(1024, 1024)) as program:
        assert program.code() == 1
        assert "1000 ranks need 2064 open files" in program.said()
        assert "this system allows 1024" in program.said()
