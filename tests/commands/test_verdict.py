"""What the doctor concludes from what was measured, and how links are scheduled and measured."""

import copy
import re
import socket
import threading
import time

import pytest

from torchbearer_ddp.commands.examining import host_checks, links, verdict
from torchbearer_ddp.commands.examining.examination import Report


def rank(number, host="a"):
    """What one rank finds on a host on which all is well."""
    return {
        "host": f"node-{host}",
        "host id": host,
        "pid": 100 + number,
        "world size": 4,
        "versions": {"torch": "2.10", "torchbearer_ddp": "1", "Python": "3.11"},
        "processor": {"usable cores": 8, "load": 0.5},
        "memory": {"shared memory": 8e9, "free shared memory": 8e9, "open files": 65536},
        "gpus": 0,
        "network": {
            **{"host": f"node-{host}", "addresses": [f"10.0.0.{number}"], "seconds": 0.01},
            "interfaces": [{"name": "lo"}, {"name": "eth0"}],
        },
        "gloo": {
            "interface": "eth0",
            "address": f"10.0.0.{number}",
            "why": "the route to 10.0.0.1",
        },
        "rendezvous": {"addresses": ["10.0.0.1"]},
        "ports": {"wanted": 32, "opened": 32, "problem": "", "range": "32768-60999"},
        "segment": {"bytes": 1, "seconds": 0.01},
        "place": {"address": f"10.0.0.{number}", "port": 1, "token": "", "others": {}},
    }


def link(rate=1e9):
    return {"round trip": 2e-4, "clock": 1e-4, "send": rate, "receive": rate}


@pytest.fixture
def healthy():
    """Four ranks on two hosts."""
    report = Report(4, 30, "10.0.0.1")
    report.ranks = {number: rank(number, "aabb"[number]) for number in range(4)}
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    report.links = {pair: link() for pair in pairs}
    group = {"gradients": "gradients: gloo (x)", "small": 1e-4, "large": 1e-2, "bytes": 2**24}
    report.group = group
    return report


def test_nothing_is_found_where_nothing_is_wrong(healthy):
    assert verdict.diagnose(healthy) == []
    text = verdict.text(healthy, [])
    assert "4 ranks on 2 hosts" in text
    assert "nothing was found" in text
    assert max(map(len, text.splitlines())) <= 100


def drop(report, gone):
    """The report of a run to which a rank has not come."""
    del report.ranks[gone]
    report.links = {pair: each for pair, each in report.links.items() if gone not in pair}


def at(*keys, **values):
    """Changes some values of what one rank has found."""

    def plant(report):
        found = report.ranks[keys[0]]
        for key in keys[1:]:
            found = found[key]
        found.update(values)

    return plant


def linked(*pairs, **values):
    """Replaces some links."""
    return lambda report: report.links.update(dict.fromkeys(pairs, values))


def slow(report, rate, *pairs):
    report.links.update({pair: link(rate) for pair in pairs or report.links})


def folder(**values):
    return lambda report: report.folder.update({"folder": "/runs", **values})


