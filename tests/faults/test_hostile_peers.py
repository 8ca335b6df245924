"""Strangers who write into the store of a run, and ranks that leave early."""

import datetime
import json
import socket
import struct
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from tests.programs import launch
from tests.ranks import run_ranks
from torchbearer_ddp.errors import DesyncError, LaunchError
from torchbearer_ddp.group import exchanges, membership, rendezvous
from torchbearer_ddp.group import join as joining
from torchbearer_ddp.group.bounded import in_time
from torchbearer_ddp.group.join import leave
from torchbearer_ddp.group.membership import Group, Member
from torchbearer_ddp.group.roll_call import roll_call
from torchbearer_ddp.group.waiting import Wait
from torchbearer_ddp.launch.planner import make_plan

TOKEN = "0123456789abcdef0123456789abcdef"
GARBAGE = [b"no", b"\xff\xfe", b"{}", b"[1]", b"7", b'{"rank": "0"}', b"[" * 100_000, b"1" * 2**21]


def store_of_a_run():
    return rendezvous.run_store(rendezvous.serve_store("127.0.0.1", 0, 10), "run")


@pytest.mark.parametrize("key", ["waiting/1", "failure", "conclusion", "farewells", "debugger"])
def test_garbage_on_the_board_is_told_as_what_it_is(key):
    store = store_of_a_run()
    group = Group(Member(0, 2, timeout=30), store, ["a", "b"])
    for garbage in GARBAGE:
        store.set(key, garbage)
        with pytest.raises(
            DesyncError, match=f"^The entry '{key}'.* another program uses"
        ) as found:
            Wait(group, "a barrier").poll()
        assert "has ended" not in str(found.value)
        assert len(str(found.value)) < 600
    store.set(key, b"")
    Wait(group, "a barrier").poll()


NO_NUMBERS = [b"x", b"", b"9" * 25, b"{}", b"\xff"]


@pytest.mark.parametrize("garbage", NO_NUMBERS)
def test_garbage_in_a_counter_of_the_roll_call_is_told_as_what_it_is(garbage):
    store = store_of_a_run()
    store.set("claim/0", garbage)
    with pytest.raises(LaunchError, match=r"^The entry 'claim/0' is .* another program uses"):
        roll_call(store, Member(0, 2, timeout=20), time.monotonic() + 20, serves=False)


@pytest.mark.parametrize("garbage", NO_NUMBERS)
def test_garbage_in_the_counter_of_those_who_left_keeps_nobody(garbage):
    store = store_of_a_run()
    store.set("left", garbage)
    rendezvous.depart(store, 2, 0.0, None)  # who leaves after success has nothing to say


@pytest.mark.parametrize("key", ["registered/1", "roll", "arrived"])
def test_garbage_in_the_roll_call_is_told_as_what_it_is(key):
    for garbage in GARBAGE[:4]:
        store = store_of_a_run()
        store.set(key, garbage)
        if key == "registered/1":
            store.append("arrived", "1/2 ")
        with pytest.raises(LaunchError, match=f"^The entry '{key}'.* another program uses"):
            roll_call(store, Member(0, 2, timeout=20), time.monotonic() + 20, serves=False)


def test_a_registration_with_a_device_that_is_none_is_refused():
    store = store_of_a_run()
    entry = {
        "rank": 1, "world_size": 2, "host": "h", "machine": "m", "pid": 1, "seed": 0, "gpus": [],
        "local_rank": -1, "local_world_size": 1, "device": "toaster", "backend": "gloo",
    }  # fmt: skip
    store.set("registered/1", json.dumps(entry))
    store.append("arrived", "1/2 ")
    with pytest.raises(LaunchError, match="What the ranks have registered cannot be used"):
        roll_call(store, Member(0, 2, timeout=20), time.monotonic() + 20, serves=False)


def base_of(store):
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def keys_of_the_store():
    group = membership.current()
    store = base_of(group.store)
    guessed = [f"torchbearer_ddp/run/{number}/roll" for number in range(20)]
    assert not any(store.check([key]) for key in guessed)
    assert group.store.check(["roll"])
    return store.list_keys() if hasattr(store, "list_keys") else None  # not in older versions


def test_the_keys_of_a_launch_cannot_be_guessed():
    first, second = launch(keys_of_the_store)[0], launch(keys_of_the_store)[0]
    if first is None:
        return
    secrets = [{key.split("/")[3] for key in keys} for keys in (first, second)]
    assert all(len(found) == 1 and len(next(iter(found))) == 32 for found in secrets)
    assert secrets[0] != secrets[1]


