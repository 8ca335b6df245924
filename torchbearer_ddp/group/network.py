"""The network that gloo uses: which interface, and what it prints about its connections."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

#: The level of what torch's C++ side prints: by default warnings (1) and errors (2).
_LEVEL_VARIABLE, _ERRORS = "TORCH_CPP_LOG_LEVEL", 2
_SIOCGIFADDR = 0x8915
_STDOUT = 1
#: From this version on gloo does not print to stdout.
_QUIET_TORCH = (2, 13)
_LINE_OF_GLOO = b"[Gloo]"


def loopback(host: str) -> str | None:
    """The loopback address that a host's name means, or None if it means another address."""
    host = "127.0.0.1" if host in ("localhost", "::1") else host
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
    for _, name in socket.if_nameindex():
        found = address_of(name)
        if found == address or (found == "127.0.0.1" and address.startswith("127.")):
            return name
    return None


def address_of(interface: str) -> str | None:
    """The address of an interface, or None if there is no such interface or it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(reply[20:24])
    return None


def quieten_torch() -> None:
    """Lets torch print errors of its C++ side only, unless the user has chosen the level.

    Else everybody who sends the store of this process something that it does not understand makes
    it print a trace of many lines.
    """
    if _LEVEL_VARIABLE not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # a build without that library or variable
            library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
            level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
            level.value = max(level.value, _ERRORS)


@contextlib.contextmanager
def quiet_gloo() -> Iterator[None]:
    """Keeps the lines about its connections that gloo prints in older versions out of stdout.

    Programs read their ranks' output. What other threads print meanwhile is written afterwards.
    """
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version >= _QUIET_TORCH:
        yield
        return
    kept = os.dup(_STDOUT)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), _STDOUT)
        try:
            yield
        finally:
            os.dup2(kept, _STDOUT)
            os.close(kept)
            caught.seek(0)
            os.write(_STDOUT, b"".join(x for x in caught if not x.startswith(_LINE_OF_GLOO)))
