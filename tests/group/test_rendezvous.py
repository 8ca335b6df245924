"""The store of a run is found although other programs hold some of its ports."""

import http.server
import socket
import threading
import time

import pytest

from tests.processes import bound, free_port
from tests.ranks import run_ranks
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import collectives, rendezvous
from torchbearer_ddp.group.rendezvous import run_store, serve_store

SECONDS = 20.0


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers 400 or 501 to whatever it is sent."""

    def log_message(self, *words):
        pass


@pytest.fixture
def mute():
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def web():
    """The port of a web server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def serve_and_find(ports):
    """Rank zero serves the store and writes to it; every rank returns its port and the value."""
    serve = collectives.rank() == 0
    meet = rendezvous.serve if serve else rendezvous.find
    store = meet("127.0.0.1", ports, "this run", SECONDS)
    run = run_store(store, "this run")
    if serve:
        run.set("key", "from rank 0")
    value = run.get("key").decode()
    collectives.barrier("the end, so that the store is still open")
    return store.port, value


def test_ranks_meet_although_other_programs_hold_the_first_ports(mute, web):
    other_run = serve_store("127.0.0.1", 0, SECONDS)
    run_store(other_run, "another run").set("served", "1")
    ports = [other_run.port, mute, web, free_port()]
    assert run_ranks(serve_and_find, 2, (ports,)) == [(ports[3], "from rank 0")] * 2
    assert not run_store(other_run, "this run").check(["key"])


def test_a_port_that_never_answers_costs_one_attempt(mute):
    store = serve_store("127.0.0.1", 0, SECONDS)  # not yet with the mark of this run
    found = []
    seeker = threading.Thread(
        target=lambda: found.append(
            rendezvous.find("127.0.0.1", [mute, store.port], "this run", SECONDS)
        )
    )
    before = threading.active_count()
    seeker.start()
    counts = []
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        counts.append(threading.active_count() - before)
        time.sleep(0.05)
    assert not found
    # The seeker itself, and for each port its attempt and the bounded call inside it.
    assert max(counts) <= 5
    run_store(store, "this run").set("served", "1")
    seeker.join(SECONDS)
    assert found[0].port == store.port


def test_no_free_port_is_an_error_that_names_them(mute, web):
    with pytest.raises(LaunchError, match=rf"Ports {mute}, {web} on .* are in use.*--port"):
        rendezvous.serve("127.0.0.1", [mute, web], "run", 5.0)
    with pytest.raises(LaunchError, match=rf"Port {mute} on .* cannot be opened.*--port"):
        rendezvous.serve("127.0.0.1", [mute], "run", 5.0)


def test_no_rendezvous_on_any_port_is_an_error_that_names_them(mute, web):
    ports = [mute, web, free_port()]
    started = time.monotonic()
    with pytest.raises(LaunchError, match=rf"within 3 s, on any .* {mute}, {web}, {ports[2]}"):
        rendezvous.find("127.0.0.1", ports, "this run", 3.0)
    assert time.monotonic() - started < bound(3.0 + len(ports) * 2)
