"""The flags: spellings, near misses, --help, and options that a script's parser already has."""

import argparse
import sys

import pytest
import torch

from tests.processes import Program
from torchbearer_ddp import add_arguments, run_distributed
from torchbearer_ddp.launch.flags import near_misses, read_flags, read_options


def parsed(parser, *words, **options):
    return read_options(add_arguments(parser, **options).parse_args(words))


# Spellings.


def test_torchruns_underscores_are_read():
    assert read_flags(["--nproc_per_node", "2", "--node_rank=1"])["nproc_per_node"] == 2
    assert parsed(argparse.ArgumentParser(), "--world_size", "3")["world_size"] == 3


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--nproc", "nproc-per-node"),
        ("--nproc-per-nod", "nproc-per-node"),
        ("--nproc_per_nodes=4", "nproc-per-node"),
        ("--worldsize", "world-size"),
        ("--nnode", "nnodes"),
        ("--launch", "launcher"),
        ("--Node-Rank", "node-rank"),
        ("--devcie", "device"),
        ("--tiemout=3", "timeout"),
    ],
)
def test_a_near_miss_is_an_error_with_a_suggestion(word, meant):
    with pytest.raises(ValueError, match=f"is unknown; did you mean --{meant}\\?.* options="):
        read_flags(["--epochs", "3", word, "2"])


@pytest.mark.parametrize(
    "word",
    ["--nodes", "--devices", "--seeds", "--rank-file", "--time", "--num-nodes", "--epochs", "-n"],
)
def test_a_flag_of_the_script_is_left_alone(word):
    assert near_misses([word, "2"]) == []
    assert read_flags([word, "2"]) == {"slurm": {}}


def test_what_follows_two_dashes_belongs_to_the_script():
    assert read_flags(["--", "--nproc", "2", "--help"]) == {"slurm": {}}


def test_abbreviations_are_refused_by_a_parser_too(capsys):
    parser = add_arguments(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--nproc", "2"])
    assert "unrecognized arguments: --nproc" in capsys.readouterr().err


def test_help_is_answered_without_a_parser():
    with Program("sum.py", "10", "--help") as program:
        assert program.code() == 0, program.text()
        text = "".join(program.output)
        assert "--nproc-per-node" in text
        assert "--nproc_per_node" not in text
        assert "--max-requeues" in text
        assert program.errors == []


def test_help_says_as_for_sbatch_only_of_what_sbatch_has():
    parser = add_arguments(argparse.ArgumentParser())
    flags = {a.option_strings[0] for a in parser._actions if "as for sbatch" in (a.help or "")}
    ours = {"--mem-gb", "--folder", "--max-requeues", "--detach", "--dry-run", "--time"}
    assert len(flags) >= 4
    assert not flags & ours


# Options that the parser already has.


def own_parser(**device):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", **device)
    parser.add_argument("--world-size", default="1")  # without a type, as in torchbearer's example
    parser.add_argument("--rank", default=0)
    parser.add_argument("--seed", type=int, default=42)
    return parser


def test_an_option_of_the_parser_is_used_and_converted():
    words = ("--world-size", "2", "--rank", "1", "--host", "h", "--device", "cpu")
    found = parsed(own_parser(), *words)
    expected = {"world_size": 2, "rank": 1, "host": "h", "device": "cpu", "seed": 42, "slurm": {}}
    assert found == expected


def test_defaults_of_the_script_do_not_say_which_ranks_to_start():
    found = parsed(own_parser(default=torch.device("cpu")), "--nproc-per-node", "2")
    assert found == {"nproc_per_node": 2, "device": "cpu", "seed": 42, "slurm": {}}


def test_the_script_sees_its_own_values():
    options = add_arguments(own_parser(type=torch.device)).parse_args(["--device", "cpu"])
    assert options.device == torch.device("cpu")
    assert run_distributed(lambda: torch.rand(1).item(), options=options) == run_distributed(
        lambda: torch.rand(1).item(), options=argparse.Namespace(), seed=42
    )


def test_another_destination_or_spelling_is_found():
    parser = argparse.ArgumentParser()
    parser.add_argument("-d", "--device", dest="where")
    parser.add_argument("--nproc_per_node", type=int)
    parser.add_argument("--how-many", dest="world_size", default=9)
    parser.add_argument("--debug", action="store_true")
    words = ("-d", "cpu", "--nproc_per_node", "2", "--debug")
    found = parsed(parser, *words)
    assert found == {"device": "cpu", "nproc_per_node": 2, "debug": True, "slurm": {}}


@pytest.mark.parametrize(
    ("name", "how", "found"),
    [
        (
            "--rank",
            {"action": "store_true"},
            "no value, but the launch flag of that name takes one",
        ),
        ("--host", {"nargs": "+"}, "several values"),
        ("--debug", {"type": int}, "one value, but the launch flag of that name takes no value"),
    ],
)
def test_an_option_that_cannot_be_used_is_named_with_the_remedy(name, how, found):
    parser = argparse.ArgumentParser()
    parser.add_argument(name, **how)
    with pytest.raises(ValueError, match=f"^{name} of this parser takes {found}") as caught:
        add_arguments(parser)
    assert f"add_arguments(parser, prefix='ddp-'), which adds --ddp-{name[2:]}" in str(caught.value)


def test_a_value_that_cannot_be_used_is_named_with_the_remedy():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="random")
    with pytest.raises(ValueError, match=r"--seed of this script is 'random', .*prefix='ddp-'"):
        parsed(parser)


def test_a_log_dir_of_the_script_stays_its_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--log-dir", default="runs")
    parser.add_argument("--tee", type=int)
    words = ("--log-dir", "mine", "--tee", "3", "--quiet-ranks")
    assert parsed(parser, *words) == {"quiet_ranks": True, "slurm": {}}
    assert parsed(argparse.ArgumentParser(), "--log-dir", "logs")["log_dir"] == "logs"


def test_a_prefix():
    parser = own_parser()
    parser.add_argument("--host", nargs="+")
    words = ("--ddp-nproc-per-node", "2", "--ddp_seed", "7", "--rank", "5", "--device", "tpu")
    found = parsed(parser, *words, prefix="ddp-")
    assert found == {"nproc_per_node": 2, "seed": 7, "slurm": {}}


# Words.


def test_a_keyword_argument_is_called_by_its_name(caplog):
    nothing = argparse.Namespace()
    run_distributed(lambda: 1, nproc_per_node=1, options=nothing)
    assert "1 process (from nproc_per_node=1)" in caplog.text
    with pytest.raises(ValueError, match=r"^timeout is 0; it must be seconds"):
        run_distributed(lambda: 1, timeout=0, options=nothing)


def test_many_ranks_on_few_cores_are_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    from torchbearer_ddp.group.membership import Member
    from torchbearer_ddp.launch.announcement import announce
    from torchbearer_ddp.launch.plan import Plan

    announce(Plan("spawn", "because", Member(world_size=1000, local_world_size=1000)))
    assert "1000 ranks share" in caplog.text
