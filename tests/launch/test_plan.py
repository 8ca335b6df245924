"""Flags and environments as pure functions: which ranks, which devices, which complaints."""

import argparse
import time

import pytest

from torchbearer_ddp.checked import Unexpected
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group.join import device_of
from torchbearer_ddp.launch.environments import in_slurm_step
from torchbearer_ddp.launch.flags import add_arguments, merge, read_flags, read_options
from torchbearer_ddp.launch.node_lists import Counts, expand_hosts
from torchbearer_ddp.launch.planner import make_plan

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[07-08]",
}


def plan(command="", environment=None, gpus=0, accelerator="", **overrides):
    settings = merge(read_flags(command.split()), overrides)
    return make_plan(settings, environment or {}, gpus, accelerator)


def devices(found, gpus):
    """The devices that the ranks started here would select."""
    started = found.member.local_world_size if found.launcher == "spawn" else 1
    return [device_of(found.member_at(i), gpus) for i in range(started)]


# Which launcher, and why.


@pytest.mark.parametrize(
    ("command", "environment", "launcher"),
    [
        ("", {}, "inline"),
        ("--nproc-per-node 2", {}, "spawn"),
        ("--world-size 2 --rank 1 --host h", {}, "rank"),
        ("--nnodes 2 --node-rank 1 --nproc-per-node 2 --host h", {}, "spawn"),
        ("", TORCHRUN, "torchrun"),
        ("", SLURM, "srun"),
        ("", {**SLURM, **TORCHRUN}, "torchrun"),
        ("--nproc-per-node 2", {**SLURM, **TORCHRUN}, "spawn"),
        ("--world-size 2 --rank 0 --host h", {**SLURM, **TORCHRUN}, "rank"),
        ("--launcher inline", {**SLURM, **TORCHRUN}, "inline"),
        ("--launcher srun", {**SLURM, **TORCHRUN}, "srun"),
        ("--launcher slurm --nodes 2", {}, "slurm"),
        # A batch script and salloc's shell are no steps: the other ranks would never come.
        ("", {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, "inline"),
        ("", {**SLURM, "SLURM_STEP_ID": "4294967291"}, "inline"),
        ("", {**SLURM, "SLURM_STEP_ID": "4294967290"}, "inline"),
        # An address alone is not torchrun's: batch scripts export it.
        ("", {"MASTER_ADDR": "h", "MASTER_PORT": "1"}, "inline"),
    ],
)
def test_precedence(command, environment, launcher):
    assert plan(command, environment).launcher == launcher


def test_arguments_win_over_flags():
    found = plan("--nproc-per-node 2 --timeout 7", nproc_per_node=3, seed=5, backend=None)
    member = found.member
    assert (member.world_size, member.timeout, member.seed, member.backend) == (3, 7.0, 5, "gloo")


def test_the_line_says_what_was_detected_and_why():
    line = "2 ranks on this host (from --nproc-per-node 2), gloo on cpu, "
    assert plan("--nproc-per-node 2").describe(1) == line + "1 thread each"
    assert plan("--nproc-per-node 2").describe(4) == line + "4 threads each"
    assert "1 process (no launch flags, no torchrun, no Slurm step)" in plan().describe(1)
    assert "4 ranks, rendezvous at node07:" in plan("", SLURM).describe(1)


# Who is who.


def test_ranks_of_a_node():
    found = plan("--nnodes 3 --node-rank 2 --nproc-per-node 4 --host h --port 99")
    assert [found.member_at(i).rank for i in range(4)] == [8, 9, 10, 11]
    assert [found.member_at(i).local_rank for i in range(4)] == [0, 1, 2, 3]
    assert (found.member.world_size, found.member.local_world_size) == (12, 4)
    assert (found.host, found.ports, found.serve) == ("h", (99,), False)


def test_one_rank_of_a_world():
    found = plan("--world-size 2 --rank 0 --host h")
    assert (found.host, found.ports, found.serve) == ("h", (29500,), True)
    assert found.member.local_rank == -1  # for the roll call to find out


def test_local_ranks_meet_on_loopback_at_any_free_port():
    found = plan("--nproc-per-node 2")
    assert (found.host, found.ports, found.serve) == ("127.0.0.1", (0,), True)


def test_torchrun_environment():
    found = plan("", TORCHRUN)
    member = found.member
    assert (member.rank, member.world_size) == (3, 4)
    assert (member.local_rank, member.local_world_size) == (1, 2)
    assert (found.host, found.ports, found.serve) == ("10.0.0.1", (1234,), False)
    other = plan("", {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert other.prefix != found.prefix


def test_torchrun_variables_without_its_agent():
    environment = {k: TORCHRUN[k] for k in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert plan("", {**environment, "RANK": "0"}).serve
    assert not plan("", {**environment, "RANK": "1"}).serve


def test_slurm_step_environment():
    found = plan("", SLURM)
    member = found.member
    assert (member.rank, member.world_size) == (3, 4)
    assert (member.local_rank, member.local_world_size) == (1, 2)
    assert (found.host, found.serve) == ("node07", False)
    assert all(20000 <= port < 32768 for port in found.ports)
    assert len(set(found.ports)) > 1
    older = {
        k.replace("NTASKS", "NPROCS").replace("JOB_NODELIST", "NODELIST"): v
        for k, v in SLURM.items()
    }
    assert plan("", older).member == member


@pytest.mark.parametrize(
    "variable", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID"]
)
def test_each_slurm_step_has_its_own_port_and_prefix(variable):
    one, other = plan("", SLURM), plan("", {**SLURM, variable: "5"})
    assert one.ports[0] != other.ports[0]
    assert one.prefix != other.prefix


def test_uneven_slurm_step():
    uneven = {**SLURM, "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
    assert plan("", uneven).member.local_world_size == 2
    assert plan("", {**uneven, "SLURM_NODEID": "0"}).member.local_world_size == 3


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
    ],
)
def test_host_lists(listing, expected):
    assert list(expand_hosts(listing)) == expected


def test_task_counts():
    counts = Counts("2(x3),1", "SLURM_STEP_TASKS_PER_NODE")
    assert [counts.at(node) for node in range(4)] == [2, 2, 2, 1]
    assert (counts.nodes, counts.tasks) == (4, 7)
    assert Counts("4", "SLURM_STEP_TASKS_PER_NODE").at(0) == 4


@pytest.mark.parametrize(
    "listing",
    [
        "", ",", "a,", ",a", "a,,b", "gpu[07-08", "gpu07-08]", "gpu[a-b]", "gpu[]", "gpu[1-]",
        "gpu[-1]", "gpu[3-1]", "gpu[1,]", "gpu[[1]]", "a b", "a\n", "gpu[\u0661]", "b\udcff",
        "gpu[1-99999999999999999999]", "a]b",
    ],
)  # fmt: skip
def test_what_is_no_host_list_is_refused_at_once(listing):
    with pytest.raises(Unexpected, match=r"^SLURM_JOB_NODELIST is .* not a node list"):
        expand_hosts(listing, "SLURM_JOB_NODELIST")


@pytest.mark.parametrize("listing", ["", "x", "2(x3", "2(x)", "2,,1", "-1", "2(y3)", "1 ", "²"])
def test_what_is_no_list_of_counts_is_refused(listing):
    with pytest.raises(Unexpected, match=r"^SLURM_X is .* not a list of counts"):
        Counts(listing, "SLURM_X")


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_NNODES": "0"},
        {"SLURM_NNODES": "-1"},
        {"SLURM_NNODES": "0", "SLURM_STEP_TASKS_PER_NODE": None},
        {"SLURM_JOB_NODELIST": "gpu[a-b]"},
        {"SLURM_JOB_NODELIST": "gpu[07-08"},
        {"SLURM_JOB_ID": "7\udcff"},
        {"SLURM_JOB_ID": "job"},
        {"SLURM_LOCALID": "-7"},
        {"SLURM_LOCALID": "4"},
        {"SLURM_LOCALID": "2"},  # of two on each node
        {"SLURM_JOB_NODELIST": ""},  # of two nodes
        {"SLURM_NODEID": "-1"},
        {"SLURM_NODEID": "٣"},
        {"SLURM_PROCID": "1_0"},
        {"SLURM_PROCID": " 1"},
        {"SLURM_NTASKS": "9" * 5000},
        {"SLURM_NTASKS": "99999999999"},
        {"SLURM_STEP_TASKS_PER_NODE": "1(x9999999999)"},
        {"SLURM_RESTART_COUNT": "once"},
        {"SLURM_ARRAY_TASK_ID": "-"},
    ],
)
def test_a_step_with_odd_variables_is_refused_by_name(changes):
    environment = {k: v for k, v in {**SLURM, **changes}.items() if v is not None}
    with pytest.raises(LaunchError, match=f"^{next(iter(changes))} is .*\\. ") as caught:
        plan("", environment)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "changes",
    [
        {"LOCAL_RANK": "-1"},
        {"LOCAL_RANK": "²"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"MASTER_PORT": "0"},
        {"MASTER_PORT": "65536"},
        {"MASTER_ADDR": ""},
        {"MASTER_ADDR": "a b"},
        {"MASTER_ADDR": "h\udcff"},
        {"MASTER_ADDR": "h" * 64},
        {"WORLD_SIZE": "-2"},
        {"RANK": "0x1"},
        {"TORCHELASTIC_RUN_ID": "\udcff"},
    ],
)
def test_torchrun_s_variables_are_refused_by_name_too(changes):
    with pytest.raises(LaunchError, match=f"^{next(iter(changes))} is .*\\. "):
        plan("", {**TORCHRUN, **changes})


