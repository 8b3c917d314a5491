"""Events of a run are in its directory once, whoever writes them; stacks are found in output."""

from __future__ import annotations

import json
from pathlib import Path

from elastic.client.stacks import Dump, grouped, last_dump
from elastic.core.facts import WorkerId
from elastic.storage.events import NAME, EventsFile, read_events
from elastic.storage.files import Files


def event(number: int, job: str = "j-1") -> str:
    return json.dumps({"time_unix_ns": number, "job": job, "event": "report", "fields": {}})


def test_the_next_first_rank_adds_what_is_not_there(tmp_path: Path) -> None:
    files = Files(str(tmp_path / "run"))
    EventsFile(files).add([event(1), event(2)])
    with (tmp_path / "run" / NAME).open("a") as file:
        file.write(event(3)[:20])  # Killed in the middle of it.
    second = EventsFile(files)
    second.add([event(1), event(2), event(3)])
    second.add([event(3), event(4), event(1, job="j-2")])
    told = [(one["time_unix_ns"], one["job"]) for one in read_events(str(tmp_path / "run"))]
    assert told == [(1, "j-1"), (2, "j-1"), (3, "j-1"), (4, "j-1"), (1, "j-2")]
    assert read_events(str(tmp_path / "none")) == []


DUMP = """Thread 0x00007f (most recent call first):
  File "/x/elastic/worker/process/control.py", line 7 in _turn

Current thread 0x00007e (most recent call first):
  File "/home/me/train.py", line {line} in step
  File "/x/elastic/worker/process/entry.py", line 195 in _run_script
"""


def test_the_last_stacks_of_an_output_are_those_that_count() -> None:
    def output(line: int) -> list[tuple[int, int, str]]:
        text = f"hello\n{DUMP.format(line=3)}{DUMP.format(line=line)}bye\n"
        return [(number, 1, one) for number, one in enumerate(text.splitlines())]

    dump = last_dump(output(40))
    assert dump is not None
    assert [len(thread) for thread in dump.threads] == [1, 2]
    other = Dump(5, 0, dump.threads)
    found = {WorkerId("n1/1"): dump, WorkerId("n2/1"): other}
    assert grouped(found, all_threads=False) == [
        ("rank 0, rank 1", ("step (/home/me/train.py:40)",))
    ]
    assert len(grouped(found, all_threads=True)[0][1]) == 4
    assert last_dump([(1, 0, "no stacks")]) is None
