"""How the client shows a job: words, lines in a pipe, the moving line, output told once."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
from rich.console import Console

from elastic.client.job_follower import follow
from elastic.client.jobs import Client
from elastic.client.output import HOLD_S, TRACEBACK, LineCutter
from elastic.client.pace import goodput_line
from elastic.client.printer import JobPrinter
from elastic.client.show import print_cluster, print_nodes, status_as_dict
from elastic.client.sources import AGENTS_RETURN_S, LogSource
from elastic.client.streams import ReopenStream
from elastic.client.text_format import (
    duration,
    metrics_line,
    parsed_metrics,
)
from elastic.core.config import JobSpec
from elastic.core.events.shared import Note
from elastic.core.facts import (
    Entry,
    EntryKind,
    Group,
    JobId,
    JobPhase,
    Member,
    Node,
    NodeId,
    NodePhase,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.records import Cordon, JobRecord
from elastic.core.telemetry import Goodput, Telemetry
from elastic.core.view import ClusterView, JobView, NodeView, WorkerView
from elastic.wire.codec_jobs import ClusterStatus, LogChunk, TimedNote, log_chunk_to_proto
from tests.patience import wait_for

S = 1_000_000_000


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


@pytest.mark.parametrize("versions", [("1.0", "1.0"), ("1.0", "1.1")])
def test_the_versions_of_agents_are_shown_while_they_differ(versions: tuple[str, str]) -> None:
    nodes = [
        Node(NodeId(f"n{number}"), 1, "host", 1, version=version)
        for number, version in enumerate(versions)
    ]
    console = Console(file=io.StringIO(), width=120)
    print_nodes(tuple(NodeView(node, NodePhase.READY, 0, 1) for node in nodes), S, console)
    shown = cast("io.StringIO", console.file).getvalue()
    assert ("version" in shown) is ("1.1" in shown) is (versions[0] != versions[1])


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


def note(name: str, at_s: float = 0, **fields: str) -> TimedNote:
    return TimedNote(Note(name, "j", tuple(fields.items())), round(at_s * S))


def said(printed: io.StringIO) -> list[str]:
    """Return the lines without their time of day."""
    return [line.partition("] ")[2] for line in printed.getvalue().splitlines()]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def piped(clock: HandClock) -> Iterator[tuple[JobPrinter, io.StringIO, io.StringIO]]:
    about, stdout = io.StringIO(), io.StringIO()
    printer = JobPrinter(Console(file=about), stdout=stdout, clock=clock)
    printer.open()
    yield printer, about, stdout
    printer.close()


Piped = tuple[JobPrinter, io.StringIO, io.StringIO]


def test_in_a_pipe_each_change_is_one_plain_line(piped: Piped) -> None:
    printer, about, stdout = piped
    printer.job(job(JobPhase.PENDING, "waiting: needs 1 more workers"))
    printer.job(job(JobPhase.RUNNING, size=1))
    printer.note(note("group_formed", generation="1", world_size="1", cause="start"))
    printer.note(note("worker_gone", worker="n0/1", rank="0", cause="stopped (job succeeded)"))
    joins = {"cause": "join", "reason": "2 workers ready"}
    printer.note(note("change_planned", **joins))
    printer.note(note("group_formed", generation="2", world_size="2", **joins))
    printer.job(job(JobPhase.RUNNING, size=2))
    printer.output(chunk("hello\n"))
    printer.job(job(JobPhase.SUCCEEDED, "all workers finished"))
    printer.close()
    assert said(about) == [
        "generation 1: 1 worker",
        "generation 2: 2 workers (join: 2 workers ready)",
        "job demo succeeded: all workers finished",
    ]
    assert stdout.getvalue() == "hello\n"
    assert "\x1b" not in about.getvalue()


def test_a_pipe_says_every_half_minute_how_far_training_is(piped: Piped, clock: HandClock) -> None:
    printer, about, _ = piped
    told = Telemetry(
        steps=20, wall_ns=2 * S, epoch=1, step=50, num_epochs=3, num_steps=100,
        logged='{"loss": 0.5, "_own": 1}',
    )  # fmt: skip
    view = job(JobPhase.RUNNING, size=2)
    report = WorkerReport(WorkerId("n0/1"), JobId("j"), WorkerPhase.TRAINING)
    worker = WorkerView(report, NodeId("n0"), 0, 0, 20, told)
    printer.job(replace(view, workers=(worker,)))
    for _ in range(61):
        clock.now_ns += S
        printer.tick()
    line = "epoch 1/3 step 50/100, 10 steps/s, 15 s left, loss=0.5 (2 workers, generation 2)"
    assert said(about) == ["generation 2: 2 workers", line, line]


def test_where_time_went_is_said_largest_part_first() -> None:
    goodput = Goodput(productive_ns=90 * S, reform_ns=6 * S, start_ns=4 * S, user_ns=1000)
    assert goodput_line(goodput, 3 * S) == (
        "90.0% of 1m 43s of workers: productive 1m 30s, reform 6.0 s, start 4.0 s; "
        "3.0 s not reported yet"
    )
    assert goodput_line(Goodput()) == ""


def test_a_wait_that_lasts_is_said_again(piped: Piped, clock: HandClock) -> None:
    printer, about, _ = piped
    printer.job(job(JobPhase.PENDING, "waiting: needs 1 more workers"))
    for _ in range(61):
        clock.now_ns += S
        printer.tick()
    assert said(about) == [
        f"job demo waits since {age}: needs 1 more workers" for age in ("2.0 s", "32.0 s")
    ]


def test_a_stop_that_lasts_says_what_it_waits_for(piped: Piped, clock: HandClock) -> None:
    printer, about, _ = piped
    view = job(JobPhase.RUNNING, "stops (enough) as soon as a checkpoint is written", size=1)
    printer.job(replace(view, record=replace(view.record, stopping="enough")))
    clock.now_ns += 2 * S
    printer.tick()
    assert said(about)[-1] == "job demo stops (enough) as soon as a checkpoint is written"


def lose(
    printer: JobPrinter,
    clock: HandClock,
    generation: int,
    wait_s: int,
    *,
    steps_after_s: int = 0,
    **more: str,
) -> None:
    """Have two workers killed, and let the next group begin 0.11 s or later after that.

    Args:
        printer: takes the events.
        clock: is moved.
        generation: of the next group.
        wait_s: how much later it begins.
        steps_after_s: how long it takes for its first step, -1 if it has none.
        more: fields of that event.
    """
    for worker, rank in (("n0/1", "0"), ("n0/2", "1")):
        fields = {"worker": worker, "rank": rank, "cause": "killed by SIGKILL"}
        printer.note(note("worker_gone", 5, **fields))
        since_ns = clock.now_ns
        printer.job(job(JobPhase.PENDING, "waiting: 1 of 2 workers", since_ns=since_ns, size=3))
    for _ in range(wait_s):
        clock.now_ns += S
        printer.tick()
    formed = {"generation": f"{generation}", "world_size": "2", "cause": "lost", "reason": "lost"}
    printer.note(note("group_formed", 5.1, **formed))
    printer.note(note("group_training", 5.11 + wait_s, generation=f"{generation}", took_ms="10"))
    printer.job(job(JobPhase.RUNNING, size=2))
    for _ in range(steps_after_s if steps_after_s >= 0 else 3):
        clock.now_ns += S
        printer.tick()
    if steps_after_s >= 0:
        after_s = 0.11 + wait_s + steps_after_s
        step = {"generation": f"{generation}", "pause_s": f"{after_s:.3f}", "world_size": "2"}
        step |= more
        printer.note(note("first_step", 5.0 + after_s, **step))


def test_a_loss_is_one_line_that_says_who_and_why_and_for_how_long(
    piped: Piped, clock: HandClock
) -> None:
    printer, about, _ = piped
    lose(printer, clock, 4, 0)
    lose(printer, clock, 5, 3)  # Which is long enough to be told meanwhile.
    lost = "lost worker n0/1 (rank 0), killed by SIGKILL; worker n0/2 (rank 1), killed by SIGKILL"
    assert said(about) == [
        f"{lost}: training paused for 0.11 s and continues with 2 workers (generation 4)",
        lost,
        "job demo waits since 2.0 s: 1 of 2 workers",
        "training paused for 3.11 s and continues with 2 workers (generation 5)",
    ]


def test_a_group_that_takes_long_for_its_first_step_has_not_continued_training(
    piped: Piped, clock: HandClock
) -> None:
    printer, about, _ = piped
    lose(printer, clock, 4, 0, steps_after_s=4)
    lose(printer, clock, 5, 0, steps_after_s=-1)  # A script's own steps are not seen.
    lost = "lost worker n0/1 (rank 0), killed by SIGKILL; worker n0/2 (rank 1), killed by SIGKILL"
    assert said(about) == [
        f"{lost}: 2 workers formed generation 4 after 0.11 s",
        "training paused for 4.11 s and continues with 2 workers (generation 4)",
        f"{lost}: 2 workers formed generation 5 after 0.11 s",
    ]


def test_a_loss_says_where_the_run_goes_on_if_steps_are_done_again(
    piped: Piped, clock: HandClock
) -> None:
    printer, about, _ = piped
    lose(printer, clock, 4, 0, at="epoch 0, step 1", was_at="epoch 2, step 0")
    assert said(about)[0].endswith(
        "continues with 2 workers (generation 4); it was at epoch 2, step 0 and goes on at "
        "epoch 0, step 1"
    )


def test_a_few_quick_reports_are_all_printed_and_of_many_one_a_second(
    piped: Piped, clock: HandClock
) -> None:
    printer, about, _ = piped
    for number in range(30):
        printer.report({"epoch": number})
    assert said(about) == [f"report: epoch={number}" for number in range(20)]
    for _ in range(3):
        clock.now_ns += S
        printer.tick()
    printer.report({"epoch": 30})
    printer.report({"epoch": 31})
    assert said(about)[20:] == ["report: epoch=29", "report: epoch=30", "report: epoch=31"]
    printer.report({"epoch": 32})
    printer.close()
    assert said(about)[23:] == ["report: epoch=32"]


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
        *(f"coordinator unreachable for {n} s, training continues" for n in (1, 2, 4, 8)),
        "coordinator answers again after 8.0 s",
    ]


def wait_drawn(terminal: Terminal, text: str) -> None:
    wait_for(lambda: text in terminal.getvalue(), terminal.getvalue)


def test_a_terminal_shows_one_moving_line_below_the_output(clock: HandClock) -> None:
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=120)
    printer = JobPrinter(console, stdout=terminal, clock=clock)
    printer.open()
    try:
        printer.job(job(JobPhase.RUNNING, size=2))
        printer.report({"loss": 0.25})
        wait_drawn(terminal, "loss=0.25")
        printer.output(chunk("50%\r100%\n"))
        printer.job(job(JobPhase.PENDING, "waiting: [needs] 1 more workers"))
        printer.output(chunk(STORY))
    finally:
        printer.close(reported_elsewhere=STORY)
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
    lines = LineCutter(shows_prefix=True)
    shown = lines.take(chunk("one\ntw"), 0)
    shown += lines.take(chunk("other\n", "n2/1", 3), 0)
    shown += lines.take(chunk("\ro\n"), 0) + lines.take(chunk("spare", "n3/1", -1), 0)
    assert shown + lines.flush("") == (
        "[gen4 r0 n1] one\n[gen4 r3 n2] other\n[gen4 r0 n1] tw\ro\n[gen4 n3/1] spare\n"
    )


def test_output_of_one_worker_is_left_as_it_is() -> None:
    lines = LineCutter(shows_prefix=False)
    text = "a\r50%\r100%\n\x1b[31mred\x1b[0m\n"
    assert lines.take(chunk(text), 0) == text
    assert lines.take(chunk("x" * 20_000), 0) == "x" * 20_000
    assert lines.flush("") == ""


STORY = f'{TRACEBACK}\n  File "train.py", line 1\nValueError: no\n'


SYNTAX = '  File "train.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


@pytest.mark.parametrize("story", [STORY, SYNTAX])
def test_the_traceback_that_ended_the_job_is_left_to_who_reports_the_end(story: str) -> None:
    lines = LineCutter(shows_prefix=False)
    shown = lines.take(chunk(f"step 7\n{story}\n"), 0) + lines.take(chunk("exit 1\n"), S)
    assert shown + lines.flush(story) == "step 7\nexit 1\n"


def test_any_other_traceback_is_shown_a_moment_later() -> None:
    lines = LineCutter(shows_prefix=False)
    assert lines.take(chunk(STORY), 0) == ""
    assert lines.overdue(S) == ""
    assert lines.overdue(round(HOLD_S * S) + S) == STORY
    assert lines.take(chunk(STORY + "more\n"), 0) == ""
    assert lines.flush("another") == STORY + "more\n"


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
    away = chunk("[elastic] output of n1/1 is not available: its node n1 is not connected\n")
    source = LogSource("j", ranks=(), tail=-1, follow=True)
    assert resumed(source, away) == away.text
    assert resumed(source, chunk("a\n")) == "a\n"
    with pytest.raises(ReopenStream):
        resumed(source, away, now_ns=5 * S)
    assert resumed(source, away, now_ns=round((5 + AGENTS_RETURN_S) * S)) == away.text


# ---------------------------------------------------------------------------- showing a cluster


def test_a_standby_shows_cordons_and_where_coordinators_answer() -> None:
    cordons = (Cordon(NodeId("n7"), "a fan"), Cordon(NodeId("n8"), ""))
    view = ClusterView(0, (), (), cordons)
    there = ("10.0.0.1:7070", "10.0.0.2:7070")
    status = ClusterStatus("b/2", "0", "1.0", "etcd://x", 0, view, "as of 1.0 s ago", there)
    out = io.StringIO()
    print_cluster(status, Console(file=out, width=100))
    assert out.getvalue().splitlines()[1:] == [
        "coordinators: 10.0.0.1:7070, 10.0.0.2:7070",
        "as of 1.0 s ago",
        "cordoned: n7 (a fan), n8 (by an operator)",
        "no jobs",
    ]
    assert status_as_dict(status)["cordons"][0] == {"node": "n7", "reason": "a fan"}


# ----------------------------------------------------------------------------- following a job


class PlayedClient:
    """Hands out a stream of events with an outage wherever the text stands."""

    def __init__(self, *played: JobView | TimedNote | str) -> None:
        self._played = played

    def watch(self, job: str, on_outage: Callable[[float], None]) -> PlayedStream:
        return PlayedStream(self._events(on_outage))

    def _events(self, on_outage: Callable[[float], None]) -> Iterator[JobView | TimedNote]:
        for item in self._played:
            if isinstance(item, str):
                on_outage(1.0)
                on_outage(0.0)
            else:
                yield item


class PlayedStream(Iterator[JobView | TimedNote]):
    def __init__(self, events: Iterator[JobView | TimedNote]) -> None:
        self._events = events

    def __next__(self) -> JobView | TimedNote:
        return next(self._events)

    def close(self) -> None:
        pass


def test_a_new_leader_that_knows_an_older_report_is_not_told_of_again() -> None:
    first, second, missed = ('{"epoch": 0}', '{"epoch": 1}', '{"epoch": 2}')

    def showing(phase: JobPhase, metrics: str) -> JobView:
        view = job(phase)
        return replace(view, record=replace(view.record, metrics=metrics))

    def reported(index: str, metrics: str) -> TimedNote:
        return note("report", generation="1", index=index, metrics=metrics)

    played = PlayedClient(
        showing(JobPhase.RUNNING, ""),
        reported("0", first),
        reported("1", second),
        "outage",
        showing(JobPhase.RUNNING, first),
        # The agent of rank 0 tells it once more.
        reported("1", second),
        "outage",
        showing(JobPhase.RUNNING, missed),
        reported("2", missed),
        showing(JobPhase.SUCCEEDED, missed),
    )
    reports: list[dict[str, object]] = []
    printer = JobPrinter(Console(file=io.StringIO()), ranks=None)
    follow(cast("Client", played), "demo", printer, on_report=reports.append)
    assert reports == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2}]


NOTICED = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     loss.backward()
[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:30

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 5, in <module>
[rank1]:     raise ValueError("step failed") from None
[rank1]: ValueError: step failed
"""


@pytest.mark.parametrize("size", [len(NOTICED) + 100, 60])
def test_a_traceback_of_a_rank_that_only_noticed_is_not_shown(size: int) -> None:
    """Whoever reads the log finds it; in whichever pieces it comes, what follows is not late."""
    lines = LineCutter(shows_prefix=False)
    text = f"epoch 1\n{NOTICED}epoch 1 again\n"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown = "".join(lines.take(chunk(piece), 0) for piece in pieces)
    assert shown == "epoch 1\nepoch 1 again\n"
    own = STORY.replace("ValueError", "ConnectionError: Connection reset by peer")
    assert lines.take(chunk(own + "more\n"), 0) + lines.flush("") == own + "more\n"
