"""How the doctor's ranks work together through a store, also when one of them does not."""

import time

import pytest

from torchbearer_ddp import DesyncError, LaunchError
from torchbearer_ddp.commands.examining.meeting import Answering, Asking, pause_of, register
from torchbearer_ddp.group import rendezvous
from torchbearer_ddp.group.bounded import in_background

FOUND = {"pid": 7, "host": "node1"}


@pytest.fixture
def store():
    return rendezvous.run_store(rendezvous.serve_store("127.0.0.1", 0, 30), "doctor")


def answering(store, rank, **work):
    """A rank that can do this work, in a thread."""
    register(store, rank, FOUND)
    answers = Answering(rendezvous.own_connection(store), rank, work, pause_of(2))
    return answers, in_background(answers.run)


def test_every_rank_answers_its_own_task(store):
    _, one = answering(store, 0, double=lambda x: 2 * x)
    _, two = answering(store, 1, double=lambda x: 2 * x)
    asking = Asking(store, 2, time.monotonic() + 30)
    asking.gather(time.monotonic() + 30)
    assert asking.here == {0: FOUND, 1: FOUND}
    assert asking.ask({0: ["double", 4], 1: ["double", 5]}, 30) == {0: 8, 1: 10}
    assert asking.ask({1: ["double", [1]]}, 30) == {1: [1, 1]}
    asking.end(5)
    assert (one.result(30), two.result(30)) == (5, 5)
    assert asking.lost == {}


def test_an_error_of_a_rank_is_its_answer(store):
    answering(store, 0, divide=lambda x: 1 / x)
    asking = Asking(store, 1, time.monotonic() + 30)
    asking.gather(time.monotonic() + 30)
    failed = {0: {"failed": "ZeroDivisionError: division by zero"}}
    assert asking.ask({0: ["divide", 0]}, 30) == failed
    assert asking.ask({0: ["divide", 2]}, 30) == {0: 0.5}
    asking.end(0)


def test_a_rank_that_does_not_answer_is_passed_over(store):
    answering(store, 0, link=lambda: "done")
    register(store, 1, FOUND)  # and nothing more: it is frozen
    asking = Asking(store, 3, time.monotonic() + 30)
    asking.gather(time.monotonic() + 0.1)
    assert sorted(asking.here) == [0, 1]
    started = time.monotonic()
    assert asking.ask({0: ["link"], 1: ["link"], 2: ["link"]}, 1.0) == {0: "done"}
    assert asking.lost == {1: "link"}
    assert asking.ask({0: ["link"], 1: ["link"]}, 20.0) == {0: "done"}
    assert time.monotonic() - started < 15
    assert asking.answering == [0]
    asking.end(1)


def test_nothing_is_asked_after_the_deadline(store):
    register(store, 0, FOUND)
    asking = Asking(store, 1, time.monotonic() + 0.2)
    asking.gather(time.monotonic() + 30)
    started = time.monotonic()
    assert asking.ask({0: ["link"]}, 60) == {}
    assert time.monotonic() - started < 15


def test_two_processes_with_one_rank(store):
    register(store, 1, FOUND)
    with pytest.raises(LaunchError, match="Two processes have rank 1: process 7 on node1 and"):
        register(store, 1, {"pid": 8, "host": "node2"})


@pytest.mark.parametrize("garbage", [b"no", b"\xff", b"{}", b"[1]", b"null"])
def test_what_a_stranger_writes_is_told_as_what_it_is(garbage):
    store = rendezvous.run_store(rendezvous.serve_store("127.0.0.1", 0, 10), "doctor")
    store.set("registered/0", garbage)
    named = r"^The entry 'registered/0'.* another program uses the store"
    with pytest.raises(DesyncError, match=named):
        Asking(store, 1, time.monotonic() + 10).gather(time.monotonic() + 10)
    store.set("task/0/0", garbage)
    with pytest.raises(DesyncError, match=r"^The entry 'task/0/0'.* another program uses"):
        Answering(store, 0, {}, 0.01).run()
