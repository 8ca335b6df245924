"""Hosts on one machine: network namespaces that only a virtual switch connects."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from tests.requirements import needs_network_namespaces


@dataclass(frozen=True)
class Host:
    """One namespace with its own address and loopback."""

    name: str
    address: str
    interface: str
    switch: str
    port: str

    @property
    def command(self) -> tuple[str, ...]:
        """What to put before a command to run it on this host."""
        return ("ip", "netns", "exec", self.name)

    def link(self, state: str) -> None:
        """Takes the network of this host ``down``, or ``up`` again."""
        _ip("-n", self.name, "link", "set", self.interface, state)

    def isolate(self) -> None:
        """Cuts the link between this host and others that are isolated, and no other link."""
        words = ("link", "set", "dev", self.port, "isolated", "on")
        _run("bridge", "-n", self.switch, *words)

    def refuse(self, other: Host) -> None:
        """Drops what would open a connection from another host here, and answers nothing.

        Connections from here to the other host work, as through a firewall.
        """
        drop = f"ip saddr {other.address} tcp flags & (syn | ack) == syn drop"
        chain = f"type filter hook input priority 0; {drop};"
        rules = f"table inet doors {{ chain arriving {{ {chain} }}; }}\n"
        _run(*self.command, "nft", "-f", "-", text=rules)

    def limit(self, rate: str) -> None:
        """Lets this host send no faster than a rate, such as ``8mbit``."""
        shape = ("tbf", "rate", rate, "burst", "32kb", "latency", "200ms")
        _run(*self.command, "tc", "qdisc", "add", "dev", self.interface, "root", *shape)


@contextlib.contextmanager
def hosts(count: int = 2) -> Iterator[list[Host]]:
    """Hosts that reach each other; skips the test where they cannot be made.

    Each host's second address is in a network of its own, so that the right interface has to be
    chosen.
    """
    needs_network_namespaces()
    mark = uuid.uuid4().hex[:6]
    subnet = f"10.{uuid.uuid4().int % 200 + 20}.{uuid.uuid4().int % 250}"
    switch = f"tbd{mark}s"
    made: list[str] = []
    try:
        _ip("netns", "add", switch)
        made.append(switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        found = []
        for index in range(count):
            port = f"port{index}"
            name, address = f"tbd{mark}h{index}", f"{subnet}.{index + 1}"
            host = Host(name, address, f"net{index}", switch, port)
            _ip("netns", "add", host.name)
            made.append(host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "add", "aside", "type", "veth", "peer", "beside")
            _ip("-n", host.name, "link", "set", "beside", "up")
            _ip("-n", host.name, "address", "add", f"192.168.{index}.1/24", "dev", "aside")
            _ip("-n", host.name, "link", "set", "aside", "up")
            _ip("-n", host.name, "link", "add", host.interface, "type", "veth", "peer", port)
            _ip("-n", host.name, "link", "set", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
            found.append(host)
        yield found
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str, text: str | None = None) -> None:
    done = subprocess.run(words, capture_output=True, text=True, input=text)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