def test_separately_started_ranks_share_a_token():
    settings = {"world_size": 2, "rank": 0, "host": "h"}
    plain = make_plan(settings, {}, 0).prefix
    secret = make_plan(settings, {"TORCHBEARER_DDP_TOKEN": TOKEN}, 0).prefix
    assert secret == make_plan(settings, {"TORCHBEARER_DDP_TOKEN": TOKEN}, 0).prefix
    assert secret != plain == make_plan(settings, {"TORCHBEARER_DDP_TOKEN": ""}, 0).prefix
    assert TOKEN not in secret
    make_plan(settings, {"TORCHBEARER_DDP_TOKEN": "\udcff" * 16}, 0)
    with pytest.raises(LaunchError, match="TORCHBEARER_DDP_TOKEN has 6 characters") as found:
        make_plan(settings, {"TORCHBEARER_DDP_TOKEN": "secret"}, 0)
    assert "secret." not in str(found.value)


SERVE = """if True:
    import sys
    from torchbearer_ddp.group import rendezvous
    store = rendezvous.serve_store("127.0.0.1", 0, 30)
    print(store.port, flush=True)
    sys.stdin.read(1)
    store.set("a", "b")
    print(store.get("a").decode(), flush=True)
"""


def test_a_hundred_garbage_connections_print_nothing():
    command = [sys.executable, "-c", SERVE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as holder:
        port = int(holder.stdout.readline())
        # A store of torch greets with this; what follows is no question that it knows.
        hello = b"\0" + struct.pack("<I", 0x3C85F7CE)
        noise = [b"\xff" * 50, b"\1" + b"\xff" * 100, b"\3" + b"\xff" * 7 + b"\x7f"]
        clients = []
        for number in range(100):
            client = socket.create_connection(("127.0.0.1", port), 10)
            client.sendall(hello + noise[number % len(noise)])
            clients.append(client)
        for client in clients:
            client.settimeout(10)
            assert client.recv(1) == b""  # it has hung up on each
            client.close()
        output, errors = holder.communicate("x", timeout=60)
    assert output == "b\n"
    assert errors == ""


def leave_while_another_connects(connect):
    """Holds rank 1 inside of connecting until rank 0, which leaves at once, waits or has closed."""
    group = membership.current()
    base = base_of(group.store).clone()
    if connect == "join":
        leave()
    calls = []

    def held(*args, **kwargs):
        made = real_new(*args, **kwargs)
        calls.append(made)
        if len(calls) == (2 if connect == "join" else 1):  # the last channel
            base.wait(["what rank 0 does"], datetime.timedelta(seconds=60))
        return made

    def waits(store, key, *rest):
        if key.startswith("connected"):
            base.compare_set("what rank 0 does", "", "waits")
        real_wait(store, key, *rest)

    def closes(*args):
        real_close(*args)
        base.compare_set("what rank 0 does", "", "closed")

    real_new, real_wait, real_close = (
        dist.new_group,
        rendezvous.await_count,
        dist.destroy_process_group,
    )
    with pytest.MonkeyPatch.context() as patch:
        if group.member.rank == 1:
            patch.setattr(dist, "new_group", held)
        else:
            patch.setattr(rendezvous, "await_count", waits)
            patch.setattr(dist, "destroy_process_group", closes)
        if connect == "join":
            # As with more than 64 ranks: fewer exchange something before join returns.
            patch.setattr(exchanges, "open_channels", lambda group: None)
            joining.join(group.member, "127.0.0.1", base.port, prefix="again")
        else:
            group.channel_between([0, 1])
        leave()
    return base.get("what rank 0 does").decode()


@pytest.mark.parametrize("connect", ["join", "a channel"])
def test_no_rank_leaves_before_all_are_connected(connect):
    assert run_ranks(leave_while_another_connects, 2, (connect,)) == ["waits", "waits"]


def make_groups(count):
    group = membership.current()
    store = base_of(group.store)
    for number in range(count):
        leave()
        joining.join(group.member, "127.0.0.1", store.port, prefix=f"group {number}")
    return membership.current().member.rank


def test_groups_that_follow_each_other_at_once():
    assert run_ranks(make_groups, 4, (8,), timeout=120) == [0, 1, 2, 3]


def test_a_message_names_a_time_only_if_it_has_passed():
    def fail():
        raise RuntimeError("closed by peer")

    with pytest.raises(LaunchError) as found:
        joining._connect(fail, Member(1, 2, timeout=60), "h:1", time.monotonic() + 60)
    assert "60 s" not in str(found.value)
    assert "another rank has ended meanwhile" in str(found.value)
    with pytest.raises(LaunchError, match=r"within 0\.2 s"):
        joining._connect(
            lambda: time.sleep(5), Member(1, 2, timeout=0.2), "h:1", time.monotonic() + 0.2
        )
    with pytest.raises(LaunchError, match=r"^late$"):
        in_time(fail, time.monotonic() + 60, "late")


def test_a_store_that_hangs_up_is_not_told_as_a_time_that_has_passed(monkeypatch):
    def hang_up(*args, **kwargs):
        raise RuntimeError("Connection reset by peer")

    store = rendezvous.serve_store("127.0.0.1", 0, 10)
    monkeypatch.setattr(rendezvous, "TCPStore", hang_up)
    with pytest.raises(LaunchError, match=r"^The rendezvous at .* could not be reached") as found:
        rendezvous.connect("127.0.0.1", store.port, 60)
    assert "60 s" not in str(found.value)
