"""The command `elastic` without a coordinator: options, files, words, exit codes."""

from __future__ import annotations

import datetime
import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from elastic import errors
from elastic.client.cli import main
from elastic.client.output import HOLD_S, TRACEBACK, Lines
from elastic.client.printer import Printer
from elastic.client.sources import AGENTS_RETURN_S, LogSource
from elastic.client.streams import Again
from elastic.client.submission import Options, job_spec, run_directory, run_path_of
from elastic.client.terminal import Target, exit_code
from elastic.client.wording import (
    duration,
    metrics_line,
    parsed_metrics,
    waiting_line,
)
from elastic.core.config import JobSpec
from elastic.core.events.coordinator import JobRecord
from elastic.core.events.shared import Note
from elastic.core.view import JobView
from elastic.core.world import Entry, EntryKind, Group, JobId, JobPhase, Member, NodeId, WorkerId
from elastic.errors import ConfigError, NameTaken, StorageError, UsageError
from elastic.wire.codec_jobs import LogChunk, TimedNote, log_chunk_to_proto

NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
S = 1_000_000_000
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
        resources={},
        placement_strategy="PACK",
        accelerator_type="",
        labels={},
        backend="auto",
        max_failures=0,
        num_to_keep=-1,
        storage_path="results",
        env={},
        working_dir="",
    )
    return replace(given, **changes)


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


def test_a_run_directory_is_made_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    for _ in range(2):
        with run_directory(str(run)):
            assert run.is_dir()


def test_a_run_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(NameTaken, match=f"{tmp_path} exists .* not empty.*--name"):
        run_directory(str(tmp_path)).__enter__()
    with pytest.raises(NameTaken):
        run_directory(str(tmp_path / "metrics.jsonl")).__enter__()


def test_a_submission_that_fails_leaves_no_run_directory(tmp_path: Path) -> None:
    def fail_in(run: Path) -> None:
        with run_directory(str(run)):
            raise UsageError("no")

    fresh, empty = tmp_path / "fresh", tmp_path / "empty"
    empty.mkdir()
    for run in (fresh, empty):
        with pytest.raises(UsageError):
            fail_in(run)
    assert not fresh.exists()
    assert empty.exists()


def test_storage_that_cannot_be_written_is_refused_by_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"{tmp_path}/file/run cannot be made"):
        run_directory(str(tmp_path / "file" / "run")).__enter__()
    with pytest.raises(ConfigError, match="nosuch://x/run"):
        run_directory("nosuch://x/run").__enter__()


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
    facts = json.loads(elastic("version", "-o", "json").stdout)
    assert set(facts) == {"version", "protocol", "python"}


def test_next_steps_can_be_pasted_into_a_shell() -> None:
    target = Target("h:1", "my token", ("--coord", "h:1", "--token-file", "my token"))
    assert target.command("stop", "j-1") == "elastic --coord h:1 --token-file 'my token' stop j-1"


# -------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("length_ns", "text"),
    [(-S, "0.0 s"), (1_240_000_000, "1.2 s"), (250 * S, "4m 10s"), (7500 * S, "2h 5m"),
     (276_000 * S, "3d 4h")],
)  # fmt: skip
def test_lengths_of_time_read_well(length_ns: int, text: str) -> None:
    assert duration(length_ns) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("no json", ""),
        ("[1]", ""),
        ('{"epoch": 3, "loss": 0.123456, "ok": true, "deep": {"a": 1}}',
         "epoch=3 loss=0.1235 ok=True"),
        (json.dumps({"x": "y" * 500}), "x=" + "y" * 115 + "..."),
    ],
)  # fmt: skip
def test_metrics_are_one_short_line(text: str, line: str) -> None:
    assert metrics_line(parsed_metrics(text)) == line


def test_a_wait_says_for_what_and_since_when() -> None:
    entry = Entry(EntryKind.MODULE, "m")
    spec = JobSpec(job_id=JobId("j"), name="j", entry=entry, min_workers=2, max_workers=2)
    view = JobView(JobRecord(spec, JobPhase.PENDING), "waiting: needs 2 more workers", 3 * S, ())
    assert waiting_line(view, 15 * S) == "waits since 12.0 s: needs 2 more workers"
    running = replace(view, record=replace(view.record, phase=JobPhase.RUNNING))
    assert waiting_line(running, 15 * S) == ""


# --------------------------------------------------------------------------------- showing a job


class HandClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 100 * S

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns


class Terminal(io.StringIO):
    """Text that was written to a terminal."""

    def isatty(self) -> bool:
        return True