#: What is planted, whether it is a problem, how many findings follow, and how the first begins.
FAULTS = [
    (
        lambda report: drop(report, 3),
        *(True, 1, "Only 3 of 4 ranks came to 10.0.0.1 within 30 s; rank 3 did not."),
    ),
    (
        lambda report: report.lost.update({2: "link"}),
        *(True, 1, "rank 2 on node-b stopped answering (while it measured a link)."),
    ),
    (
        lambda report: report.not_measured.append((0, 1)),
        *(False, 1, "1 links were not measured"),
    ),
    (
        at(2, **{"world size": 3}),
        *(True, 1, "The world size differs: 4 on ranks 0, 1 and 3; 3 on rank 2."),
    ),
    (
        at(2, "versions", torch="2.11"),
        *(True, 1, "torch differs: 2.10 on ranks 0, 1 and 3; 2.11 on rank 2."),
    ),
    (
        at(2, "versions", Python="3.12"),
        *(False, 1, "Python differs: 3.11 on ranks 0, 1 and 3; 3.12 on rank 2."),
    ),
    (
        linked((1, 2), (2, 1), error="no answer within 3 s"),
        *(True, 1, "rank 1 on node-a and rank 2 on node-b cannot reach each other (10.0.0.2: no a"),
    ),
    (
        linked((1, 2), error="connection refused"),
        *(True, 1, "The link is one-way: rank 1 on node-a cannot reach rank 2 on node-b at 10.0.0"),
    ),
    (
        linked((0, 2), error="connected, but data did not pass", **{"round trip": 1e-4}),
        *(True, 1, "rank 0 on node-a reaches rank 2 on node-b with single bytes, but not with"),
    ),
    (
        at(1, "gloo", interface="ib7", address=None),
        *(True, 1, "rank 1 on node-a has GLOO_SOCKET_IFNAME=ib7, an interface without"),
    ),
    (
        lambda report: slow(report, 1e8, (0, 2)),
        *(True, 1, "The link from rank 0 on node-a to rank 2 on node-b is slow: 100 MB/s; the"),
    ),
    (
        lambda report: slow(report, 3e7),
        *(False, 4, "The link from rank 0 on node-a to rank 2 on node-b is slow: 30.0 MB/s, 30"),
    ),
    (
        lambda report: slow(report, 1e6),
        *(True, 4, "The link from rank 0 on node-a to rank 2 on node-b is slow: 1.0 MB/s, 1.0"),
    ),
    (
        linked((0, 3), (3, 0), **{**link(), "round trip": 0.02}),
        *(False, 1, "The round trip between rank 0 on node-a and rank 3 on node-b takes 20.0 ms"),
    ),
    (
        lambda report: report.group.update(failed="gloo said no."),
        *(True, 1, "Every link works, but the ranks could not form a group: gloo said no."),
    ),
    (
        linked((0, 2), **{**link(), "clock": -75.0}),
        *(False, 1, "The clock of rank 2 on node-b is 75.0 s behind rank 0's."),
    ),
    (
        at(0, "memory", **{"shared memory": 64e6}),
        *(False, 1, "/dev/shm of node-a has 64.0 MB"),
    ),
    (
        at(2, "segment", problem="Operation not permitted"),
        *(False, 1, "node-b cannot share memory between ranks (Operation not permitted)."),
    ),
    (
        at(0, "ports", opened=3, problem="Too many open files"),
        *(True, 1, "node-a could open only 3 of 32 ports (Too many open files)."),
    ),
    (
        at(0, "memory", **{"open files": 256}),
        *(False, 1, "A process on node-a may have 256 open files."),
    ),
    (
        at(2, "processor", **{"usable cores": 1}),
        *(False, 1, "2 ranks share 1 usable core of node-b."),
    ),
    (
        at(2, "processor", **{"cores of the container": 1.5}),
        *(False, 1, "2 ranks share 1.5 usable cores of node-b."),
    ),
    (
        at(0, "processor", load=30.0),
        *(False, 1, "node-a was busy during the examination: 30.0 processes wanted 8 cores."),
    ),
    (
        at(0, "network", seconds=5.0),
        *(False, 1, "node-a looks up its own name node-a: after 5.0 s."),
    ),
    (
        at(0, "network", addresses=[], problem="Name or service not known"),
        *(False, 1, "node-a looks up its own name node-a: Name or service not known."),
    ),
    (
        at(2, "rendezvous", addresses=["127.0.1.1"]),
        *(False, 1, "The name 10.0.0.1 means different addresses: 10.0.0.1 on ranks 0, 1 and 3; 1"),
    ),
    (
        folder(problem="Permission denied"),
        *(True, 1, "Rank 0 cannot write into /runs (Permission denied)."),
    ),
    (
        folder(durable=1e7, write=1e9, fsync=3.0, bytes=2**26),
        *(False, 1, "/runs writes 10.0 MB/s with fsync, which alone takes 3.0 s."),
    ),
    (
        folder(durable=1e9, write=1e9, fsync=0.1, bytes=2**26, seen={2: False}),
        *(False, 1, "/runs is not the same folder on node-b as on rank 0."),
    ),
]


@pytest.mark.parametrize(("plant", "problem", "count", "text"), FAULTS, ids=[f[-1] for f in FAULTS])
def test_each_fault_is_found_and_nothing_else(plant, problem, count, text, healthy):
    plant(healthy)
    findings = verdict.diagnose(healthy)
    assert findings[0].found.startswith(text)
    assert findings[0].problem is problem
    assert findings[0].remedy.endswith(".")
    assert len(findings) == count, findings
    report = verdict.text(healthy, findings)
    assert text[:20] in report
    assert ("problem: " in report) is problem
    assert "what to do: " in report


def test_hosts_of_the_same_name_are_told_apart(healthy):
    for found in healthy.ranks.values():
        found["host"] = "box"
    healthy.links[0, 2] = healthy.links[2, 0] = {"error": "no answer within 3 s"}
    assert "rank 2 on box (10.0.0.2)" in verdict.diagnose(healthy)[0].found


def test_what_several_hosts_have_is_said_once(healthy):
    for number in (0, 2):
        at(number, "processor", load=30.0 + number)(healthy)
    (found,) = verdict.diagnose(healthy)
    assert "node-a was busy" in found.found
    assert found.found.endswith("30.0 processes wanted 8 cores. Likewise node-b.")


def test_a_wrong_interface_is_said_once(healthy):
    wrong = {"error": "no route to host", "reached instead": {"eth1": "10.9.9.9"}}
    healthy.links[0, 2], healthy.links[1, 2] = wrong, copy.deepcopy(wrong)
    (found,) = verdict.diagnose(healthy)
    assert "they do reach 10.9.9.9 on eth1" in found.found
    assert "GLOO_SOCKET_IFNAME=eth1" in found.remedy


