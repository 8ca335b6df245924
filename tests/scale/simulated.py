"""Many ranks as threads of one process, which use one real store, each over its own connection."""

from __future__ import annotations

import collections
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import PrefixStore

from torchbearer_ddp.group import rendezvous

SECONDS = 120.0


WORLD_SIZE = int(os.environ.get("TORCHBEARER_DDP_SIMULATED_RANKS", "256"))


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
        start = threading.Barrier(len(ranks))

        def act(rank):
            start.wait(SECONDS)
            try:
                return action(rank, self.stores[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(act, ranks))