def job(phase: JobPhase, reason: str = "", *, since_ns: int = 100 * S, size: int = 0) -> JobView:
    spec = JobSpec(
        job_id=JobId("j"), name="demo", entry=Entry(EntryKind.MODULE, "m"), min_workers=1,
        max_workers=4,
    )  # fmt: skip
    members = tuple(Member(WorkerId(f"n{i}/1"), NodeId(f"n{i}"), i, "h:1") for i in range(size))
    group = Group(size, members, "start") if size else None
    record = JobRecord(spec, phase, generation=size, group=group)
    return JobView(record, reason, since_ns, ())


def note(name: str, **fields: str) -> TimedNote:
    return TimedNote(Note(name, "j", tuple(fields.items())), 0)


def said(printed: io.StringIO) -> list[str]:
    """Return the lines without their time of day."""
    return [line.partition("] ")[2] for line in printed.getvalue().splitlines()]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def piped(clock: HandClock) -> Iterator[tuple[Printer, io.StringIO, io.StringIO]]:
    about, stdout = io.StringIO(), io.StringIO()
    printer = Printer(Console(file=about), stdout=stdout, clock=clock)
    printer.open()
    yield printer, about, stdout
    printer.close()


Piped = tuple[Printer, io.StringIO, io.StringIO]


def test_in_a_pipe_each_change_is_one_plain_line(piped: Piped) -> None:
    printer, about, stdout = piped
    for _ in range(2):
        printer.job(job(JobPhase.PENDING, "waiting: needs 1 more workers"))
    printer.job(job(JobPhase.RUNNING, size=1))
    printer.note(note("group_formed", generation="1", world_size="1", cause="start"))
    printer.note(note("worker_gone", worker="n0/1", rank="0", cause="killed by SIGKILL"))
    printer.note(note("worker_gone", worker="n0/1", rank="0", cause="stopped (job succeeded)"))
    lost = {"cause": "lost", "reason": "lost n0/1"}
    printer.note(note("group_formed", generation="2", world_size="2", **lost))
    printer.job(job(JobPhase.RUNNING, size=2))
    printer.output(chunk("hello\n"))
    printer.job(job(JobPhase.SUCCEEDED, "all workers finished"))
    printer.close()
    assert said(about) == [
        "job demo waits since 0.0 s: needs 1 more workers",
        "generation 1: 1 worker",
        "worker n0/1 (rank 0) is gone: killed by SIGKILL",
        "generation 2: 2 workers (lost: lost n0/1)",
        "job demo succeeded: all workers finished",
    ]
    assert stdout.getvalue() == "hello\n"
    assert "\x1b" not in about.getvalue()


def test_a_wait_that_lasts_is_said_again(piped: Piped, clock: HandClock) -> None:
    printer, about, _ = piped
    printer.job(job(JobPhase.PENDING, "waiting: needs 1 more workers"))
    for _ in range(61):
        clock.now_ns += S
        printer.tick()
    assert said(about) == [
        f"job demo waits since {age}: needs 1 more workers" for age in ("0.0 s", "30.0 s", "1m 0s")
    ]


def test_an_outage_is_said_ever_more_rarely_and_its_end_once(
    piped: Piped, clock: HandClock
) -> None:
    printer, about, _ = piped
    printer.outage(0.2)
    printer.outage(0.0)
    for seconds in range(1, 9):
        clock.now_ns += S
        printer.outage(float(seconds))
    printer.outage(0.0)
    printer.outage(0.0)
    assert said(about) == [
        *(f"coordinator unreachable since {n} s, training goes on" for n in (1, 2, 4, 8)),
        "coordinator answers again after 8.0 s",
    ]


def test_reports_come_at_most_once_a_second_and_the_last_one_always(
    piped: Piped, clock: HandClock
) -> None:
    printer, about, _ = piped
    for step in range(25):
        printer.report({"step": step})
        clock.now_ns += S // 10
    printer.close()
    assert said(about) == [f"report: step={step}" for step in (0, 10, 20, 24)]


def wait_drawn(terminal: Terminal, text: str) -> None:
    until = time.monotonic() + 20
    while text not in terminal.getvalue():
        assert time.monotonic() < until, terminal.getvalue()
        time.sleep(0.01)


