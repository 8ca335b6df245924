"""Find the network interface that leads to a host."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def loopback(host: str) -> str | None:
    """The loopback address that a host's name means, or None if it means another address."""
    if host in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    return host if host.startswith("127.") else None


def route_to(host: str) -> str | None:
    """This host's own address on the route to another host; no packet is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def interface_of(address: str | None) -> str | None:
    """The name of the interface that has this address, or None if none is known to have it."""
    if address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found = socket.inet_ntoa(reply[20:24])
                if found == address or (found == "127.0.0.1" and address.startswith("127.")):
                    return name
    return None