def test_a_long_list_of_hosts_costs_nothing():
    environment = {**SLURM, "SLURM_JOB_NODELIST": "n[1-20000000]x[1-20000000]"}
    started = time.process_time()
    assert plan("", environment).host == "n1x1"
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("device", ["cuda:²", "cuda:٣", "cuda:-1", "cuda:" + "9" * 99, "gpu:0"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ValueError, match=r"--device is .* it can be cpu, cuda or cuda:N"):
        plan(f"--device {device}", gpus=2)


@pytest.mark.parametrize("count", ["²", "--3", "1_0", "٣", "9" * 5000])
def test_a_count_of_processes_that_is_none_is_refused(count):
    with pytest.raises(ValueError, match="neither a number nor gpu"):
        plan(f"--nproc-per-node={count}")


@pytest.mark.parametrize("host", ["a..b", "h\udcff", "x" * 70])
def test_a_host_that_cannot_be_one_is_refused(host):
    with pytest.raises(ValueError, match=r"^--host is .* not the name or address of a host"):
        plan(f"--world-size 2 --rank 0 --host {host}")


def test_a_step_needs_both_variables():
    assert in_slurm_step(SLURM)
    assert not in_slurm_step({"SLURM_STEP_ID": "0"})


# Devices: no GPU is needed to plan for them.


def test_one_process_per_gpu():
    found = plan("--nproc-per-node gpu", gpus=3)
    assert found.member.world_size == 3
    assert devices(found, 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert found.member.backend == "cpu:gloo,cuda:nccl"


def test_without_gpus_it_is_gloo_on_the_cpu():
    found = plan("--nproc-per-node 2")
    assert [found.member_at(i).device for i in range(2)] == ["cpu", "cpu"]
    assert found.member.backend == "gloo"


def test_the_cpu_can_be_asked_for_where_there_are_gpus():
    found = plan("--nproc-per-node 8 --device cpu", gpus=2)
    assert (found.member_at(7).device, found.member.backend) == ("cpu", "gloo")


def test_device_by_local_rank_under_torchrun_and_slurm():
    assert devices(plan("", TORCHRUN, gpus=2), 2) == ["cuda:1"]
    assert devices(plan("", SLURM, gpus=2), 2) == ["cuda:1"]
    # Slurm's --gpus-per-task shows each task one GPU, which then is number 0.
    assert devices(plan("", SLURM, gpus=1), 1) == ["cuda:0"]


@pytest.mark.parametrize(
    ("command", "accelerator", "device"),
    [
        ("", "xpu", "xpu"),
        ("", "mps", "mps"),
        ("--device xpu:1", "xpu", "xpu:1"),
        ("--device mps", "mps", "mps"),
        ("--device cpu", "mps", "cpu"),
        ("--nproc-per-node 2", "mps", "cpu"),
        ("--nproc-per-node 1", "xpu", "xpu"),
    ],
)
def test_one_process_may_use_another_accelerator(command, accelerator, device):
    found = plan(command, accelerator=accelerator)
    assert (found.member.device, found.member.backend) == (device, "gloo")


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ("--nproc-per-node 2 --device mps", {}),
        ("--world-size 2 --rank 1 --host h --device mps", {}),
        ("--device mps", TORCHRUN),
        ("--device mps", SLURM),
    ],
)
def test_several_ranks_on_another_accelerator_are_refused_at_the_plan(command, environment):
    complaint = "--device is mps but there are . ranks: .*Use --device cpu, or one process"
    with pytest.raises(ValueError, match=complaint):
        plan(command, environment, accelerator="mps")


