"""One headless Chromium for many pages, driven through its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.processes import Program, bound, until

#: The browser reads commands from descriptor 3 and answers on 4.
_SHELL = 'in=$1 out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"'
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
_SECONDS = 30.0


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Prints nothing for a request."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder on a free port of loopback, and its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Browser:
    """A page of a headless Chromium.

    Args:
        profile: A folder for what the browser writes.
    """

    def __init__(self, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._program = Program(
            *("bash", "-c", _SHELL, "bash", str(commands), str(answers), "chromium"),
            *(*_FLAGS, f"--user-data-dir={profile}", "about:blank"),
            raw=True,
            pass_fds=(commands, answers),
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        #: Errors of the console since the last call of ``open``.
        self.errors: list[str] = []
        page = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self._program.__exit__(*exc)
        until(lambda: not self._program.alive(), 10)  # until then they write to the profile
        os.close(self._commands)
        os.close(self._answers)

    def open(self, address: str) -> None:
        """Loads a page and all that it includes."""
        self.errors.clear()
        self._loaded = False
        self._call("Page.navigate", url=address)
        deadline = time.monotonic() + bound(_SECONDS)
        while not self._loaded:
            self._read(deadline)

    def resize(self, width: int, height: int = 900) -> None:
        """Makes the window so many pixels wide."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def use_colours(self, scheme: str) -> None:
        """Prefers ``light`` or ``dark`` pages."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of the promise that it makes."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def photograph(self, picture: Path, *, top: int = 0, left: int = 0, sharpness: int = 1) -> None:
        """Saves what the window shows as a PNG, from a corner on."""
        width, height = self.evaluate("[innerWidth, innerHeight]")
        clip = {"x": left, "y": top, "width": width - left, "height": height - top}
        clip["scale"] = sharpness
        taken = self._call("Page.captureScreenshot", format="png", clip=clip)
        picture.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + bound(_SECONDS)
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _read(self, deadline: float) -> dict[str, Any]:
        """The next message, once what it reports has been noted."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            received = os.read(self._answers, 1 << 20) if ready else b""
            assert received, f"chromium does not answer\n{self._program.text()[-2000:]}"
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, found: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and found["type"] in ("error", "assert"):
            self.errors.append(str(found["args"]))
        elif event == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
