"""Programs of Python that are forked from a server which has imported torch already.

To start Python and to import torch takes two seconds of a core, which is most of what the test of
a launch costs. :func:`start` makes the same process without them: with a session, an environment,
descriptors, arguments and an end of its own, and nothing of the server but the modules of others.
What Python or torch read when they are loaded is that of the server; :func:`serves` says whether a
command depends on it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from multiprocessing.connection import wait  # not select, which knows 1,024 descriptors
from pathlib import Path
from typing import Any

#: The environment variable that marks the processes of one program, see ``tests/proc.py``. The
#: kernel shows that with which the server was started, so each program writes its own over it.
MARK = "TORCHBEARER_DDP_TEST"
_MARK_LENGTH = 32
#: Not this package: it reads the environment when it is imported.
_IMPORTED = ("numpy", "torch", "torch._dynamo", "torchbearer", "cloudpickle")
#: Read when Python or a library is loaded.
_READ_EARLY = ("PYTHON", "OMP_", "MKL_", "TORCH", "GLIBC", "MALLOC", "LD_")
#: What Python writes into its environment when it starts.
_CHOSEN = ("LC_CTYPE",)
_THREADS = "OMP_NUM_THREADS"
_LARGEST_REQUEST = 1 << 20


class WarmProcess:
    """A program of the server, with what tests use of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end."""
        if self.returncode is None:
            if not wait([self._status], timeout):
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
            word = os.read(self._status, 16)
            assert word, "the process that programs are forked from has ended"
            self.returncode = int(word)
            os.close(self._status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that has imported everything, as its client sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_python", str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                env={**environment, MARK: "-" * _MARK_LENGTH},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as those of the programs are: no file with a position
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._socket.settimeout(60)

    def start(
        self, words: list[str], environment: dict[str, str], folder: Path, *streams: int
    ) -> WarmProcess:
        ours, theirs = os.pipe()
        request = {"words": words, "environment": environment, "folder": str(folder)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [*streams, theirs])
        os.close(theirs)
        pid = self._socket.recv(16)
        assert pid, f"no program was forked: {self._process.stderr.read()!r}"
        return WarmProcess(int(pid), ours)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # what was forked from here may have it too
        self._socket.close()
        self._process.communicate(timeout=30)


_lock = threading.Lock()
_server: _Server | None = None


def serves(words: tuple[str, ...], environment: dict[str, str]) -> bool:
    """True if Python, given these words and variables, may be a forked one."""
    early = any(name.startswith(_READ_EARLY) for name in environment if not _is_set_later(name))
    return not early and (words[0] in ("-c", "-m") or not words[0].startswith("-"))


def _is_set_later(name: str) -> bool:
    return name == _THREADS or name.startswith(("TORCHBEARER", "TORCHELASTIC", "TORCH_GLOO"))


def start(
    words: tuple[str, ...],
    environment: dict[str, str],
    added: dict[str, str],
    folder: Path,
    *streams: int,
) -> WarmProcess:
    """Starts Python with these words after its name, as :class:`subprocess.Popen` would.

    Args:
        words: What stands after ``python``.
        environment: All variables that do not belong to this program alone.
        added: The others, and the mark.
        folder: Where it runs.
        streams: Descriptors for stdin, stdout and stderr.
    """
    global _server
    with _lock:
        if _server is None:
            _server = _Server(environment)
        return _server.start(list(words), {**environment, **added}, folder, *streams)


def close() -> None:
    """Ends the server, if there is one; programs that run are left alone."""
    global _server
    with _lock:
        if _server is not None:
            _server.close()
        _server = None


# The server.


def _serve(connection: socket.socket) -> None:
    """Forks a program for each request, and tells of its end; ends with the connection."""
    address = _address_of_mark()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready = wait([connection, ended])
        if ended in ready:
            os.read(ended, 1024)
            _report_ends(statuses)
        if connection in ready:
            request, descriptors, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, 4)
            if not request:
                return
            child = os.fork()
            if not child:
                _become(json.loads(request), descriptors[:3], address)
            statuses[child] = descriptors.pop()
            for each in descriptors:
                os.close(each)
            connection.send(str(child).encode())


def _report_ends(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            status = statuses.pop(found[0])
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(status, str(os.waitstatus_to_exitcode(found[1])).encode())
            os.close(status)


def _address_of_mark() -> int:
    """Where the kernel reads this process's mark from."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    return int(getenv(MARK.encode()))


# A forked program.


def _become(request: dict[str, Any], streams: list[int], address: int) -> None:
    """Makes this forked process a program of its own, and runs it; never returns."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)
    chosen = {name: os.environ[name] for name in _CHOSEN if name in os.environ}
    os.environ.clear()
    os.environ.update({**chosen, **request["environment"]})
    ctypes.memmove(address, os.environ[MARK].encode(), _MARK_LENGTH)
    os.chdir(request["folder"])
    # As at their import; Python's own is renewed in every forked process.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    if threads := os.environ.get(_THREADS):
        sys.modules["torch"].set_num_threads(int(threads))
    words = request["words"]
    sys.orig_argv = [sys.executable, *words]
    _end(_outcome(words))


def _outcome(words: list[str]) -> int:
    """Runs what ``python`` would run, and returns its exit code."""
    try:
        try:
            _run(words)
        except SystemExit:
            raise
        except BaseException as error:
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, *_RUNPY):
                frames = frames.tb_next
            sys.excepthook(type(error), error.with_traceback(frames), frames)
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    except SystemExit as error:  # a hook may raise it too
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    return 0


#: The module of the server: this code is part of it.
_kept: list[types.ModuleType] = []
_RUNPY = (runpy.__file__, "<frozen runpy>")


def _run(words: list[str]) -> None:
    _kept.append(sys.modules["__main__"])
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.BuiltinImporter  # type: ignore[assignment]
    kind, *rest = words
    if kind == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        sys.argv = words
        main.__file__ = str(Path(kind).absolute())
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        exec(compile(Path(kind).read_bytes(), main.__file__, "exec"), vars(main))


def _end(code: int) -> None:
    """Ends as Python does, without the unloading of modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