@pytest.mark.parametrize("accelerator", ["", "xpu"])
def test_an_accelerator_that_is_not_there(accelerator):
    with pytest.raises(ValueError, match="--device is mps but torch sees no mps device"):
        plan("--device mps", accelerator=accelerator)


def test_one_process_takes_the_first_gpu_or_the_one_it_is_told():
    assert devices(plan(gpus=2), 2) == ["cuda:0"]
    assert devices(plan("--device cuda:1", gpus=2), 2) == ["cuda:1"]


def test_spawn_without_a_number_is_one_rank_per_gpu():
    assert plan("--launcher spawn", gpus=4).member.world_size == 4
    assert plan("--launcher spawn").member.world_size == 1


# What does not fit together: one line with what was found, and what to do.


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (
            "--rank 2 --world-size 2 --host h",
            "--rank is 2 but --world-size is 2: ranks go from 0 to 1",
        ),
        ("--rank -1 --world-size 2 --host h", "--rank is -1 but"),
        ("--rank 0 --world-size 2", "--world-size is 2 but --host is missing"),
        ("--rank 0", "--world-size is missing"),
        ("--world-size 2 --host h", "--rank is missing"),
        ("--rank 0 --world-size 0", "--world-size is 0; it must be a whole number from 1"),
        ("--rank 0 --world-size 2 --host h --port 70000", "--port is 70000.*from 1 to 65535"),
        ("--rank 0 --world-size 2 --host h --port 0", "--port is 0"),
        ("--rank 0 --world-size 4 --host h --nproc-per-node 2", "--nproc-per-node 2 does not go"),
        ("--host h", "--host h is given but not which ranks"),
        ("--nproc-per-node 0", "--nproc-per-node is 0; it must be a whole number from 1"),
        ("--nproc-per-node 1000001", "--nproc-per-node is 1000001; .* from 1 to 1000000"),
        ("--nnodes 500001 --nproc-per-node 2", "--nnodes is 500001; .* from 1 to 500000"),
        ("--rank 0 --world-size 1000001 --host h", "--world-size is 1000001; .* to 1000000"),
        ("--nproc-per-node gpu", "no GPU is visible"),
        ("--nproc-per-node two", "--nproc-per-node.*'two'"),
        ("--nproc-per-node", "--nproc-per-node: expected one argument"),
        ("--nnodes 2 --nproc-per-node 2 --host h", "--node-rank is missing"),
        ("--nnodes 2 --node-rank 2 --host h", "--node-rank is 2 but --nnodes is 2"),
        ("--nnodes 2 --node-rank 0", "--host is missing"),
        ("--node-rank 1", "--node-rank 1 needs --nnodes"),
        ("--device cuda", "--device is cuda but no GPU is visible"),
        ("--device tpu", "--device is 'tpu'; it can be cpu, cuda or cuda:N"),
        ("--backend nccl", "NCCL needs GPUs"),
        ("--backend mpi2", "--backend is 'mpi2'; it can be gloo, nccl"),
        ("--launcher ssh", "--launcher is 'ssh'; it can be auto, inline, spawn"),
        (
            "--launcher inline --nproc-per-node 2",
            "--nproc-per-node 2 is given but --launcher inline",
        ),
        ("--launcher inline --rank 1 --world-size 2", "is given but --launcher inline"),
        ("--launcher spawn --rank 1 --world-size 2", "--rank 1 is for one process per command"),
        ("--timeout 0", "--timeout is 0.0; it must be seconds, more than 0"),
        ("--timeout inf", "--timeout is inf"),
        ("--grace -1", "--grace is -1.0"),
    ],
)
def test_bad_flags(command, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        plan(command)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "gpus", "complaint"),
    [
        ("--nproc-per-node 3", 2, "3 GPUs are needed on this host but 2 are visible"),
        ("--device cuda:2", 2, "3 GPUs are needed on this host but 2 are visible"),
        ("--nproc-per-node 2 --device cuda:0", 2, "2 ranks start on this host"),
    ],
)
def test_too_few_gpus(command, gpus, complaint):
    with pytest.raises(ValueError, match=complaint):
        plan(command, gpus=gpus)


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "has RANK=0, WORLD_SIZE=2 but not MASTER_ADDR, MASTER_PORT",
        ),
        ({"LOCAL_RANK": "0"}, "but not RANK, WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 but WORLD_SIZE is 4"),
        ({**TORCHRUN, "RANK": "first"}, "RANK is 'first', not a whole number"),
        (
            {**SLURM, "SLURM_NTASKS": "5"},
            "SLURM_NTASKS is 5 but SLURM_STEP_TASKS_PER_NODE=2.x2. makes 4",
        ),
        (
            {
                **{k: v for k, v in SLURM.items() if k != "SLURM_STEP_TASKS_PER_NODE"},
                "SLURM_NTASKS_PER_NODE": "3",
            },
            "SLURM_NTASKS is 4 but SLURM_NTASKS_PER_NODE=3 makes 6 tasks",
        ),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID is 4 but SLURM_NTASKS is 4"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_NTASKS"}, "but not SLURM_NTASKS"),
    ],
)
def test_bad_environments(environment, complaint):
    with pytest.raises(LaunchError, match=complaint) as caught:
        plan("", environment)
    assert "\n" not in str(caught.value)


