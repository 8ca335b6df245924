"""``python -m torchbearer_ddp doctor`` on hosts whose network is broken in every way."""

import json
import socket
import sys
import time
import uuid

import pytest

from tests.hosts import hosts
from tests.processes import Program, bound, free_port
from tests.requirements import needs_firewall

pytestmark = pytest.mark.concurrent(3)

DOCTOR = (sys.executable, "-m", "torchbearer_ddp", "doctor")
#: What a doctor takes besides waiting for ranks that do not come.
SECONDS = 60.0


def doctor(rank, size, address, *flags, on, port=29500, seconds=20.0, environment=None):
    place = ("--rank", str(rank), "--world-size", str(size), "--host", address)
    where = (*place, "--port", str(port), "--timeout", str(round(bound(seconds), 1)))
    before = on.command if on else ()
    command = (*DOCTOR, *where, *flags)
    return Program(*command, raw=True, before=before, environment=environment)


def on_hosts(machines, size, *flags, separate=False, **others):
    """One rank on each host; if they are to be separate, they do not share memory."""
    first = machines[0].address
    return [
        doctor(
            *(rank, size, first, *flags),
            on=host,
            environment={"TORCHBEARER_DDP_HOST_ID": host.name} if separate else None,
            **others,
        )
        for rank, host in enumerate(machines)
    ]


def ended(programs, seconds=SECONDS):
    """The exit codes of all ranks, and what rank zero has printed."""
    codes = [program.code(seconds) for program in programs]
    return codes, "".join(programs[0].output), "\n".join(program.text() for program in programs)


def report_of(programs, seconds=SECONDS):
    codes, printed, everything = ended(programs, seconds)
    assert printed, everything
    return codes, json.loads(printed), everything


class Together:
    """Several programs of which none is left."""

    def __init__(self, programs):
        self._programs = programs

    def __enter__(self):
        return self._programs

    def __exit__(self, *exc):
        for program in self._programs:
            program.__exit__()


def problems(report):
    return [each["found"] for each in report["findings"] if each["problem"]]


def test_ranks_of_one_host_are_examined(tmp_path):
    folder = tmp_path / "runs"
    flags = ("--nproc-per-node", "2", "--folder", str(folder))
    with Program(*DOCTOR, *flags, raw=True) as program:
        assert program.code(SECONDS) == 0, program.text()
        text = "".join(program.output)
    assert "2 ranks on 1 host" in text
    assert "shared memory (2 ranks on one host)" in text
    assert f"{folder}: " in text
    assert "verdict: " in text
    assert list(folder.iterdir()) == []


def test_torchrun_starts_the_ranks():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    words = ("--nproc-per-node", "2", "-m", "torchbearer_ddp", "doctor", "--json")
    with Program(*torchrun, *words, raw=True) as program:
        assert program.code(SECONDS) == 0, program.text()
        report = json.loads("".join(program.output))
    assert sorted(report["ranks"]) == ["0", "1"]
    assert report["group"]["gradients"] == "gradients: shared memory (2 ranks on one host)"


def test_srun_starts_the_ranks():
    """As in a step of two tasks, whose port the ranks find by the number of the job."""
    job = str(uuid.uuid4().int % 10**8)
    step = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    step |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    programs = [
        Program(*DOCTOR, "--json", raw=True, environment={**step, **place}) for place in ranks
    ]
    with Together(programs):
        codes, report, everything = report_of(programs)
    assert codes == [0, 0], everything
    assert "0 to 1" in report["links"]


def test_a_cut_link_and_a_missing_rank_are_named():
    with hosts(3) as machines:
        machines[1].isolate()
        machines[2].isolate()
        started = time.monotonic()
        with Together(on_hosts(machines, 4, "--json", seconds=4)) as programs:
            codes, report, everything = report_of(programs)
    assert time.monotonic() - started < bound(4) + bound(SECONDS)
    assert codes == [1, 1, 1], everything
    assert report["missing"] == [3]
    missing, cut = problems(report)
    assert "Only 3 of 4 ranks came" in missing
    assert "rank 3 did not" in missing
    assert cut.startswith("rank 1 on ")
    assert "and rank 2 on " in cut
    assert "cannot reach each other" in cut
    assert {"0 to 1", "1 to 0", "0 to 2", "2 to 0"} <= {
        pair for pair, link in report["links"].items() if "round trip" in link
    }


