"""The tables of legal moves: complete, reachable, obeyed, and readable."""

from __future__ import annotations

from enum import Enum

import pytest

from elastic.core.facts import (
    Entry,
    EntryKind,
    JobPhase,
    NodePhase,
    WorkerPhase,
)
from elastic.core.machine import transitions
from elastic.core.machine.event_history import brief
from elastic.core.machine.transitions import (
    CONNECTION,
    GROUP,
    JOB,
    MAIN,
    NODE,
    PROCESS,
    RELEASE,
    STEP,
    WORKER,
    WORKER_SEEN,
    TransitionTable,
    check_move,
)
from elastic.errors import InvariantViolation

TABLES = [WORKER, WORKER_SEEN, JOB, GROUP, RELEASE, NODE, CONNECTION, PROCESS, MAIN, STEP]
by_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


def reached_from(table: TransitionTable, starts: tuple[Enum, ...]) -> set[Enum]:
    found = list(starts)
    for phase in found:
        found.extend(after for after in table.moves[phase] if after not in found)
    return set(found)


@by_table
def test_a_table_lists_every_phase_of_its_enum(table: TransitionTable) -> None:
    kind = type(table.starts[0])
    assert set(table.moves) == set(kind)
    assert all(isinstance(after, kind) for row in table.moves.values() for after in row)


@by_table
def test_every_phase_can_be_reached(table: TransitionTable) -> None:
    assert reached_from(table, table.starts) == set(table.moves)


@by_table
def test_no_move_is_listed_twice(table: TransitionTable) -> None:
    for row in table.moves.values():
        assert len(row) == len(set(row))


def test_every_module_level_table_is_tested_here() -> None:
    tables = [value for value in vars(transitions).values() if isinstance(value, TransitionTable)]
    assert {id(table) for table in tables} == {id(table) for table in TABLES}


@pytest.mark.parametrize(
    ("table", "last"),
    [
        (WORKER, [WorkerPhase.EXITED]),
        (JOB, [JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED]),
        (NODE, []),
        (GROUP, []),
        (RELEASE, []),
        (CONNECTION, []),
        (PROCESS, [transitions.ProcessPhase.GONE]),
        (MAIN, [transitions.MainPhase.OVER]),
        (STEP, []),
    ],
    ids=lambda value: value.name if isinstance(value, TransitionTable) else "",
)
def test_only_the_phases_that_end_something_are_last(
    table: TransitionTable, last: list[Enum]
) -> None:
    assert [phase for phase, after in table.moves.items() if not after] == last


@pytest.mark.parametrize("phase", list(WorkerPhase), ids=lambda phase: phase.value)
def test_a_worker_may_be_seen_to_exit_from_anywhere_and_never_to_start_again(
    phase: WorkerPhase,
) -> None:
    assert WorkerPhase.EXITED in WORKER_SEEN.moves[phase]
    is_back = WorkerPhase.STARTING in WORKER_SEEN.moves[phase]
    assert is_back == (phase is WorkerPhase.STARTING)
    assert set(WORKER.moves[phase]) <= set(WORKER_SEEN.moves[phase])


@pytest.mark.parametrize(
    ("table", "old", "new", "words"),
    [
        (
            WORKER,
            WorkerPhase.READY,
            WorkerPhase.TRAINING,
            ["a/1", "ready -> training", "WORKER", "forming, exited"],
        ),
        (
            WORKER,
            WorkerPhase.EXITED,
            WorkerPhase.READY,
            ["a/1", "exited -> ready", "none, it is a last phase"],
        ),
        (JOB, JobPhase.FAILED, JobPhase.RUNNING, ["a/1", "failed -> running", "JOB"]),
        (NODE, NodePhase.READY, NodePhase.READY, ["a/1", "ready -> ready", "NODE"]),
    ],
    ids=["skips forming", "after the end", "a failed job", "a move to itself"],
)
def test_an_illegal_move_is_refused_with_who_what_and_what_would_be_legal(
    table: TransitionTable, old: Enum, new: Enum, words: list[str]
) -> None:
    with pytest.raises(InvariantViolation) as caught:
        check_move(table, "worker a/1", old, new)
    for word in words:
        assert word in str(caught.value)


# ---------------------------------------------------------------- the story


def test_large_parts_of_an_event_are_named_by_their_size() -> None:
    entry = Entry(EntryKind.FUNCTION, "t" * 1000, args=("x",) * 50, payload=b"p" * 10_000_000)
    line = brief(entry)
    assert len(line) < 300
    assert "<10000000 bytes>" in line
    assert "<50 items>" in line
    assert "function" in line
