"""`elastic run` before anything starts: torchrun's flags, sizes, names, wrong input."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from torch.distributed.run import get_args_parser

from elastic.client.cli import main
from elastic.client.job_commands import submit
from elastic.client.job_options import JobOptions, take_job_options
from elastic.client.run import run
from elastic.client.torchrun import (
    IGNORED,
    PROGRAM,
    JobSize,
    RunCommandLine,
    check_fits,
    job_spec,
    size_here,
    size_on,
)
from elastic.core.facts import EntryKind, Node, NodeId, Resources, Strategy
from elastic.errors import ConfigError, UsageError

NOBODY = "127.0.0.1:1"
TORCHRUNS = [
    action
    for action in get_args_parser()._actions
    if action.option_strings and not isinstance(action, argparse._HelpAction)
]
SOME = {"nnodes": "2:3", "numa_binding": "node", "start_method": "fork"}
OURS = {name: option for option in run.params for name in option.opts}


def elastic_run(*args: str, **env: str) -> Result:
    """Run the command as far as it comes without a cluster."""
    unset: dict[str, str | None] = {"ELASTIC_COORD": None, "OMP_NUM_THREADS": None}
    return CliRunner().invoke(main, ["run", *args], env={**unset, **env})


@pytest.fixture(autouse=True)
def nobody_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up at once where nobody answers."""
    monkeypatch.setattr("elastic.client.terminal.RESTART_S", 0.0)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')")
    return "train.py"


# ---------------------------------------------------------------------------- the flags of torchrun


@pytest.mark.parametrize("action", TORCHRUNS, ids=lambda action: action.dest)
def test_every_flag_of_torchrun_is_accepted_in_all_its_spellings(action: argparse.Action) -> None:
    takes_value = action.nargs != 0
    for spelling in action.option_strings:
        option = OURS[spelling if len(spelling) == 2 else "--" + spelling[2:].replace("_", "-")]
        assert isinstance(option, click.Option)
        assert option.is_flag is not takes_value, spelling
        words = [spelling, SOME.get(action.dest, "1")] if takes_value else [spelling]
        run.make_context("run", [*words, "train.py"])