def test_a_terminal_shows_one_moving_line_below_the_output(clock: HandClock) -> None:
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=120)
    printer = Printer(console, stdout=terminal, clock=clock)
    printer.open()
    try:
        printer.job(job(JobPhase.RUNNING, size=2))
        printer.report({"loss": 0.25})
        wait_drawn(terminal, "loss=0.25")
        printer.output(chunk("50%\r100%\n"))
        printer.job(job(JobPhase.PENDING, "waiting: [needs] 1 more workers"))
        printer.output(chunk(STORY))
    finally:
        printer.close(said_elsewhere=STORY)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "demo  running  generation 2  2 workers  loss=0.25" in text
    assert "demo  pending  loss=0.25  waits since 0.0 s: [needs] 1 more workers" in text
    assert "100%\n" in text
    assert "50%" not in text
    assert "report:" not in text
    assert "Traceback" not in text


# ------------------------------------------------------------------------------- output of workers


def chunk(text: str, worker: str = "n1/1", rank: int = 0) -> LogChunk:
    return LogChunk(WorkerId(worker), rank, 4, NodeId(worker.partition("/")[0]), text)


def test_output_of_several_workers_is_whole_lines_with_their_owner() -> None:
    lines = Lines(shows_prefix=True)
    shown = lines.take(chunk("one\ntw"), 0)
    shown += lines.take(chunk("other\n", "n2/1", 3), 0)
    shown += lines.take(chunk("\ro\n"), 0) + lines.take(chunk("spare", "n3/1", -1), 0)
    assert shown + lines.rest("") == (
        "[gen4 r0 n1] one\n[gen4 r3 n2] other\n[gen4 r0 n1] tw\ro\n[gen4 n3/1] spare\n"
    )


def test_output_of_one_worker_is_left_as_it_is() -> None:
    lines = Lines(shows_prefix=False)
    text = "a\r50%\r100%\n\x1b[31mred\x1b[0m\n"
    assert lines.take(chunk(text), 0) == text
    assert lines.take(chunk("x" * 20_000), 0) == "x" * 20_000
    assert lines.rest("") == ""


STORY = f'{TRACEBACK}\n  File "train.py", line 1\nValueError: no\n'


def test_the_traceback_that_ended_the_job_is_left_to_who_reports_the_end() -> None:
    lines = Lines(shows_prefix=False)
    shown = lines.take(chunk(f"step 7\n{STORY}\n"), 0) + lines.take(chunk("exit 1\n"), S)
    assert shown + lines.rest(STORY) == "step 7\nexit 1\n"


def test_any_other_traceback_is_shown_a_moment_later() -> None:
    lines = Lines(shows_prefix=False)
    assert lines.take(chunk(STORY), 0) == ""
    assert lines.overdue(S) == ""
    assert lines.overdue(round(HOLD_S * S) + S) == STORY
    assert lines.take(chunk(STORY + "more\n"), 0) == ""
    assert lines.rest("another") == STORY + "more\n"


def resumed(source: LogSource, *chunks: LogChunk, now_ns: int = 0) -> str:
    """Open a call, feed it, and return what it tells."""
    source.opened()
    told = [source.decode(log_chunk_to_proto(c), now_ns) for c in chunks]
    return "".join(c.text for c in told if c is not None)


def test_output_is_told_once_over_several_calls() -> None:
    source = LogSource("j", ranks=(), tail=-1, follow=True)
    assert resumed(source, chunk("a\n"), chunk("x\n", "n2/1"), chunk("b\n")) == "a\nx\nb\n"
    assert resumed(source, chunk("a\n")) == ""
    again = resumed(source, chunk("x\ny\n", "n2/1"), chunk("a\nb\nc\n"), chunk("z\n", "n3/1"))
    assert again == "y\nc\nz\n"
    assert resumed(source, chunk("a\nb\nc\nd\n")) == "d\n"


def test_after_a_tail_a_gap_is_said() -> None:
    source = LogSource("j", ranks=(), tail=2, follow=True)
    assert resumed(source, chunk("a\n")) == "a\n"
    assert resumed(source, chunk("c\n"), chunk("d\n")) == (
        "[elastic] output may be missing here: the coordinator was away\nc\nd\n"
    )


def test_a_resumed_stream_waits_for_agents_to_come_back_but_not_for_ever() -> None:
    away = chunk("[elastic] output of n1/1 is not at hand: its node n1 is not connected\n")
    source = LogSource("j", ranks=(), tail=-1, follow=True)
    assert resumed(source, away) == away.text
    assert resumed(source, chunk("a\n")) == "a\n"
    with pytest.raises(Again):
        resumed(source, away, now_ns=5 * S)
    assert resumed(source, away, now_ns=round((5 + AGENTS_RETURN_S) * S)) == away.text
