"""The event log: what it writes, what it drops, and that nobody waits for it."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from elastic.core.events.shared import Note
from elastic.runtime import eventlog
from elastic.runtime.eventlog import (
    EventLog,
    EventLogLimits,
    note_text,
    shift_files,
)

NOTE = Note("group_formed", "j1", (("generation", "4"), ("world", "3")))


class FixedClock:
    """A clock that stands still."""

    def monotonic_ns(self) -> int:
        return 5

    def unix_ns(self) -> int:
        return 1_000_000_000


def event_log(path: Path, **limits: int) -> EventLog:
    return EventLog(path, process="agent:n1", clock=FixedClock(), limits=EventLogLimits(**limits))


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_later_life_appends(tmp_path: Path) -> None:
    for _ in range(2):
        log = event_log(tmp_path / "e")
        log.write(NOTE)
        log.close()
    assert len(records(tmp_path / "e")) == 2


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    log = event_log(tmp_path / "e")
    threads = [
        threading.Thread(target=lambda: [log.write(NOTE) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(records(tmp_path / "e")) == 2000


def test_what_does_not_fit_is_dropped_counted_and_said(tmp_path: Path) -> None:
    # The disk does not answer: opening a FIFO blocks the log's thread until someone reads.
    fifo = tmp_path / "e"
    import os

    os.mkfifo(fifo)
    log = event_log(fifo, queue_lines_max=10)
    for _ in range(1000):
        log.write(NOTE)
    assert log.dropped >= 1000 - 2 * 10
    with open(fifo) as reader:
        log.close()
        lines = [json.loads(line) for line in reader]
    said = [int(line["fields"]["lines"]) for line in lines if line["event"] == "events_dropped"]
    kept = sum(line["event"] == "group_formed" for line in lines)
    assert sum(said) == log.dropped
    assert kept + log.dropped == 1000


def test_a_disk_that_refuses_costs_lines_and_not_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = event_log(tmp_path / "file" / "e")
    with caplog.at_level(logging.WARNING):
        log.write(NOTE)
        log.close()
    assert log.dropped == 1
    assert "event_log_unwritable" in caplog.text


def test_a_file_that_is_full_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "e"
    size = len(json.dumps(records_of_one(tmp_path))) + 1
    for _ in range(10):
        log = event_log(path, file_bytes_max=2 * size, num_old_files=2)
        log.write(NOTE)
        log.close()
    counts = [len(records(tmp_path / name)) for name in ("e", "e.1", "e.2")]
    assert counts == [2, 2, 2]
    assert not (tmp_path / "e.3").exists()


def records_of_one(folder: Path) -> dict[str, object]:
    """The line that NOTE becomes."""
    log = event_log(folder / "probe")
    log.write(NOTE)
    log.close()
    return records(folder / "probe")[0]


def test_who_may_append_but_not_rename_goes_on_appending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(eventlog, "shift_files", denied)
    path = tmp_path / "events.jsonl"
    path.write_text("{}\n" * 100)
    log = event_log(path, file_bytes_max=200)
    for number in range(20):
        log.write(Note(f"event{number}"))
    log.close()
    assert len(path.read_text().splitlines()) == 120
    assert log.dropped == 0
    assert caplog.text.count("event_log_unrotated") == 1


def test_shifting_keeps_the_given_number_of_old_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for content in "abcd":
        path.write_text(content)
        shift_files(path, 2)
    assert not path.exists()
    assert [(tmp_path / f"log.{n}").read_text() for n in (1, 2)] == ["d", "c"]
    path.write_text("e")
    shift_files(path, 0)
    assert not path.exists()


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (NOTE, "group_formed job=j1 generation=4 world=3"),
        (Note("bare"), "bare"),
        (
            Note("n", fields=(("a", "two words"), ("b", ""), ("c", "x=y"), ("d", "é\n"))),
            'n a="two words" b="" c="x=y" d="é\\n"',
        ),
    ],
)
def test_a_note_becomes_one_line_that_splits_well(note: Note, text: str) -> None:
    assert note_text(note) == text