def test_a_one_way_link_is_named():
    """A firewall on one host that lets nobody open a connection from another one."""
    needs_firewall()
    with hosts(3) as machines:
        machines[2].refuse(machines[1])
        with Together(on_hosts(machines, 3, "--json", separate=True)) as programs:
            codes, report, everything = report_of(programs)
    assert codes == [1, 1, 1], everything
    (found,) = problems(report)
    assert found.startswith("The link is one-way: rank 1 on "), found
    assert f" at {machines[2].address} (no answer within 3 s), but is reached from there." in found
    assert "round trip" in report["links"]["2 to 1"]
    assert "error" in report["links"]["1 to 2"]
    remedy = report["findings"][0]["remedy"]
    assert "Open all ports on rank 2 on " in remedy


def test_a_slow_link_is_named_with_its_speed():
    with hosts(3) as machines:
        machines[1].limit("8mbit")
        with Together(on_hosts(machines, 3, "--json", separate=True)) as programs:
            codes, report, everything = report_of(programs)
    assert codes == [1, 1, 1], everything
    rates = {pair: link["send"] for pair, link in report["links"].items()}
    assert 0.5e6 < rates["1 to 0"] < 1.5e6
    assert 0.5e6 < rates["1 to 2"] < 1.5e6
    assert min(rates["0 to 2"], rates["0 to 1"]) > 10e6
    found = problems(report)
    assert len(found) == 2, found
    assert all(each.startswith("The link from rank 1 on ") for each in found)
    assert "B/s; the median of the links between hosts is " in found[0]
    group = report["group"]
    assert group["gradients"] == "gradients: gloo (each of the 3 hosts has one rank)"
    assert group["bytes"] / group["large"] < 1.5e6


def test_a_wrong_interface_is_named_with_a_right_one():
    with hosts(2) as (first, second):
        wrong = {"GLOO_SOCKET_IFNAME": "aside"}
        with Together(
            [
                doctor(0, 2, first.address, "--json", on=first),
                doctor(1, 2, first.address, on=second, environment=wrong),
            ]
        ) as programs:
            codes, report, everything = report_of(programs)
    assert codes == [1, 1], everything
    (found,) = problems(report)
    assert "uses the interface aside (192.168.1.1), by GLOO_SOCKET_IFNAME" in found
    assert f"they do reach {second.address} on net1" in found
    remedy = report["findings"][0]["remedy"]
    assert "GLOO_SOCKET_IFNAME=net1" in remedy
    assert "or unset it" in remedy


def test_a_port_that_a_mute_listener_holds():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        place = {"on": None, "port": port, "seconds": 4}
        here = [doctor(0, 2, "127.0.0.1", **place), doctor(1, 2, "127.0.0.1", "--json", **place)]
        with Together(here) as programs:
            codes, printed, everything = ended(programs)
            (other,) = json.loads("".join(programs[1].output))["findings"]
    assert codes == [1, 1], everything
    assert f"Port {port} on 127.0.0.1 is held by process " in printed
    assert "accepts connections" in other["found"]
    assert "another program holds that port" in other["found"]
    assert f"give every rank another --port than {port}" in other["remedy"]


def test_a_host_that_cannot_be_reached():
    with hosts(2) as (first, second):
        second.link("down")
        with Together(on_hosts([first, second], 2, seconds=5)) as programs:
            codes, printed, everything = ended(programs)
            other = " ".join("".join(programs[1].output).split())
    assert codes == [1, 1], everything
    assert printed.startswith("1 of 2 ranks on 1 host\n")
    assert "Only 1 of 2 ranks came" in printed
    assert "Rank 1 did not meet rank 0 within" in other
    assert "cannot be reached from here" in other