def test_links_of_many_ranks_are_summed_up(healthy):
    healthy.ranks = {number: rank(number, "ab"[number % 2]) for number in range(12)}
    healthy.links = {(a, b): link() for a in range(12) for b in range(12) if a != b}
    text = verdict.text(healthy, [])
    assert re.search(r"inside a host +60 ", text)
    assert re.search(r"between hosts +72 ", text)


# The schedule.


@pytest.mark.parametrize("hosts", ["aaaa", "abcd", "aabbccdd", "aaabc", "a" * 16])
def test_every_pair_is_measured_and_no_host_twice_at_a_time(hosts):
    known = dict(enumerate(hosts))
    chosen = links.pairs(known)
    assert len(chosen) == len(hosts) * (len(hosts) - 1) // 2
    planned = links.rounds(chosen, known)
    assert sorted(pair for together in planned for pair in together) == sorted(chosen)
    for together in planned:
        busy = [host for pair in together for host in {known[each] for each in pair}]
        assert len(busy) == len(set(busy))
    if hosts == "abcd":
        assert len(planned) == 3


def test_of_many_ranks_the_hosts_are_measured():
    known = {number: str(number // 8) for number in range(64)}
    chosen = links.pairs(known)
    between = [pair for pair in chosen if known[pair[0]] != known[pair[1]]]
    assert len(between) == 8 * 7 // 2
    assert len(chosen) - len(between) == 8 * 7
    assert len(links.rounds(chosen, known)) < 30


def test_what_seems_slow_is_measured_again():
    found = {(0, 1): link(1e9), (0, 2): link(1e9), (1, 2): {**link(1e9), "receive": 1e8}}
    assert links.slow_pairs(found) == [(1, 2)]
    assert links.slow_pairs({(0, 1): {"error": "no answer"}}) == []
    better = links.faster(found[1, 2], {**link(9e8), "round trip": 1.0})
    assert (better["send"], better["receive"]) == (1e9, 9e8)
    assert better["round trip"] == 2e-4
    assert links.faster(found[1, 2], {"error": "closed"}) == {"error": "closed"}


# One link.


def place_of(listener, **others):
    return {"address": "127.0.0.1", "port": listener.port, "token": listener.token, **others}


def test_a_link_is_measured_in_both_directions():
    found = links.measure(place_of(links.Listener("127.0.0.1"), others={}), full=True)
    assert "error" not in found
    assert 0 < found["round trip"] < 1
    assert abs(found["clock"]) < 1
    assert found["send"] > 1e4  # whatever else the machine does
    assert found["receive"] > 1e4


def test_a_link_that_does_not_connect_names_the_address_that_does():
    listener = links.Listener("127.0.0.1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.2", 0))
        place = place_of(listener, others={"eth1": "127.0.0.1", "eth2": "127.0.0.3"})
        found = links.measure({**place, "address": "127.0.0.2"}, full=True)
    assert found == {"error": "connection refused", "reached instead": {"eth1": "127.0.0.1"}}


def test_a_stranger_is_not_answered():
    place = place_of(links.Listener("127.0.0.1"), others={})
    found = links.measure({**place, "token": "0" * 16}, full=True)
    assert found["error"].startswith("connected, but single bytes did not pass")


def test_a_listener_that_is_mute_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(links, "_PING_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = {"address": "127.0.0.1", "port": mute.getsockname()[1], "token": "0" * 16}
        found = links.measure({**place, "others": {}}, full=True)
    assert found["error"] == "connected, but single bytes did not pass within 0.3 s"


def test_data_that_does_not_pass_ends_the_measurement(monkeypatch):
    """As with an MTU that is too large: what is small passes."""
    monkeypatch.setattr(links, "_TRANSFER_SECONDS", 0.5)
    monkeypatch.setattr(links, "_discard", lambda *_: threading.Event().wait(5))
    listener = links.Listener("127.0.0.1")
    started = time.monotonic()
    found = links.measure(place_of(listener, others={}), full=True)
    assert found["error"] == "connected, but data did not pass within 0.5 s"
    assert found["round trip"] > 0
    assert time.monotonic() - started < 4


def test_who_holds_a_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert host_checks.holder(port).startswith("process ")
    assert host_checks.holder(port) == "another program"
    assert "nothing listens on port" in host_checks.why_no_rendezvous("127.0.0.1", port)[0]
    assert "has no address here" in host_checks.why_no_rendezvous("no.such.host.invalid", port)[0]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = host_checks.write_speed(tmp_path / "file" / "runs", "mark")
    assert found == {"problem": "Not a directory"}
    assert host_checks.write_speed(tmp_path, "mark")["durable"] > 0
    assert host_checks.sees(tmp_path, "mark")
    host_checks.clean(tmp_path, "mark")
    assert not host_checks.sees(tmp_path, "mark")
