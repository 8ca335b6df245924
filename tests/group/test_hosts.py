"""Processes of this host are told apart from others that get their ids later."""

import os

from torchbearer_ddp.group import hosts


def test_a_process_is_not_taken_for_another_with_its_id():
    started = hosts.start_time(os.getpid())
    mine = hosts.Process(rank=0, host="a", pid=os.getpid(), started=started, machine="b")
    assert mine.alive()
    assert not hosts.Process(0, "a", os.getpid(), started + 1, "b").alive()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, and its parent has not asked
    assert hosts.start_time(child) is None
    os.waitpid(child, 0)
    assert hosts.start_time(child) is None
