"""Runs tests of a module at the same time, where they mostly wait for other processes.

A test that is marked ``@pytest.mark.concurrent`` runs in a thread, together with others of its
module that are marked, and is reported in its usual place like any other. It is a function of its
parameters, ``tmp_path`` and fixtures that live at least as long as the module, and does not change
what the threads of the process share: environment, working folder, signal handlers, warnings.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

#: How many run at the same time unless the mark says otherwise, as in ``concurrent(6)``.
AT_ONCE = 3

Futures = dict[str, Future[Any]]
_futures = pytest.StashKey[Futures]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "concurrent(n): runs together with others of its module")


@pytest.fixture(scope="module")
def _concurrent_tests(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Futures]:
    """Hands all marked tests of the module that are to run to threads, in their order."""
    chosen = [
        item
        for item in request.session.items
        if item.path == request.path and item.get_closest_marker("concurrent")
    ]
    marks = [mark for item in chosen for mark in item.iter_markers("concurrent")]
    threads = max(mark.args[0] if mark.args else AT_ONCE for mark in marks)
    with ThreadPoolExecutor(threads) as pool:
        futures = {}
        for item in chosen:
            arguments = dict(item.callspec.params) if hasattr(item, "callspec") else {}
            for name in item._fixtureinfo.argnames:
                if name == "tmp_path":
                    arguments[name] = tmp_path_factory.mktemp("concurrent")
                elif name not in arguments:
                    arguments[name] = request.getfixturevalue(name)
            futures[item.nodeid] = pool.submit(item.obj, **arguments)
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def _run_concurrently(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("concurrent"):
        request.node.stash[_futures] = request.getfixturevalue("_concurrent_tests")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Waits for the thread instead of calling the function here."""
    if _futures not in pyfuncitem.stash:
        return None
    pyfuncitem.stash[_futures][pyfuncitem.nodeid].result()
    return True
