"""Which logs of former workers are kept."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from elastic.agent.log_follow import LogReader
from elastic.agent.logs import LogFile, LogLimits
from elastic.agent.old_logs import OldLogLimits, hold, prune_logs


def written(folder: Path, *names: str) -> list[Path]:
    """Write ten bytes into each, the first one longest ago."""
    paths = []
    for age, name in enumerate(reversed(names)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0123456789")
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
        paths.append(path)
    return paths[::-1]


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.log*"))


def test_the_oldest_go_first_of_all_jobs(tmp_path: Path) -> None:
    written(tmp_path, "a/n1-1.log", "b/n1-2.log.1", "a/n1-3.log", "b/n1-4.log")
    assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=25)) == 2
    assert left(tmp_path) == ["a/n1-3.log", "b/n1-4.log"]
    assert prune_logs(tmp_path, "n1", OldLogLimits(files_max=1)) == 1
    assert left(tmp_path) == ["b/n1-4.log"]


def test_what_a_worker_that_runs_writes_stays_with_its_older_parts(tmp_path: Path) -> None:
    live, *_ = written(tmp_path, "a/n1-1.log", "a/n1-1.log.1", "a/n1-2.log")
    log_file = LogFile(live, LogLimits())
    log_file.write(b"more")
    os.utime(live, (0, 0))
    assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=0)) == 1
    assert left(tmp_path) == ["a/n1-1.log", "a/n1-1.log.1"]
    log_file.end()
    assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=0)) == 2


def test_who_reads_an_older_part_finds_the_newer_ones(tmp_path: Path) -> None:
    written(tmp_path, "a/n1-1.log.3", "a/n1-1.log.2", "a/n1-1.log.1", "a/n1-1.log")
    with open(tmp_path / "a/n1-1.log.2", "rb") as reader:
        hold(reader.fileno())
        assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=0)) == 1
    assert left(tmp_path) == ["a/n1-1.log", "a/n1-1.log.1", "a/n1-1.log.2"]
    assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=15)) == 2
    assert left(tmp_path) == ["a/n1-1.log"]


def test_where_there_are_no_locks_all_stays_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refused)
    written(tmp_path, "a/n1-1.log", "a/n1-2.log")
    for _ in range(2):
        assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=0)) == 0
    assert caplog.text.count("old_logs_kept") == 1
    assert len(left(tmp_path)) == 2


def test_what_somebody_reads_stays(tmp_path: Path) -> None:
    (path,) = written(tmp_path, "a/n1-1.log")
    reader = LogReader(path, -1)
    assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=0)) == 0
    assert [text for _, text in reader.read(last=True)] == ["0123456789"]
    reader.close()
    assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=0)) == 1


def test_a_log_that_goes_while_a_new_worker_opens_it_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = written(tmp_path, "a/n1-1.log")
    real = os.open

    def opened(name: Path, *flags: int) -> int:
        fd = real(name, *flags)
        monkeypatch.setattr(os, "open", real)
        path.unlink()
        return fd

    monkeypatch.setattr(os, "open", opened)
    log_file = LogFile(path, LogLimits())
    log_file.write(b"new")
    log_file.end()
    assert path.read_text() == "new"


def test_what_others_wrote_to_the_folder_stays(tmp_path: Path) -> None:
    others = ("a/n12-1.log", "a/n1-2-1.log", "n1-spares.log", "a/n1-x.log", "a/n1-1.log.gz")
    written(tmp_path, *others)
    assert prune_logs(tmp_path, "n1", OldLogLimits(bytes_max=0)) == 0
    assert prune_logs(tmp_path / "absent", "n1") == 0
    assert left(tmp_path) == sorted(others)
