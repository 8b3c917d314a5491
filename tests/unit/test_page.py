"""What the page is made of: text that stays text, changes that fit, series that stay small."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic.coord.history import POINTS_MAX, History, Series, numbers_of
from elastic.coord.web.html import clean, clean_output, element, escaped
from elastic.coord.web.pages import front_page, job_page
from elastic.coord.web.parts import BYTES_PER_S, Changes, Part, row
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
from elastic.core.records import JobRecord
from elastic.core.view import ClusterView, JobView, NodeView, WorkerView
from elastic.wire.codec_jobs import TimedNote

SECOND = 1_000_000_000


@given(st.text())
def test_no_text_is_markup_or_moves_other_text(text: str) -> None:
    shown = escaped(text)
    assert not set("<>\"'") & set(shown)
    assert all(c.isprintable() or c in "\t\n" or ord(c) > 0x9F for c in shown)
    shown.encode()
    # An attribute ends where we end it.
    assert element("p", title=text).count('"') == 2


def test_output_is_left_as_a_terminal_would_leave_it() -> None:
    assert clean_output("10%\r20%\r100%\nnext\r\n") == "100%\nnext\n"
    assert clean("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1b[1;31mred\x1b[m") == "link red"
    assert clean("a\u202eb\x00") == "a\\x202eb\\x00"
    assert clean("\x9b31mred") == "red"


def test_a_browser_is_sent_what_changed_and_no_more_than_fits() -> None:
    def part(steps: int, rows: int = 1000) -> Part:
        items = {f"w-{n}": row(f"w-{n}", n, "x" * 200, steps) for n in range(rows)}
        return Part("workers", items=items, tag="tbody")

    changes, shown = Changes(), dict[str, str]()

    def tick(now: Part) -> int:
        messages = list(changes.take([now]))
        for told in map(json.loads, messages):
            if "set" in told:
                shown[told["set"]] = told["html"]
        changes.earn(1.0)
        return sum(map(len, messages))

    first = part(1)
    sizes = []
    while shown != first.items:
        sizes.append(tick(first))
    assert max(sizes) < BYTES_PER_S + 300 + 20_000
    assert len(sizes) > 3
    assert sum(sizes) / len(sizes) < BYTES_PER_S + 20_000
    assert tick(first) == 0
    one = replace(first, items={**(first.items or {}), "w-7": row("w-7", "seven")})
    assert 0 < tick(one) < 200
    fewer = part(1, rows=999)
    [order] = [json.loads(m) for m in Changes().take([fewer])][:1]
    assert len(order["items"]) == 999


def test_a_series_stays_small_and_covers_the_whole_run() -> None:
    series = Series()
    for n in range(10 * POINTS_MAX):
        series.add(float(n), float(n))
    assert POINTS_MAX / 2 <= len(series.times) <= POINTS_MAX
    assert series.times[0] == 0.0
    assert series.times[-1] > 9.8 * POINTS_MAX
    assert list(numbers_of('{"a": 1, "b": NaN, "c": "x", "d": true, "e": 1e999}')) == [
        ("a", 1.0), ("b", None), ("e", None),
    ]  # fmt: skip
    assert not list(numbers_of("[1]"))
    assert not list(numbers_of("{"))


def job(workers: int, job_id: str = "j-a") -> JobView:
    spec = JobSpec(
        job_id=JobId(job_id), name=job_id, entry=Entry(EntryKind.FUNCTION, "train"),
        min_workers=1, max_workers=workers,
    )  # fmt: skip
    places = [(WorkerId(f"n{n // 8}/{n}"), NodeId(f"n{n // 8}"), n) for n in range(workers)]
    group = Group(1, tuple(Member(w, node, rank, "") for w, node, rank in places))
    record = JobRecord(spec, JobPhase.RUNNING, generation=1, group=group)
    views = tuple(
        WorkerView(WorkerReport(w, spec.job_id, WorkerPhase.TRAINING, 1, pid=9), node, rank, 0, 5)
        for w, node, rank in places
    )
    return JobView(record, "", 0, views)


def test_a_thousand_nodes_make_a_page_of_bounded_size() -> None:
    big = job(8000)
    nodes = tuple(
        NodeView(Node(NodeId(f"n{n}"), 1, "h", 8), NodePhase.READY, 0, 0) for n in range(1000)
    )
    view = ClusterView(SECOND, nodes, (big,))
    page = job_page(view, big, History().of(big.record.spec.job_id), 100 * SECOND)
    assert len(page.html()) < 1_500_000
    # Later, when nothing but time went by, hardly anything is sent.
    changes = Changes(budget=1e9)
    list(changes.take(page.parts()))
    later = replace(view, now_ns=61 * SECOND)
    again = job_page(later, big, History().of(big.record.spec.job_id), 160 * SECOND)
    assert sum(map(len, changes.take(again.parts()))) < 2000
    front = front_page(view, 100 * SECOND, about="")
    assert len(front.html()) < 600_000


def test_a_loss_shows_as_a_generation_with_its_pause() -> None:
    history, job_id = History(), JobId("j-a")

    def tell(at_s: float, name: str, **fields: Any) -> None:
        pairs = tuple((key, str(value)) for key, value in fields.items())
        history.take(TimedNote(Note(name, job_id, pairs), round(at_s * SECOND)))

    tell(1, "job_submitted")
    tell(2, "group_formed", generation=1, cause="start", world_size=2)
    tell(3, "first_step", generation=1, unix_ns=3 * SECOND)
    tell(10, "worker_gone", rank=1, cause="was killed (SIGKILL)")
    tell(10.1, "group_formed", generation=2, cause="lost", world_size=2, reason="lost one")
    tell(10.5, "group_training", generation=2)
    first, second = history.of(job_id).spans
    assert first.ended_ns == 10 * SECOND
    assert first.left == ["rank 1, was killed (SIGKILL)"]
    assert second.pause_s == 0.5
    assert history.of(job_id).reforms == {"lost": 1}
    assert sum(history.queue_waits.counts) == 1
    page = job_page(ClusterView(0, (), (job(2),)), job(2), history.of(job_id), 20 * SECOND)
    assert "0.50 s" in page.html()
    assert "was killed (SIGKILL)" in page.html()