@pytest.mark.parametrize(
    "behind", [("--", "-x"), ("a", "--", "-x"), ("--", "--", "-x"), ("-x", "--", "y")]
)
def test_two_dashes_right_behind_the_script_are_dropped_as_torchrun_drops_them(
    script: str, behind: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr("elastic.client.run._run_here", lambda launch, *_: launches.append(launch))
    assert elastic_run(script, *behind).exit_code == 0
    theirs = get_args_parser().parse_args([script, *behind]).training_script_args
    assert list(launches[0].args) == theirs


def test_flags_without_effect_say_what_happens_instead(script: str) -> None:
    flags = ["--rdzv_backend=c10d", "--rdzv-endpoint", "head:29400", "--master_port=1234"]
    done = elastic_run("--coord", NOBODY, *flags, script, PET_MONITOR_INTERVAL="5")
    assert done.exit_code == 69, done.output
    said = done.stderr.splitlines()[:-1]
    expected = {"rdzv-backend": "c10d", "rdzv-endpoint": "head:29400", "monitor-interval": "5.0"}
    expected["master-port"] = "1234"
    assert sorted(said) == sorted(
        f"elastic run: --{flag} {value} has no effect: {IGNORED[flag]}"
        for flag, value in expected.items()
    )


# ------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ((), 2, "Missing argument 'SCRIPT'"),
        (("missing.py",), 78, "missing.py is not a file on this machine"),
        (("--no-such-flag", "train.py"), 2, "No such option"),
        (("--nnodes", "3:1", "train.py"), 2, "'3:1': expected 1 <= MIN <= MAX"),
        (("--nnodes", "0", "train.py"), 2, "expected 1 <= MIN <= MAX"),
        (("--nnodes", "1:2:3", "train.py"), 2, "expected a number, or MIN:MAX"),
        (("--nproc-per-node", "0", "train.py"), 2, "expected a number of at least 1, or one of"),
        (("--nproc-per-node", "xpu", "train.py"), 2, "or one of auto, cpu, gpu"),
        (("--min", "3", "--max", "2", "train.py"), 2, "--min 3 and --max 2: expected min <= max"),
        (("--min", "0", "train.py"), 2, "0 is not in the range"),
        (("--nnodes", "1:3", "--min", "1", "train.py"), 2, "--min counts workers, --nnodes counts"),
        (("--nproc-per-node", "2", "--max", "1", "train.py"), 2, "--max counts workers"),
        (("--max-restarts", "-1", "train.py"), 2, "-1 is not in the range"),
        (("--no-python", "-m", "train"), 2, "--no-python and --module"),
        (("--run-path", "train.py"), 2, "--run-path needs an absolute path"),
        (("--nnodes", "2", "train.py"), 78, "--nnodes needs 2 nodes and no coordinator is named"),
        (("--detach", "train.py"), 78, "--detach, but no coordinator is named"),
        (("--coord", NOBODY, "--standalone", "train.py"), 2, "--standalone is without a coord"),
        (("--coord", "nonsense", "train.py"), 78, "nonsense"),
        (("--coord", NOBODY, "train.py"), 69, "no coordinator answers"),
        (("-t", "7", "train.py"), 78, "--tee '7': expected 0 (none), 1 (stdout)"),
        (("-t", "3", "--log-dir", "train.py", "train.py"), 78, "no directory for output can"),
        (("-t", "3", "--log-dir", "/proc", "train.py"), 78, "can be made in /proc"),
        (("-r", "0:1,3", "train.py"), 78, "--redirects '0:1,3': expected"),
        (("--start-method", "thread", "train.py"), 2, "'thread' is not one of"),
        (("--name", "a/b", "--nproc-per-node", "1", "train.py"), 78, "job name 'a/b'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(
    script: str, args: tuple[str, ...], code: int, says: str
) -> None:
    done = elastic_run(*args)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_directory_for_output_has_a_plain_name_and_is_made_for_what_can_be_run(
    script: str, tmp_path: Path
) -> None:
    words = ("--coord", NOBODY, "--rdzv-id", "a/b", "--tee", "3", "--log-dir", "out")
    assert elastic_run(*words, "missing.py").exit_code == 78
    assert not (tmp_path / "out").exists()
    done = elastic_run(*words, script)
    assert "no coordinator answers" in done.stderr
    (directory,) = (tmp_path / "out").iterdir()
    assert directory.name.startswith("a_b_")


# ----------------------------------------------------------------------------------------- the size


def node(slots: int = 4, gpus: int = 0) -> Node:
    amounts = Resources.of({"CPU": 8, "GPU": gpus})
    return Node(NodeId(f"n{slots}{gpus}"), 1, "127.0.0.1", slots, amounts)


LAUNCH = RunCommandLine(script="train.py")


@pytest.mark.parametrize(
    ("changes", "nodes", "size"),
    [
        ({}, [], JobSize(1, 1)),
        ({"nproc_per_node": "4", "nodes": (1, 3)}, [node()], JobSize(4, 12, 4)),
        ({"nproc_per_node": "auto"}, [node(gpus=2), node(gpus=4)], JobSize(2, 2, 2, 1.0)),
        ({"nproc_per_node": "gpu", "nodes": (2, 2)}, [node(gpus=2)], JobSize(4, 4, 2, 1.0)),
        ({"nproc_per_node": "cpu"}, [node(gpus=2)], JobSize(8, 8, 8, 0.25)),
        ({"nproc_per_node": "auto"}, [node()], JobSize(8, 8, 8)),
        ({"num_workers": (1, 3)}, [node(gpus=2)], JobSize(1, 3, 1, 1.0)),
    ],
)
def test_nodes_times_processes_are_workers(
    changes: dict[str, Any], nodes: list[Node], size: JobSize
) -> None:
    assert size_on(replace(LAUNCH, **changes), nodes) == size


def test_words_need_nodes_that_can_be_counted() -> None:
    with pytest.raises(UsageError, match="no node is connected that could be counted"):
        size_on(replace(LAUNCH, nproc_per_node="auto"), [])
    with pytest.raises(UsageError, match="none of 1 nodes has a GPU"):
        size_on(replace(LAUNCH, nproc_per_node="gpu"), [node()])


def test_alone_a_job_has_the_size_of_one_node_and_shares_its_gpus() -> None:
    launch = replace(LAUNCH, nproc_per_node="4", nodes=(1, 3))
    assert size_here(launch, node()) == JobSize(4, 4, 4)
    assert size_here(launch, node(gpus=2)) == JobSize(4, 4, 4, 0.5)
    assert size_here(replace(LAUNCH, num_workers=(1, 3)), node(gpus=2)) == JobSize(1, 3, 1, 0.5)


# ------------------------------------------------------------------------ what any job is asked for


GIVEN = (
    "--resources=CPU=2", "--placement-strategy=STRICT_SPREAD", "--accelerator-type=H100",
    "--label=zone=a", "--label=disk=ssd", "--max-preemptions=3", "--priority=-5",
    "--non-preemptible", "--env=A=1",
)  # fmt: skip


def test_submit_and_run_make_the_same_of_the_options_that_both_have(script: str) -> None:
    made = []
    for command in (submit, run):
        params = dict(command.make_context(command.name, [*GIVEN, script]).params)
        made.append(take_job_options(params))
        shown = {
            option.name: option.get_help_record(click.Context(command, max_content_width=100))
            for option in command.params
            if isinstance(option, click.Option) and option.name in {f.name for f in fields(made[0])}
        }
        made.append(shown)
    assert made[:2] == made[2:]
    job = spec(JobSize(1, 1, gpus=1.0), shared=made[0])
    assert job.resources_per_worker == Resources.of({"CPU": 2, "GPU": 1})
    assert (job.strategy, job.accelerator_type) == (Strategy.STRICT_SPREAD, "H100")
    assert job.label_selector == (("disk", "ssd"), ("zone", "a"))
    assert (job.max_preemptions, job.priority) == (3, -5)
    assert job.non_preemptible
    assert dict(job.entry.env) == {"A": "1"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": {"zone": "a"}}, "no connected node carries the labels zone=a"),
        ({"accelerator_type": "H100"}, "no connected node has accelerator H100; there are: none"),
        ({"resources": {"GPU": 1.0}}, "each worker needs GPU=1, the largest node has 0"),
        ({"placement_strategy": "STRICT_SPREAD"}, "what lacks: nodes (each takes one worker)"),
    ],
)
def test_alone_a_job_that_could_never_run_is_refused(
    script: str, changes: dict[str, Any], says: str
) -> None:
    check_fits(spec(), node())
    with pytest.raises(UsageError, match="this machine is the only node") as caught:
        check_fits(spec(shared=JobOptions(**changes)), node())
    assert says in str(caught.value)


# ------------------------------------------------------------------------------------------ the job


SIX = JobSize(2, 6, 2)


def spec(size: JobSize = SIX, **changes: Any) -> Any:
    launch = replace(LAUNCH, storage="runs", **changes)
    return job_spec(launch, size, job_id="j-abc234", stamp="20260304-050607")


def test_a_program_is_run_by_a_module_of_ours() -> None:
    shell = spec(no_python=True, script="/bin/sh", args=("-c", "exit 0"))
    assert (shell.entry.kind, shell.entry.target) == (EntryKind.MODULE, PROGRAM)
    assert shell.entry.args == ("/bin/sh", "-c", "exit 0")
    assert shell.name.startswith("sh-")


def test_a_negative_number_of_restarts_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="--max-restarts -1"):
        spec(max_restarts=-1)
