"""Foreign connections to the rendezvous port, and a network that fails."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest

from tests import proc
from tests.hosts import hosts
from tests.processes import Program, bound, free_port, until

pytestmark = pytest.mark.concurrent(4)

CUT_SECONDS = 3.0
IDLE = 200
NOISE = (b"\0\xff" * 4096, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x80\x04\x95pickle", b"")


def training(rank, address, port, *flags, before=()):
    """One rank of two; through the network, because these hosts share the memory of one machine."""
    flags = ("--transport", "gloo", *flags)
    place = ("--world-size", "2", "--rank", str(rank), "--host", address, "--port", str(port))
    return Program("train", *place, *flags, before=before)


def assert_well_ended(*programs, seconds=60.0):
    """All ranks did all steps, and have the same parameters."""
    assert [program.code(seconds) for program in programs] == [0] * len(programs), "\n".join(
        program.text() for program in programs
    )
    results = [json.loads(program.output[-1]) for program in programs]
    assert results == [results[0]] * len(programs)


class Strangers:
    """Connect to a port as soon as it opens, say something, and stay."""

    def __init__(self, port):
        self._port, self._taken, self._closed = port, [], threading.Event()
        self._thread = threading.Thread(target=self._come_first)
        self._thread.start()

    def _come_first(self):
        while not self._closed.wait(0.01):
            with contextlib.suppress(OSError):
                self.come()
                return

    def come(self):
        for number in range(IDLE + len(NOISE)):
            client = socket.create_connection(("127.0.0.1", self._port), 5)
            self._taken.append(client)
            with contextlib.suppress(OSError):  # it may hang up on us
                client.sendall(NOISE[number] if number < len(NOISE) else b"")

    @property
    def came(self):
        return len(self._taken)

    def close(self):
        self._closed.set()
        self._thread.join()
        for client in self._taken:
            client.close()


def test_strangers_on_the_rendezvous_port_have_no_effect():
    port = free_port()
    flags = ("--steps", "400", "--pause", "0.02", "--timeout", "60")
    with contextlib.closing(Strangers(port)) as strangers:
        with (
            training(0, "127.0.0.1", port, *flags) as zero,
            training(1, "127.0.0.1", port, *flags) as one,
        ):
            # At the start, before the ranks have begun to train or while they do.
            until(lambda: strangers.came >= IDLE and zero.output and one.output, 60)
            strangers.come()  # and during training
            assert_well_ended(zero, one)
            assert "Traceback" not in zero.text() + one.text()


def test_a_network_that_is_cut_for_a_moment_is_survived():
    with hosts(2) as (first, second):
        flags = ("--steps", "150", "--pause", "0.02", "--timeout", str(bound(30)))
        with (
            training(1, first.address, 29500, *flags, before=second.command) as one,
            training(0, first.address, 29500, *flags, before=first.command) as zero,
        ):
            until(lambda: zero.output and one.output, 60)
            second.link("down")
            time.sleep(CUT_SECONDS)  # the fault itself
            assert zero.process.poll() is None
            assert one.process.poll() is None
            second.link("up")
            assert_well_ended(zero, one)


def stays_connected(program, port, seconds=0.5):
    """True if one and the same connection is there for a while: a store, not a first probe."""
    pid = program.process.pid
    found, deadline = proc.connection_to(pid, port), time.monotonic() + seconds
    while found and time.monotonic() < deadline:
        if proc.connection_to(pid, port) != found:
            return False
        time.sleep(0.02)
    return found is not None


def test_a_network_that_is_cut_in_the_roll_call_ends_both_sides_at_the_timeout():
    timeout = bound(6)
    place = ("--world-size", "3", "--timeout", str(timeout))  # one never comes
    with hosts(2) as (first, second):
        store = ("--host", first.address, "--port", "29500")
        with (
            Program("train", *place, *store, "--rank", "0", before=first.command) as zero,
            Program("train", *place, *store, "--rank", "1", before=second.command) as one,
        ):
            until(lambda: stays_connected(one, 29500), 60)
            second.link("down")
            codes = [zero.code(timeout + 5), one.code(timeout + 5)]
            assert codes == [1, 1], zero.text() + one.text()
            assert "Only 2 of 3 ranks arrived" in zero.said()
            assert "Lost the rendezvous store while waiting for the other ranks" in one.said()


def test_a_network_that_is_cut_for_good_ends_both_sides_at_the_timeout():
    timeout = bound(6)
    with hosts(2) as (first, second):
        flags = ("--steps", "10000", "--pause", "0.02", "--timeout", str(timeout))
        with (
            training(1, first.address, 29500, *flags, before=second.command) as one,
            training(0, first.address, 29500, *flags, before=first.command) as zero,
        ):
            until(lambda: zero.output and one.output, 60)
            second.link("down")
            started = time.monotonic()
            codes = [zero.code(timeout + 5), one.code(timeout + 5)]
            assert codes == [1, 1], zero.text() + one.text()
            assert time.monotonic() - started < timeout + bound(5)
            assert re.search(r"torchbearer_ddp: Rank 1 on .* did not answer", zero.said())
            assert re.search(r"torchbearer_ddp: Rank 0 on .* did not answer", one.said())
