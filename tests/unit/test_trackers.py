"""Trackers are told of each report once, whatever dies between telling and taking that down."""

from __future__ import annotations

import json
import multiprocessing
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.storage import event_file
from elastic.storage.files import Files
from elastic.storage.trackers import TrackerSpec, Tracking, parse_trackers
from elastic.worker.process.tracking import Trackers


def report(run: Path, number: int, *, generation: int = 1, **metrics: float) -> None:
    """Write a row as rank 0 of a loop over epochs does: its place tells repeats."""
    row = {
        "generation": generation, "rank": 0, "index": number, "unix_ns": number * 10**9,
        "world_size": 1, "metrics": metrics, "at": [number, 0],
    }  # fmt: skip
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def steps_shown(kind: str, run: Path) -> list[tuple[int, float]]:
    """(number, loss) of all that a tracker of files shows."""
    if kind == "json":
        lines = (run / "tracked.jsonl").read_text().splitlines()
        return [(row["step"], row["loss"]) for row in map(json.loads, lines)]
    return list(scalars_in((run / "tensorboard" / "events.out.tfevents.1.elastic").read_bytes()))


def scalars_in(data: bytes) -> Iterator[tuple[int, float]]:
    """Read an event file as its format says, checksums and all."""
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + size]
        assert data[8:12] == event_file._masked(data[:8])
        assert data[12 + size : 16 + size] == event_file._masked(body)
        fields = dict(fields_in(body))
        if 5 in fields:
            [(_, value)] = fields_in(fields[5])
            told = dict(fields_in(value))
            assert told[1] == b"loss"
            yield fields[2], struct.unpack("<f", told[2])[0]
        data = data[16 + size :]


def fields_in(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[place : place + size]
        place += size


@pytest.mark.parametrize("kind", ["json", "tensorboard"])
def test_each_report_is_shown_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, wish = tmp_path / "run", TrackerSpec(kind)
    run.mkdir()
    report(run, 1, loss=0.5)
    first = Tracking(str(run), wish)
    assert first.turn() == 1
    assert first.turn() == 0
    report(run, 2, loss=0.25)

    # It dies after the file was written, and before that was taken down.
    with monkeypatch.context() as dies:
        dies.setattr(Files, "write", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            first.turn()
    assert len(steps_shown(kind, run)) == 2
    first.close()

    # The run has gone back: what is reported again, in the next generation, is known.
    report(run, 2, generation=2, loss=0.25)
    report(run, 3, generation=2, loss=0.125)
    second = Tracking(str(run), wish)
    assert second.turn() == 2
    assert steps_shown(kind, run) == [(1, 0.5), (2, 0.25), (3, 0.125)]
    # Storage that failed for a moment: the same tracker shows what waits, once.
    report(run, 4, generation=2, loss=0.0)
    with monkeypatch.context() as fails:
        fails.setattr(Files, "write", lambda *_: (_ for _ in ()).throw(OSError("away")))
        with pytest.raises(OSError, match="away"):
            second.turn()
    assert second.turn() == 1
    second.close()
    assert steps_shown(kind, run)[3:] == [(4, 0.0)]


class PlayedWandb:
    """The package as far as it is used; what `log` is given is sent later, and lost by a kill."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.held: list[int] = []

    def init(self, **run: str) -> PlayedWandb:
        assert (run["project"], run["resume"]) == ("vision", "allow")
        self.held.clear()
        return self

    @property
    def starting_step(self) -> int:
        return self.sent[-1] + 1 if self.sent else 0

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        assert commit, "held until the next step is logged"
        self.held.append(step)

    def send(self, count: int) -> None:
        self.sent += [self.held.pop(0) for _ in range(count)]

    def finish(self) -> None:
        self.send(len(self.held))


def test_a_server_gets_what_its_package_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedWandb()
    monkeypatch.setitem(sys.modules, "wandb", played)
    for number in range(1, 4):
        report(tmp_path, number)
    assert Tracking(str(tmp_path), TrackerSpec("wandb", "vision")).turn() == 3
    played.send(2)
    report(tmp_path, 4)
    second = Tracking(str(tmp_path), TrackerSpec("wandb", "vision"))
    assert (second.turn(), second.turn()) == (2, 0)
    second.close()
    assert played.sent == [1, 2, 3, 4]


def test_the_checksum_is_crc32c() -> None:
    # The check value of the polynomial's catalogue, masked as TFRecord does.
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert event_file._masked(b"123456789") == struct.pack("<I", masked)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_trackers(" tensorboard, json:/x ") == (
        TrackerSpec("tensorboard"),
        TrackerSpec("json", "/x"),
    )
    for text, message in (("tb", "expected one of"), ("wandb", "project"), ("mlflow", "server")):
        with pytest.raises(ConfigError, match=message):
            parse_trackers(text)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        Tracking(str(tmp_path), TrackerSpec("wandb", "p"))


def test_a_forked_child_of_the_worker_does_not_keep_trackers_from_their_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As DataLoader workers do, it has inherited the pipe whose end is the sign to finish."""
    trackers = Trackers(str(tmp_path), "json")
    trackers.enter(0)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=threading.Event().wait, daemon=True)
    child.start()
    try:
        trackers.finish()
    finally:
        child.kill()
        child.join()
    assert "tracking_left" not in caplog.text


class InStorage:
    """A killed process whose call of storage is not answered."""

    def kill(self) -> None:
        """Do what the system does: note it."""

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it is waited for without a bound"
        raise subprocess.TimeoutExpired("tracker", timeout)


def test_one_that_storage_holds_does_not_hold_the_worker(tmp_path: Path) -> None:
    trackers = Trackers(str(tmp_path), "json")
    trackers._process = InStorage()  # type: ignore[assignment]
    trackers.enter(1)
    assert trackers._process is None
