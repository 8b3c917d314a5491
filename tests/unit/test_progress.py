"""Who works is never taken for hung: what the control thread sees, reports, and what is judged."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest

from elastic.core.config import NS_PER_S
from elastic.core.events.worker import ActivitySampled
from elastic.core.facts import Assignment, Generation, JobId, WorkerId
from elastic.core.messages import Pulse
from elastic.core.policy.hang import (
    FIRST_TIMES,
    LONGEST_TIMES,
    POLL_NS,
    ActivityMonitor,
    Hang,
    MainThreadState,
    WatchedMember,
    judge,
)
from elastic.worker.base.activity import Activity
from elastic.worker.group import collective_watch
from elastic.worker.group.collective_watch import BlockedKind, CollectiveWatch
from tests.patience import DEADLINE_S

TIMEOUT_NS = 30 * NS_PER_S
G = Generation(3)
PLACE = Assignment(JobId("j"), WorkerId("n0/1"), G, 0, 2, 0, 1, 0, 2, "h:1")
NUM_POLLS = 12


# ------------------------------------------------------------------ what is seen of a process


def seen_while(code: str) -> bool:
    """Return whether the main thread of a process that runs this code is seen to work.

    It is looked at as by the control thread, but more often, once the code has set `begun`.
    """
    script = textwrap.dedent(
        """
        import os, sys, threading, time
        from elastic.worker.group.collective_watch import CollectiveWatch

        def look():
            watch, moves = CollectiveWatch(), []
            begun.wait()
            for _ in range({polls}):
                moves.append(watch.sample(1, time.monotonic_ns())[0])
                time.sleep(0.05)
            print(len(set(moves[4:])), flush=True)
            os._exit(0)

        begun = threading.Event()
        threading.Thread(target=look, daemon=True).start()
        """
    ).format(polls=NUM_POLLS) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) > 1


@pytest.mark.parametrize(
    ("code", "works"),
    [
        pytest.param(
            """
            def evaluate():
                begun.set()
                while True:
                    sum(range(100_000))
            evaluate()
            """,
            True,
            id="python",
        ),
        pytest.param("begun.set(); time.sleep(1000)", True, id="sleep"),
        pytest.param("begun.set(); threading.Event().wait()", False, id="deadlock"),
        pytest.param(
            """
            import ctypes
            begun.set()
            ctypes.CDLL(None).pause()
            """,
            False,
            id="native",
        ),
        pytest.param(
            """
            import ctypes
            begun.set()
            lib, lock = ctypes.CDLL(None), ctypes.c_int()
            lib.pthread_spin_init(ctypes.byref(lock), 0)
            while True:
                lib.pthread_spin_lock(ctypes.byref(lock))  # The second time without end.
            """,
            False,
            id="native loop",
        ),
    ],
)
def test_work_is_told_from_standing_still(code: str, works: bool) -> None:
    assert seen_while(code) is works


def test_named_work_counts_however_still_it_looks() -> None:
    watch = CollectiveWatch()
    polls = {watch.sample(1, number * POLL_NS, work="evaluation")[0] for number in range(5)}
    assert len(polls) == 5


def test_a_wait_is_seen_also_where_looks_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine some always do: what was between them is left out, and no more."""
    monkeypatch.setattr(collective_watch, "seen_stack", lambda _: ((1,), ""))
    monkeypatch.setattr(collective_watch, "blocked_in_of", lambda _: BlockedKind.CALLED)
    monkeypatch.setattr(collective_watch.c10d, "issued", lambda: (7,))
    watch, now_ns, waited_ns = CollectiveWatch(), NS_PER_S, 0
    for _ in range(3):
        for _ in range(20):
            now_ns += POLL_NS
            waited_ns = watch.sample(1, now_ns)[1]
        now_ns += 10 * POLL_NS
    assert 50 * POLL_NS <= waited_ns < 60 * POLL_NS


def test_work_inside_an_exchange_is_not_waiting() -> None:
    activity = Activity()
    activity.beats = 1
    with activity.waiting():
        with activity.working("reads a checkpoint"):
            assert activity.waiting_ns(time.monotonic_ns()) == 0
            assert activity.work == "reads a checkpoint"
        assert activity.waiting_ns(time.monotonic_ns()) > 0
    assert activity.work == ""


# ------------------------------------------------------------------ what is reported


def polled(
    pulses: ActivityMonitor, seconds: float, see: Callable[[int], ActivitySampled]
) -> list[Pulse]:
    """Look ten times a second; return what is reported."""
    found = []
    for number in range(1, int(seconds * 10) + 1):
        report = pulses.sample(see(number), PLACE, number * POLL_NS)
        found += [report] if report is not None else []
    return found


def test_long_work_is_reported_for_people_and_nothing_else() -> None:
    pulses = ActivityMonitor()
    pulses.begin(0, 2)
    reports = polled(pulses, 20, lambda number: ActivitySampled(number, epoch=1, step=7))
    assert reports
    assert all(r.working_ns >= 10 * NS_PER_S and not r.still_ns for r in reports)


def test_a_main_thread_that_steps_reports_nothing() -> None:
    pulses = ActivityMonitor()
    pulses.begin(0, 2)
    assert not polled(
        pulses, 60, lambda number: ActivitySampled(number, epoch=0, step=number // 10)
    )


def test_the_longest_standstill_that_ended_is_reported_with_the_next_one() -> None:
    pulses = ActivityMonitor()
    pulses.begin(0, 2)

    def see(number: int) -> ActivitySampled:
        return ActivitySampled(2 if number > 250 else 1, step=1)

    assert polled(pulses, 40, see)[-1].longest_ns == pytest.approx(25 * NS_PER_S, rel=0.02)


# ------------------------------------------------------------------ what is judged


def verdict(now_s: float, *sights: MainThreadState) -> Hang:
    members = [WatchedMember(WorkerId(f"n{i}/1"), True, sight) for i, sight in enumerate(sights)]
    return judge(G, members, int(now_s * NS_PER_S), TIMEOUT_NS).value


def still(now_s: float, **more: object) -> MainThreadState:
    return MainThreadState(G, int(now_s * NS_PER_S), still_since_ns=0, **more)  # type: ignore[arg-type]


def waits(now_s: float) -> MainThreadState:
    return MainThreadState(G, int(now_s * NS_PER_S), waiting_since_ns=0)


def test_the_first_step_in_a_process_may_take_ten_times_as_long() -> None:
    def accused(now_s: float) -> bool:
        return bool(verdict(now_s, waits(now_s), still(now_s, has_stepped=False)).culprits)

    assert not accused(30 * FIRST_TIMES - 1)
    assert accused(30 * FIRST_TIMES)


def test_what_a_run_has_shown_to_be_usual_is_no_hang() -> None:
    def accused(now_s: float) -> bool:
        usual = still(now_s, longest_ns=40 * NS_PER_S)
        return bool(verdict(now_s, waits(now_s), usual).culprits)

    assert not accused(40 * LONGEST_TIMES - 1)
    assert accused(40 * LONGEST_TIMES)


def test_work_is_named_and_accuses_nobody() -> None:
    now_s = 300
    works = MainThreadState(
        G, now_s * NS_PER_S, working_since_ns=10 * NS_PER_S, work="evaluate (train.py:12)"
    )
    found = verdict(now_s, waits(now_s), works, still(now_s))
    assert not found.culprits
    assert not found.is_stuck
    assert found.works == "n1/1 works for 290 s now: evaluate (train.py:12)"