def test_a_named_launcher_needs_its_environment():
    with pytest.raises(LaunchError, match=r"none of RANK.*start the script with torchrun"):
        plan("--launcher torchrun")
    with pytest.raises(LaunchError, match="start the script with srun"):
        plan("--launcher srun")


def test_unknown_and_mistyped_arguments():
    with pytest.raises(
        ValueError, match="no argument nproc; it has backend, debug, debug_rank, device, grace"
    ):
        plan(nproc=2)
    with pytest.raises(ValueError, match="nproc_per_node is '2'; it must be a whole number"):
        plan(nproc_per_node="2")
    with pytest.raises(ValueError, match="nproc_per_node is True"):
        plan(nproc_per_node=True)
    with pytest.raises(ValueError, match="timeout is 'long'"):
        plan(timeout="long")


# Reading flags from a command line that belongs to somebody else.


def test_flags_count_only_when_whole_and_others_are_left_alone():
    assert plan("--ran 1 --epochs 3 --lr=0.1 data.csv").launcher == "inline"
    assert plan("--epochs 3 --nproc-per-node=2 --verbose").member.world_size == 2
    assert plan("--epochs 3 -- --nproc-per-node 2").launcher == "inline"


def test_the_scripts_own_time_is_not_slurms():
    assert plan("--time noon --nodes many").slurm == {}
    with pytest.raises(ValueError, match="--time"):
        plan("--launcher slurm --time noon")


def test_slurm_flags():
    found = plan(
        "--launcher slurm --nodes 2 --ntasks-per-node 4 --time 60 --partition gpu --dry-run",
        slurm={"nodes": 3, "mem_gb": 8},
    )
    assert found.slurm == {
        "nodes": 3,
        "ntasks_per_node": 4,
        "time": 60,
        "partition": "gpu",
        "dry_run": True,
        "mem_gb": 8,
    }


def test_a_script_with_its_own_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    assert add_arguments(parser) is parser
    options = parser.parse_args(["--epochs", "3", "--nproc-per-node", "2", "--seed", "9"])
    found = make_plan(merge(read_options(options), {}), {}, 0)
    assert (found.member.world_size, found.member.seed) == (2, 9)


def test_a_count_that_is_no_number_is_shown_as_it_was_given():
    with pytest.raises(ValueError, match="--nproc-per-node: 'two' is neither a number nor gpu"):
        read_flags(["--nproc-per-node", "two"])
