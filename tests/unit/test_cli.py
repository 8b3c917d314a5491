"""The command `elastic` without a coordinator: options, files, words, exit codes."""

from __future__ import annotations

import datetime
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from elastic import __version__, errors
from elastic.client.cli import main
from elastic.client.job_options import JobOptions
from elastic.client.submission import Options, job_spec, run_path_of
from elastic.client.terminal import Target, exit_code
from elastic.client.values import parse_duration
from elastic.core.world import Entry, EntryKind
from elastic.errors import UsageError

NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
NOBODY = "127.0.0.1:1"


def elastic(*args: str, **env: str) -> Result:
    return CliRunner().invoke(main, list(args), env=env)


def options(script: Path | str, **changes: Any) -> Options:
    given = Options(
        script=str(script),
        args=("--epochs", "3"),
        is_module=False,
        name="",
        num_workers=(1, 1),
        use_gpu=False,
        backend="auto",
        hang_timeout=30.0,
        max_failures=0,
        num_to_keep=-1,
        storage_path="results",
        working_dir="",
    )
    names = {each.name for each in fields(JobOptions)} & set(changes)
    shared = JobOptions(**{"priority": 3, "project": "vision"} | {n: changes.pop(n) for n in names})
    return replace(given, **changes, shared=shared)


@pytest.fixture(autouse=True)
def nobody_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up at once where nobody answers."""
    monkeypatch.setattr("elastic.client.terminal.RESTART_S", 0.0)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in a folder of its own, seen from another folder."""
    home = tmp_path / "here"
    home.mkdir()
    monkeypatch.chdir(home)
    path = tmp_path / "code" / "my train.py"
    path.parent.mkdir()
    path.write_text("print('hello')")
    return path


# ------------------------------------------------------------------------------ from options to job


def test_a_script_becomes_a_job_with_absolute_paths(script: Path, tmp_path: Path) -> None:
    spec = job_spec(options("../code/my train.py"), now=NOW)
    assert spec.name == "my_train-20260304-050607"
    assert spec.run_path == str(tmp_path / "here" / "results" / spec.name)
    assert spec.entry == Entry(
        EntryKind.SCRIPT,
        str(script),
        args=("--epochs", "3"),
        working_dir=str(tmp_path / "here"),
        python_path=(str(script.parent),),
    )


def test_a_module_is_looked_for_in_the_working_directory(script: Path, tmp_path: Path) -> None:
    given = options("pkg.train", is_module=True, working_dir=str(script.parent), env={"B": "2"})
    spec = job_spec(given, now=NOW)
    assert spec.name.startswith("train-")
    assert (spec.entry.kind, spec.entry.target) == (EntryKind.MODULE, "pkg.train")
    assert spec.entry.python_path == (spec.entry.working_dir,) == (str(script.parent),)
    assert spec.entry.env == (("B", "2"),)


