"""Local work: known inside the block, also nested and after an exception, and in every thread."""

import threading

import pytest

from torchbearer_ddp.group import local_work


def test_the_block_is_local_also_nested_and_only_until_it_ends():
    assert not local_work.inside()
    with local_work.local():
        assert local_work.inside()
        with local_work.local():
            assert local_work.inside()
        assert local_work.inside()
    assert not local_work.inside()


def test_an_exception_ends_the_block():
    with pytest.raises(KeyError), local_work.local():
        raise KeyError
    assert not local_work.inside()


def test_hooks_that_autograd_calls_in_its_threads_are_inside():
    found = []
    with local_work.local():
        thread = threading.Thread(target=lambda: found.append(local_work.inside()))
        thread.start()
        thread.join(10)
    assert found == [True]
