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

from elastic import __version__
from elastic.client.cli import main
from elastic.client.job_options import JobOptions
from elastic.client.submission import SubmitOptions, job_spec, run_path_of
from elastic.client.terminal import ClusterTarget
from elastic.client.values import parse_duration
from elastic.errors import UsageError

NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
NOBODY = "127.0.0.1:1"


def elastic(*args: str, **env: str) -> Result:
    return CliRunner().invoke(main, list(args), env=env)


def options(script: Path | str, **changes: Any) -> SubmitOptions:
    given = SubmitOptions(
        script=str(script),
        args=("--epochs", "3"),
        is_module=False,
        name="",
        num_workers=(1, 1),
        use_gpu=False,
        backend="auto",
        max_failures=0,
        num_to_keep=-1,
        storage_path="results",
        working_dir="",
    )
    names = {each.name for each in fields(JobOptions)} & set(changes)
    shared = JobOptions(**{"priority": 3} | {n: changes.pop(n) for n in names})
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
        (("submit", "{script}", "--num-workers", "0"), "1 <= MIN <= MAX"),
        (("submit", "{script}", "--num-workers", "3:2"), "1 <= MIN <= MAX"),
        (("submit", "{script}", "--hang-timeout", "-1"), "-1"),
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
        (("scale", "job"), "--min N, --max N"),
        (("start", "--head", "--port", "99999"), "99999"),
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


def test_version_needs_no_coordinator() -> None:
    assert elastic("version").stdout.startswith("elastic ")
    assert elastic("--version").stdout == f"elastic, version {__version__}\n"
    facts = json.loads(elastic("version", "-o", "json").stdout)
    assert set(facts) == {"version", "protocol", "python"}


def test_next_steps_can_be_pasted_into_a_shell() -> None:
    target = ClusterTarget("h:1", "my token", ("--coord", "h:1", "--token-file", "my token"))
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