@pytest.mark.parametrize(
    ("script_name", "changes", "says"),
    [
        ("missing.py", {}, "is not a file on this machine"),
        (".", {}, "is not a file on this machine"),
        ("my train.py", {"working_dir": "/nowhere"}, "is not a directory"),
        ("my train.py", {"name": "a/b"}, "job name 'a/b'"),
        ("my train.py", {"num_workers": (3, 2)}, "expected 1 <= min <= max"),
        ("my train.py", {"num_workers": (0, 0)}, "expected 1 <= min <= max"),
        ("my train.py", {"resources": {"CPU": -1.0}}, "resource CPU=-1.0"),
        ("my train.py", {"use_gpu": True, "resources": {"CPU": 1.0}}, "has no GPU"),
        ("my train.py", {"max_failures": -2}, "max_failures=-2"),
        ("my train.py", {"hang_timeout": -1.0}, "hang_timeout_s=-1"),
        ("my train.py", {"num_to_keep": 0}, "num_to_keep=0"),
    ],
)
def test_what_cannot_work_is_refused_here(
    script: Path, script_name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        job_spec(options(script.parent / script_name, **changes), now=NOW)


def test_a_gpu_is_asked_for_by_flag_or_by_amount(script: Path) -> None:
    assert job_spec(options(script, use_gpu=True), now=NOW).resources_per_worker.amount("GPU") == 1
    more = options(script, use_gpu=True, resources={"GPU": 2.0})
    assert job_spec(more, now=NOW).resources_per_worker.amount("GPU") == 2


@pytest.mark.parametrize(
    ("storage", "path"),
    [("/data/", "/data/x"), ("memory://runs", "memory://runs/x"), ("s3://b/r/", "s3://b/r/x")],
)
def test_the_run_directory_is_storage_path_and_name(storage: str, path: str) -> None:
    assert run_path_of(storage, "x") == path


@pytest.mark.parametrize("storage", ["s3:/bucket/runs", str(Path("gs://bucket/runs"))])
def test_an_url_that_lost_a_slash_is_not_taken_for_a_folder(storage: str) -> None:
    with pytest.raises(UsageError, match=r"expected (s3|gs)://\.\.\., as a str"):
        run_path_of(storage, "x")


def test_a_storage_path_of_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(UsageError, match="storage path is empty"):
        run_path_of("", "x")


# --------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("submit", "{script}", "--num-workers", "two"), "MIN:MAX"),
        (("submit", "{script}", "--num-workers", "2:"), "MIN:MAX"),
        (("submit", "{script}", "--resources", "CPU"), "NAME=AMOUNT"),
        (("submit", "{script}", "--resources", "CPU=1,CPU=2"), "each name once"),
        (("submit", "{script}", "--env", "A"), "NAME=VALUE"),
        (("submit", "{script}", "--backend", "mpi"), "mpi"),
        (("submit", "{script}", "--epochs", "3"), "--epochs"),
        (("submit",), "SCRIPT"),
        (("submit", "{script}", "--timeout", "0"), "0"),
        (("logs", "job", "--rank", "one"), "ranks such as 0 or 0,3"),
        (("logs", "job", "--rank", "-1"), "ranks such as 0 or 0,3"),
        (("logs", "job", "--tail", "-2"), "-2"),
        (("drain",), "NODE"),
        (("drain", "n1", "--deadline", "-1"), "-1"),
        (("nothing",), "nothing"),
    ],
)
def test_wrong_usage_exits_2_before_anything_is_asked(
    script: Path, args: tuple[str, ...], says: str
) -> None:
    done = elastic("-c", NOBODY, *(arg.format(script=script) for arg in args))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ("ps",), ("ps", "-o", "json"), ("status",), ("status", "job"), ("nodes",), ("logs", "job"),
        ("logs", "job", "-f"), ("stop", "job"), ("drain", "n1"), ("submit", "{script}"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_exits_69_where_nobody_answers(script: Path, args: tuple[str, ...]) -> None:
    given = [arg.format(script=script) for arg in args]
    given += ["--storage-path", "results"] if args[0] == "submit" else []
    done = elastic("-c", f"{NOBODY},127.0.0.1:2", *given)
    assert done.exit_code == 69
    assert f"elastic: no coordinator answers at {NOBODY},127.0.0.1:2 (" in done.stderr
    assert "refused" in done.stderr
    assert done.stdout == ""
    assert not list(Path("results").glob("*"))


@pytest.mark.parametrize("address", ["nonsense", "host:0", "", "a:1,b"])
def test_an_address_that_is_none_exits_78(address: str) -> None:
    done = elastic("-c", address, "ps")
    assert done.exit_code == 78
    assert "expected host:port" in done.stderr or "port" in done.stderr


def test_a_token_file_that_is_not_there_exits_78() -> None:
    done = elastic("--token-file", "/nowhere/token", "ps")
    assert done.exit_code == 78
    assert "/nowhere/token" in done.stderr


def test_the_environment_names_the_coordinator_and_a_flag_wins() -> None:
    env = {"ELASTIC_COORD": "127.0.0.1:3"}
    assert "127.0.0.1:3" in elastic("ps", **env).stderr
    assert NOBODY in elastic("-c", NOBODY, "ps", **env).stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CoordinatorUnreachable("a:1"), 69),
        (errors.Unavailable("later"), 69),
        (errors.UsageError("unknown accelerator"), 78),
        (errors.ConfigError("min > max"), 78),
        (errors.NameTaken("twice"), 78),
        (errors.NotAuthorized("token"), 78),
        (errors.VersionMismatch("it", theirs="2.0", ours="1.0"), 78),
        (errors.StorageError("disk full"), 78),
        (errors.NotFound("job"), 2),
        (errors.Refused("has ended"), 2),
        (errors.PeerError("garbage"), 70),
        (errors.InvariantViolation("bug"), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_error_has_an_exit_code(error: errors.ElasticError, code: int) -> None:
    assert exit_code(error) == code


def test_version_needs_no_coordinator() -> None:
    assert elastic("version").stdout.startswith("elastic ")
    assert elastic("--version").stdout == f"elastic, version {__version__}\n"
    facts = json.loads(elastic("version", "-o", "json").stdout)
    assert set(facts) == {"version", "protocol", "python"}


def test_next_steps_can_be_pasted_into_a_shell() -> None:
    target = Target("h:1", "my token", ("--coord", "h:1", "--token-file", "my token"))
    assert target.command("stop", "j-1") == "elastic --coord h:1 --token-file 'my token' stop j-1"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("1.5m", 90), ("2h", 7200), ("0", 0)]
)
def test_a_time_is_read_with_and_without_its_unit(text: str, seconds: float) -> None:
    context, option = click.Context(click.Command("x")), click.Option(["--deadline"])
    assert parse_duration(context, option, text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "soon", "inf", "nan", "30d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    context, option = click.Context(click.Command("x")), click.Option(["--deadline"])
    with pytest.raises(click.BadParameter, match="30s"):
        parse_duration(context, option, text)


def test_whoever_gives_a_scripts_options_as_torchrun_takes_them_is_told_where_they_stand() -> None:
    done = elastic("submit", "train.py", "--epochs", "10")
    assert done.exit_code == 2
    assert "behind --: submit SCRIPT -- --epochs" in done.stderr
