"""Each line of a log has the stamp of its first byte, over rotated files, also while it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.agent.log_follow import LogReader
from elastic.agent.logs import LogFile, LogLimits
from elastic.agent.old_logs import OldLogLimits, prune_logs


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_lines_know_who_printed_them(tmp_path: Path, size: int) -> None:
    """Whatever the files' size: a line may begin in one, and end in the next."""
    log = LogFile(tmp_path / "job" / "n1-3.log", LogLimits(file_bytes_max=size, num_old_files=99))
    reader = LogReader(log.path, -1)
    found: list[tuple[int, int, str]] = []

    def read(*, last: bool = False) -> None:
        while stamped := reader.read(last=last):
            for stamp, text in stamped:
                assert stamp.unix_ns > 0
                found.extend((stamp.generation, stamp.rank, line) for line in text.splitlines())
            if last and not stamped:
                break

    log.write(b"import\nbegun ")
    log.generation, log.rank = 1, 2
    log.write(b"before\none\ntw")
    read()
    log.generation, log.rank = 2, 0
    log.write(b"o\nthree\n")
    log.write(b"no end")
    log.end()
    read(last=True)
    reader.close()
    whole = [
        (0, -1, "import"), (0, -1, "begun before"), (1, 2, "one"), (1, 2, "two"), (2, 0, "three"),
        (2, 0, "no end"),
    ]  # fmt: skip
    assert found == whole
    assert prune_logs(tmp_path, "n1", OldLogLimits(files_max=0)) > 0
    assert list((tmp_path / "job").iterdir()) == []


def test_a_log_without_marks_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "w.log").write_text("one\ntwo\n")
    reader = LogReader(tmp_path / "w.log", 1)
    ((stamp, text),) = reader.read(last=True)
    assert (stamp.unix_ns, stamp.rank, text) == (0, -1, "two\n")
    reader.close()
