"""Many ranks as threads of a few processes, which use one real store, each over its own connection.

``TORCHBEARER_DDP_SIMULATED_RANKS`` says how many; ``make soak`` has 1,000.
"""

from __future__ import annotations

import collections
import functools
import os
import resource
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection

from torch.distributed import PrefixStore

from torchbearer_ddp.group import rendezvous

WORLD_SIZE = int(os.environ.get("TORCHBEARER_DDP_SIMULATED_RANKS", "256"))
#: So many threads of one interpreter take turns fast enough to be ranks.
RANKS_PER_PROCESS = 64
#: More than any test needs, on a busy machine too.
SECONDS = 120.0 * max(1.0, WORLD_SIZE / 256)


class Counting:
    """A store that counts what is asked of it, by the name of the method and the key."""

    def __init__(self, store):
        self._store = store
        self.counts = collections.Counter()

    def __getattr__(self, name):
        method = getattr(self._store, name)
        if name == "has_extended_api":  # asks nobody
            return method

        def counted(key, *rest):
            label = key if isinstance(key, str) else key[0] if len(key) == 1 else "several"
            self.counts[name, label] += 1
            return method(key, *rest)

        return counted

    def number(self, *, without=()):
        """How many requests there were, without those that wait for these keys."""
        return sum(count for (_, key), count in self.counts.items() if key not in without)


class Ranks:
    """Simulated ranks, each with a connection of its own; ``stores`` has those of the last run."""

    def __init__(self, world_size):
        self.world_size = world_size
        # Both ends of each connection, and of those that look whether the store is there.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * world_size)), hard))
        self._held = rendezvous.serve_store("127.0.0.1", 0, SECONDS)
        self._runs = 0
        with ThreadPoolExecutor(32) as pool:
            connect = functools.partial(rendezvous.connect, timeout=SECONDS)
            address = ["127.0.0.1"] * world_size, [self._held.port] * world_size
            self._clients = list(pool.map(connect, *address))

    def renew(self):
        """Begins another run, on an empty part of the store."""
        self._runs += 1
        self.stores = [Counting(PrefixStore(f"run/{self._runs}", each)) for each in self._clients]

    def run(self, action, ranks=None):
        """What the action returns or raises for each rank, all at the same time."""
        ranks = range(self.world_size) if ranks is None else ranks
        processes = -(-len(ranks) // RANKS_PER_PROCESS)
        parts = [_Part(self, action, ranks[first::processes]) for first in range(processes)]
        try:
            for part in parts:
                part.receive("that its threads are there")
            for part in parts:
                part.begin()
            found = {}
            for part in parts:
                for rank, result, counts in part.receive("its results"):
                    found[rank] = result
                    self.stores[rank].counts.update(counts)
            return [found[rank] for rank in ranks]
        finally:
            for part in parts:
                part.end()


class _Part:
    """A forked process with a thread for each of its ranks."""

    def __init__(self, everyone, action, ranks):
        self._pipe, inner = connection.Pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                self._act(inner, everyone.stores, action, ranks)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        inner.close()

    @staticmethod
    def _act(pipe, stores, action, ranks):
        start = threading.Barrier(len(ranks) + 1)

        def act(rank):
            start.wait(SECONDS)
            try:
                return action(rank, stores[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            found = pool.map(act, ranks)
            pipe.send(None)
            pipe.recv()
            start.wait(SECONDS)
            pipe.send([(r, each, stores[r].counts) for r, each in zip(ranks, found, strict=True)])

    def receive(self, what):
        if not self._pipe.poll(2 * SECONDS):
            raise TimeoutError(f"A process of simulated ranks did not send {what}.")
        return self._pipe.recv()

    def begin(self):
        self._pipe.send(None)

    def end(self):
        """Ends the process if it has not, which a failed test may have left."""
        self._pipe.close()
        deadline = time.monotonic() + 5.0
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            time.sleep(0.01)
