"""Each nanosecond of each worker is booked once, whatever workers tell and whenever it comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.facts import WorkerPhase
from elastic.core.policy.goodput import REPORTED, Account, Ledger, Situation, category, split
from elastic.core.telemetry import (
    BELOW_MIN,
    DRAIN,
    FIELDS,
    PRODUCTIVE,
    REDONE,
    REFORM,
    START,
    Goodput,
)

times = st.lists(st.integers(0, 10**12), min_size=len(FIELDS), max_size=len(FIELDS))
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.sampled_from([REPORTED, REPORTED, *range(len(FIELDS))])),
        st.tuples(st.just("hear"), times),
    ),
    max_size=30,
)


@given(
    lives=st.lists(
        st.tuples(st.integers(0, 10**9), happenings, st.booleans()), min_size=1, max_size=4
    ),
    pauses=st.lists(st.integers(0, 3 * 10**9), min_size=1, max_size=40),
)
def test_categories_sum_to_what_was_allocated(
    lives: list[tuple[int, list[tuple[str, object]], bool]], pauses: list[int]
) -> None:
    ledger, allocated_ns, turn = Ledger(), 0, 0
    for begins_ns, story, is_lost in lives:
        now_ns, account = begins_ns, Account(START, begins_ns)
        for what, value in story:
            now_ns += pauses[turn % len(pauses)]
            turn += 1
            before_ns = ledger.total().allocated_ns
            if what == "move":
                ledger.move(account, value, now_ns)  # type: ignore[arg-type]
            else:
                ledger.add_report(account, Goodput(*value), (0, turn), now_ns)  # type: ignore[misc]
            unreported_ns = account.late_ns + now_ns - account.since_ns
            reported_ns = ledger.total().allocated_ns + unreported_ns
            assert reported_ns == allocated_ns + now_ns - begins_ns
            assert ledger.total().allocated_ns >= before_ns  # A counter never falls.
        ledger.close(account, now_ns, is_lost=is_lost)
        allocated_ns += now_ns - begins_ns
        assert ledger.total().allocated_ns == allocated_ns
    assert min(ledger.total().times()) >= 0


@given(now=times, before=times, room_ns=st.integers(0, 10**12))
def test_more_than_there_was_time_for_is_scaled(
    now: list[int], before: list[int], room_ns: int
) -> None:
    news = [max(0, a - b) for a, b in zip(now, before, strict=True)]
    parts = split(now, before, room_ns)
    assert sum(parts) == min(room_ns, sum(news))
    assert sum(news) > room_ns or list(parts) == news


def test_steps_that_a_run_went_back_for_are_no_progress() -> None:
    ledger, account = Ledger(), Account(REPORTED, 0)
    ledger.add_report(account, Goodput(productive_ns=5), (0, 7), 10)
    ledger.group_formed()
    ledger.add_report(account, Goodput(productive_ns=8), (0, 5), 20)
    ledger.add_report(account, Goodput(productive_ns=10), (0, 8), 30)
    assert ledger.booked[PRODUCTIVE] == 5 + 2
    assert ledger.booked[REDONE] == 3


def test_what_is_reported_after_a_change_of_the_group_counts_as_what_it_was() -> None:
    ledger, account = Ledger(), Account(REPORTED, 0)
    ledger.move(account, REFORM, 30)
    ledger.move(account, REPORTED, 32)
    ledger.add_report(account, Goodput(productive_ns=29), (0, 7), 33)
    assert (ledger.booked[PRODUCTIVE], ledger.booked[REFORM]) == (29, 2 + 1)
    ledger.move(account, REFORM, 40)
    ledger.close(account, 41, is_lost=True)
    assert ledger.booked[REDONE] == 40 - 32
    assert ledger.total().allocated_ns == 41


def test_who_waits_is_told_from_who_starts_or_ends() -> None:
    ready = WorkerPhase.READY
    assert category(Situation(ready)) == BELOW_MIN
    assert category(Situation(ready, has_group=True)) == START
    assert category(Situation(ready, is_leaving=True)) == DRAIN
    assert category(Situation(WorkerPhase.TRAINING, is_leaving=True)) == REPORTED
