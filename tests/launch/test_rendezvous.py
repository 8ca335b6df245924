"""The ranks do not find each other: every rank says the same, in time."""

import contextlib
import socket
import threading

import pytest

from tests.processes import Program, free_port

pytestmark = pytest.mark.concurrent(4)

TIMEOUT = 4.0
HOST = socket.gethostname()


@contextlib.contextmanager
def listener(answer, *, asked=False):
    """Something that holds a port and is not a rendezvous; it may wait until it is asked."""
    server = socket.create_server(("127.0.0.1", 0))
    taken = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                taken.append(client)
                with contextlib.suppress(OSError):
                    if not asked or client.recv(1):
                        client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        for each in (server, *taken):
            each.close()


def flags(port, world_size, timeout=TIMEOUT):
    size = ("--world-size", str(world_size), "--timeout", str(timeout))
    return ("10", "--host", "127.0.0.1", "--port", str(port), *size, "--rank")


def complaint(program):
    """The one line that a program says before it ends; it may take long to start."""
    assert program.code(TIMEOUT + 30) == 1, program.text()
    (line,) = program.said().splitlines()
    return line


GARBAGE, HTTP = b"\0\xff" * 4096, b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "asked"),
    [(b"", False), (GARBAGE, False), (GARBAGE, True), (HTTP, False)],
    ids=["mute", "garbage", "garbage in answer", "http"],
)
def test_the_port_is_held_by_something_else(answer, asked):
    with listener(answer, asked=asked) as port:
        with (
            Program("sum.py", *flags(port, 2), "0") as zero,
            Program("sum.py", *flags(port, 2), "1") as one,
        ):
            assert f"Port {port} on 127.0.0.1 cannot be opened" in complaint(zero)
            assert f"No rendezvous at 127.0.0.1:{port} within 4 s" in complaint(one)


def test_a_node_finds_the_port_held_by_something_else():
    with listener(b"") as port:
        nodes = ("10", "--nnodes", "2", "--host", "127.0.0.1", "--port", str(port))
        more = ("--nproc-per-node", "1", "--timeout", str(TIMEOUT), "--node-rank")
        with (
            Program("sum.py", *nodes, *more, "0") as first,
            Program("sum.py", *nodes, *more, "1") as second,
        ):
            assert f"Port {port} on 127.0.0.1 cannot be opened" in complaint(first)
            assert f"No rendezvous at 127.0.0.1:{port}" in complaint(second)


def test_rank_zero_never_arrives():
    with Program("sum.py", *flags(free_port(), 2), "1") as one:
        assert "within 4 s: rank 0 has not started there" in complaint(one)


def test_a_rank_never_arrives():
    port = free_port()
    with (
        Program("sum.py", *flags(port, 3, 8), "0") as zero,  # it may start long before the other
        Program("sum.py", *flags(port, 3, 8), "1") as one,
    ):
        expected = "torchbearer_ddp: Only 2 of 3 ranks arrived within 8 s; missing: 2."
        assert complaint(zero).startswith(expected)
        assert complaint(one).startswith(expected)


def test_nodes_disagree_on_the_world_size():
    port = free_port()
    with (
        Program("sum.py", *flags(port, 2, 60), "0") as zero,
        Program("sum.py", *flags(port, 3, 60), "1") as one,
    ):
        found = complaint(zero)
        assert "The world size differs: " in found
        assert f"2 on rank 0 ({HOST})" in found
        assert f"3 on rank 1 ({HOST})" in found
        assert complaint(one) == found


def test_two_processes_have_one_rank():
    port = free_port()
    with (
        Program("sum.py", *flags(port, 3, 60), "0") as zero,
        Program("sum.py", *flags(port, 3, 60), "1") as one,
        Program("sum.py", *flags(port, 3, 60), "1") as other,
    ):
        found = complaint(zero)
        assert found.startswith("torchbearer_ddp: Two processes have rank 1: process ")
        assert {str(one.process.pid), str(other.process.pid)} <= set(found.split())
        assert complaint(one) == complaint(other) == found
