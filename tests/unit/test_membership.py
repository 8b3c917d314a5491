"""Which workers form the next group: tables of facts, and the action and reason that follow.

A worker is written as "a1:train/2", which is worker a/1 in phase TRAINING of generation 2,
followed by marks: "x" gone, "?" its node does not answer, "L" leaving, "O" leaving without a
deadline, "!" must be out by now, "s" its process is spent, "i" its loop continues in place, "a" its
agent is awaited.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.facts import JobId, NodeId, WorkerId, WorkerPhase
from elastic.core.policy.decision import Decision
from elastic.core.policy.membership import (
    ANEW_S,
    UNASKED_S,
    Candidate,
    CurrentGroup,
    GroupAction,
    GroupPlan,
    decide,
)
from tests.strategies import SCRIPT

NOW = ns(100)
CONFIG = CoordinatorConfig(start_timeout_s=10, broken_grace_s=0.3, boundary_timeout_s=30)
PHASES = {
    "start": WorkerPhase.STARTING, "ready": WorkerPhase.READY, "form": WorkerPhase.FORMING,
    "train": WorkerPhase.TRAINING, "broken": WorkerPhase.BROKEN, "done": WorkerPhase.FINISHED,
}  # fmt: skip
WORKER = re.compile(r"([a-z])(\d+):([a-z]+)/(\d+)([x?LO!sia]*)(?:@(\d+))?")


def worker(text: str) -> Candidate:
    """Read a worker as written above; "@95" is the second at which it entered its phase."""
    found = WORKER.fullmatch(text)
    assert found, text
    node, serial, phase, generation, marks, since = found.groups()
    return Candidate(
        WorkerId(f"{node}/{serial}"),
        NodeId(node),
        PHASES[phase],
        int(generation),
        since_ns=ns(int(since or 99)),
        present="x" not in marks,
        reachable="?" not in marks,
        leaving=bool({"L", "O", "!"} & {*marks}),
        leave_by_ns=NOW if "!" in marks else ns(120) if "L" in marks else None,
        spent="s" in marks,
        has_state="i" in marks,
        awaited="a" in marks,
    )


def ids(text: str) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(f"{w[0]}/{w[1:]}") for w in text.split())


def ask(
    workers: str,
    members: str = "",
    *,
    low: int = 2,
    high: int = 4,
    replica: int = 1,
    now_ns: int = NOW,
    own_steps: bool = False,
    **current: Any,
) -> Decision[GroupPlan]:
    """Decide for generation 1 with these members (open), or for no group if there are none."""
    spec = JobSpec(
        job_id=JobId("j1"), name="digits", entry=SCRIPT, min_workers=low, max_workers=high,
        workers_per_replica=replica, own_steps=own_steps,
    )  # fmt: skip
    known = (
        CurrentGroup(1, ids(members), **{"is_open": True, **current}) if members else CurrentGroup()
    )
    return decide(spec, known, [worker(w) for w in workers.split()], now_ns, CONFIG)


def answer(decision: Decision[GroupPlan]) -> str:
    """Return the plan as "form start: a1 b1" and the like."""
    plan = decision.value
    members = " ".join(w.replace("/", "") for w in plan.members)
    return f"{plan.action.value} {plan.cause}".strip() + (f": {members}" if members else "")


# ---------------------------------------------------------------- no group is out there


@pytest.mark.parametrize(
    ("workers", "expected", "reason"),
    [
        ("", "wait", "0 of 2 workers ready, 0 starting"),
        ("a1:ready/0", "wait", "1 of 2 workers ready, 0 starting"),
        ("a1:ready/0 b1:start/0", "wait", "1 of 2 workers ready, 1 starting"),
        ("a1:ready/0 b1:ready/0", "form start: a1 b1", "2 workers ready"),
        ("b1:ready/0 a1:ready/0", "form start: a1 b1", "2 workers ready"),
        ("a1:ready/0 b1:ready/0x", "wait", "1 of 2 workers ready, 0 starting"),
        (
            "a1:ready/0 b1:ready/0?",
            "wait",
            "1 of 2 workers ready, 0 starting, 1 on nodes that do not answer",
        ),
        # Five are ready, max is four: by id.
        (
            "e1:ready/0 d1:ready/0 c1:ready/0 b1:ready/0 a1:ready/0",
            "form start: a1 b1 c1 d1",
            "4 workers ready",
        ),
    ],
)
def test_a_first_group_forms_as_soon_as_min_is_ready_and_nobody_is_on_the_way(
    workers: str, expected: str, reason: str
) -> None:
    decision = ask(workers)
    assert (answer(decision), decision.reason) == (expected, reason)


def test_a_worker_that_leaves_forms_no_group() -> None:
    assert answer(ask("a1:ready/0 b1:ready/0L")) == "wait"


def test_a_first_group_waits_a_while_for_workers_that_are_starting() -> None:
    workers = "a1:ready/0@95 b1:ready/0@98 c1:start/0"
    waits = ask(workers)
    assert answer(waits) == "wait"
    assert waits.reason == "2 of 4 workers ready, 1 starting"
    assert waits.wake_ns == ns(105)
    assert answer(ask(workers, now_ns=ns(105) - 1)) == "wait"
    assert answer(ask(workers, now_ns=ns(105))) == "form start: a1 b1"


def test_a_first_group_of_max_waits_for_nobody() -> None:
    workers = "a1:ready/0 b1:ready/0 c1:ready/0 d1:ready/0 e1:start/0"
    assert answer(ask(workers)) == "form start: a1 b1 c1 d1"


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # Suspended members and a replacement: members first, by rank.
        ("a1:ready/1 b1:broken/1 c1:ready/0", "form resume: b1 a1 c1"),
        # A later group does not wait for whoever is starting.
        ("a1:ready/1 b1:ready/1 c1:start/0", "form resume: b1 a1"),
        # Who still leaves the old group is not interrupted for the next one.
        ("a1:ready/1 b1:train/1", "wait"),
        ("a1:ready/1 b1:done/1", "form resume: b1 a1"),
    ],
)
def test_a_suspended_job_resumes_once_enough_have_left_the_old_group(
    workers: str, expected: str
) -> None:
    assert answer(ask(workers, "b1 a1", is_open=False)) == expected


def test_the_wait_tells_how_many_still_leave_the_old_group() -> None:
    decision = ask("a1:ready/1 b1:train/1", "b1 a1", is_open=False)
    assert decision.reason == "1 of 2 workers ready, 0 starting, 1 leaving the old group"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "wait"),
        (2, "form start: a1 b1"),
        (3, "form start: a1 b1"),
        (4, "form start: a1 b1 c1 d1"),
    ],
)
def test_groups_are_made_of_whole_replicas(count: int, expected: str) -> None:
    workers = " ".join(f"{node}1:ready/0" for node in "abcd"[:count])
    assert answer(ask(workers, replica=2)) == expected


# ---------------------------------------------------------------- a group is out there


@pytest.mark.parametrize(
    ("workers", "expected", "reason"),
    [
        ("a1:train/1 b1:train/1 c1:train/1", "keep", "3 workers"),
        ("a1:train/1 b1:form/1 c1:start/0", "keep", "forming: 2 of 3 members are there"),
        ("a1:form/1 b1:form/1 c1:form/1", "keep", "forming: 3 of 3 members are there"),
        # Whoever trains in the group before has not heard of this one.
        ("a1:train/1 b1:train/0 c1:train/1", "keep", "forming: 2 of 3 members are there"),
        ("a1:train/1 b1:train/1 c1:done/1", "keep", "3 workers"),
        # One is lost: the survivors go on at once, interrupted or not.
        ("a1:train/1 b1:train/1", "form lost: a1 b1", "lost c/1"),
        ("a1:train/1 b1:broken/1 c1:train/1x", "form lost: a1 b1", "lost c/1"),
        ("b1:train/1 c1:form/1", "form lost: b1 c1", "lost a/1"),
        ("a1:train/1 b1:done/1", "form lost: a1 b1", "lost c/1"),
        # A spare worker takes the place in the same move; one that is starting does not.
        ("a1:train/1 b1:train/1 d1:ready/0", "form lost: a1 b1 d1", "lost c/1"),
        ("a1:train/1 b1:train/1 d1:start/0", "form lost: a1 b1", "lost c/1"),
        # Lost, and one of the survivors does not answer or leaves.
        ("a1:train/1 b1:train/1? d1:ready/0", "form lost: a1 d1", "lost c/1"),
        ("a1:train/1 b1:train/1L d1:ready/0", "form lost: a1 d1", "lost c/1"),
        # Below min: members keep their state and wait.
        ("a1:train/1", "suspend lost", "lost b/1, c/1; 1 of 2 workers are left"),
        ("a1:train/1 b1:train/1?", "suspend lost", "lost c/1; 1 of 2 workers are left"),
        ("a1:train/1 d1:start/0", "suspend lost", "lost b/1, c/1; 1 of 2 workers are left"),
        ("", "suspend lost", "lost a/1, b/1, c/1; 0 of 2 workers are left"),
    ],
)
def test_a_group_that_lost_a_member_is_replaced_at_once(
    workers: str, expected: str, reason: str
) -> None:
    decision = ask(workers, "a1 b1 c1")
    assert (answer(decision), decision.reason) == (expected, reason)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("a1:train/1s b1:train/1s", "replace lost: a1 b1"),
        ("a1:train/1s b1:broken/1s d1:ready/0", "replace lost: a1 b1 d1"),
        # One is still in its script's first lines, the other in a loop that goes on.
        ("a1:train/1s b1:train/1", "replace lost: a1 b1"),
        # Who was only forming the group has begun nothing.
        ("a1:form/1 b1:form/1", "form lost: a1 b1"),
    ],
)
def test_members_that_cannot_begin_again_are_replaced_first(workers: str, expected: str) -> None:
    assert answer(ask(workers, "a1 b1 c1")) == expected


def test_members_that_are_replaced_wait_for_each_other_for_a_while() -> None:
    workers = "a2:ready/0@1 b1:train/1s c2:start/0 d2:ready/0@1"
    since: Any = {"is_open": False, "anew_ns": NOW}
    waits = ask(workers, "a1 b1 c1", **since)
    assert (answer(waits), waits.reason) == ("wait", "2 of 4 workers ready, 2 starting")
    assert waits.wake_ns == NOW + ns(ANEW_S)
    assert (
        answer(ask(workers, "a1 b1 c1", now_ns=NOW + ns(ANEW_S), **since)) == "form resume: a2 d2"
    )
    assert answer(ask("a2:ready/0 d2:ready/0", "a1 b1 c1", **since)) == "form resume: a2 d2"


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("a1:train/1s b1:train/1s c1:ready/0", "replace join: a1 b1 c1"),
        # Another one is about to be ready as well.
        ("a1:train/1s b1:train/1s c1:ready/0 d1:start/0", "ask join"),
        ("a1:train/1s b1:done/1s c1:ready/0", "ask join"),
        ("a1:train/1 b1:train/1 c1:ready/0", "ask join"),
        # A node leaves: until then its script may save.
        ("a1:train/1s b1:train/1sL c1:ready/0", "ask drain"),
        ("a1:train/1s b1:train/1s! c1:ready/0", "replace drain: a1 c1"),
    ],
)
def test_a_script_that_knows_no_boundary_ends_for_who_is_ready_to_join(
    workers: str, expected: str
) -> None:
    assert answer(ask(workers, "a1 b1", own_steps=True)) == expected


def test_the_loss_of_one_worker_costs_its_whole_replica() -> None:
    workers = "a1:train/1 b1:train/1 c1:train/1"
    assert answer(ask(workers, "a1 b1 c1 d1", replica=2)) == "form lost: a1 b1"


def test_a_broken_group_without_a_known_loss_waits_for_the_cause_and_then_forms_anew() -> None:
    workers = "a1:broken/1@100 b1:train/1"
    waits = ask(workers, "a1 b1")
    assert (answer(waits), waits.reason) == ("keep", "the group broke, waiting for the cause")
    assert waits.wake_ns == NOW + ns(0.3)
    assert answer(ask(workers, "a1 b1", now_ns=NOW + ns(0.3) - 1)) == "keep"
    assert answer(ask(workers, "a1 b1", now_ns=NOW + ns(0.3))) == "form broken: a1 b1"


def test_a_member_that_tells_of_the_generation_before_breaks_or_leaves_nothing() -> None:
    for stale in ("broken", "ready"):
        assert answer(ask(f"a1:{stale}/0@1 b1:train/1", "a1 b1")) == "keep"


@pytest.mark.parametrize(
    ("workers", "expected", "reason"),
    [
        ("a1:train/1 b1:train/1 c1:ready/0", "ask join", "1 to join and 0 to leave"),
        ("a1:train/1 b1:train/1 c1:start/0", "keep", "2 workers"),
        ("a1:train/1 b1:train/1 c1:ready/0?", "keep", "2 workers"),
        ("a1:train/1 b1:train/1 c1:ready/0L", "keep", "2 workers"),
        ("a1:train/1 b1:train/1L c1:ready/0", "ask drain", "1 to join and 1 to leave"),
        # Nobody can take the leaver's place: it stays until its time is over.
        ("a1:train/1 b1:train/1L", "keep", "2 workers"),
    ],
)
def test_a_wish_to_change_waits_for_a_boundary(workers: str, expected: str, reason: str) -> None:
    decision = ask(workers, "a1 b1")
    assert answer(decision) == expected
    assert decision.reason.startswith(reason)


def test_members_are_asked_once() -> None:
    decision = ask("a1:train/1 b1:train/1 c1:ready/0", "a1 b1", leave_requested=True)
    assert answer(decision) == "keep"
    assert decision.reason == "1 to join and 0 to leave at the next boundary"


def test_a_group_of_max_asks_nobody_for_one_more() -> None:
    assert answer(ask("a1:train/1 b1:train/1 c1:ready/0", "a1 b1", high=2)) == "keep"


def test_half_a_replica_is_no_reason_to_change() -> None:
    two = "a1:train/1 b1:train/1 c1:ready/0"
    assert answer(ask(two, "a1 b1", replica=2)) == "keep"
    assert answer(ask(f"{two} d1:ready/0", "a1 b1", replica=2)) == "ask join"


def test_nothing_is_planned_while_a_members_node_does_not_answer() -> None:
    decision = ask("a1:train/1 b1:train/1? c1:ready/0", "a1 b1")
    assert answer(decision) == "keep"
    assert decision.reason == "the node of b/1 does not answer"


def test_the_next_group_forms_when_all_members_are_at_the_boundary() -> None:
    some = ask("a1:ready/1@90 b1:train/1 c1:ready/0", "a1 b1", leave_requested=True)
    assert (answer(some), some.reason) == ("keep", "1 of 2 members are at the boundary")
    assert some.wake_ns == ns(120)
    every = ask("a1:ready/1@90 b1:ready/1 c1:ready/0", "a1 b1", leave_requested=True)
    assert answer(every) == "form join: a1 b1 c1"
    finished = ask("a1:ready/1@90 b1:done/1 c1:ready/0", "a1 b1", leave_requested=True)
    assert answer(finished) == "form join: a1 b1 c1"


def test_members_that_linger_after_the_first_left_are_cut_off() -> None:
    late = ask("a1:ready/1@90 b1:train/1 c1:ready/0", "a1 b1", leave_requested=True, now_ns=ns(120))
    assert answer(late) == "form join: a1 b1 c1"


def test_a_smaller_group_after_a_boundary_is_called_a_drain() -> None:
    decision = ask("a1:ready/1 b1:ready/1 c1:ready/1L", "a1 b1 c1", leave_requested=True)
    assert answer(decision) == "form drain: a1 b1"


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("a1:ready/1L b1:train/1L c1:ready/0 d1:ready/0", "keep"),
        # Whoever is to leave and was no member is not asked to hand on anything.
        ("a1:ready/1L b1:ready/1L c1:ready/0 d1:ready/0 e1:ready/0L", "form drain: a1 b1 c1 d1"),
        ("a1:ready/1L b1:ready/1L", "form drain: a1 b1"),
        ("a1:ready/1L b1:ready/1 c1:ready/0", "form join: b1 c1"),
        ("a1:ready/1! b1:ready/1! c1:ready/0 d1:ready/0", "form drain: c1 d1"),
    ],
)
def test_members_that_are_out_with_what_nobody_has_saved_go_on_once_more(
    workers: str, expected: str
) -> None:
    assert answer(ask(workers, "a1 b1", leave_requested=True, in_place=True)) == expected


def test_members_that_have_saved_or_keep_nothing_do_not() -> None:
    workers = "a1:ready/1L b1:ready/1L c1:ready/0 d1:ready/0"
    for current in ({"saves": True, "in_place": True}, {}):
        assert answer(ask(workers, "a1 b1", leave_requested=True, **current)) == "form join: c1 d1"
    waits = "a1:ready/1L b1:train/1L c1:ready/0 d1:ready/0"
    assert answer(ask(waits, "a1 b1", leave_requested=True)) == "ask drain"


def test_a_leaver_has_time_until_its_deadline_and_is_cut_off_then() -> None:
    assert ask("a1:train/1 b1:train/1L", "a1 b1").wake_ns == ns(120)
    cut = ask("a1:train/1 b1:train/1 c1:train/1!", "a1 b1 c1")
    assert (answer(cut), cut.reason) == ("form drain: a1 b1", "c/1 must leave now")
    below = ask("a1:train/1 b1:train/1!", "a1 b1")
    assert (answer(below), below.reason) == (
        "suspend drain",
        "b/1 must leave now; 1 of 2 workers are left",
    )


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ("a1:ready/1@99 b1:train/1 c1:train/1L", "1 of 3 members are at the boundary"),
        ("a1:train/1 b1:train/1? c1:train/1L", "the node of b/1 does not answer"),
        ("a1:train/1 b1:train/1 c1:train/1L", "0 to join and 1 to leave at the next boundary"),
    ],
)
def test_a_leavers_deadline_is_kept_whatever_else_is_waited_for(workers: str, reason: str) -> None:
    decision = ask(workers, "a1 b1 c1", leave_requested="ready" in workers)
    assert (decision.reason, decision.wake_ns) == (reason, ns(120))


def test_members_that_left_unasked_wait_for_the_others_for_a_moment_only() -> None:
    """Their coordinator told them, and was replaced before it said what came then."""
    left = "a1:ready/1@99 b1:train/1 c1:ready/1@99"
    assert ask(left, "a1 b1 c1").wake_ns == ns(99 + UNASKED_S)
    assert answer(ask(left, "a1 b1 c1", now_ns=ns(101))) == "form join: a1 b1 c1"
    assert answer(ask(left, "a1 b1 c1", now_ns=ns(101), leave_requested=True)) == "keep"


def test_a_leavers_deadline_comes_before_the_cause_of_a_broken_group_is_known() -> None:
    now_ns = ns(120) - ns(0.1)
    decision = ask("a1:train/1 b1:broken/1@120 c1:train/1L", "a1 b1 c1", now_ns=now_ns)
    assert (answer(decision), decision.wake_ns) == ("keep", ns(120))


def test_a_loss_counts_before_a_deadline_and_a_deadline_before_a_broken_group() -> None:
    workers = "a1:train/1 b1:broken/1 c1:train/1!"
    assert answer(ask(workers, "a1 b1 c1")) == "form drain: a1 b1"
    assert answer(ask(workers, "a1 b1 c1 d1")) == "form lost: a1 b1"


@pytest.mark.parametrize("action", list(GroupAction))
def test_a_plan_other_than_form_names_no_members(action: GroupAction) -> None:
    assert GroupPlan(action).members == ()


# ---------------------------------------------------------------- who has the state


def test_a_suspended_group_is_not_replaced_before_its_members_have_come_or_are_given_up() -> None:
    """Else committed steps that only they have would be lost."""
    new = "c1:ready/0 d1:ready/0"
    for survivor in ("a1:ready/1i?", "a1:train/1i", "a1:train/1?a"):
        waits = ask(f"{survivor} {new}", "a1 b1", is_open=False)
        assert answer(waits) == "wait"
        assert waits.reason == "2 workers ready, waiting for a/1 with the newest state"
    assert answer(ask(f"a1:ready/1ia {new}", "a1 b1", is_open=False)) == "form resume: a1 c1 d1"
    # Given up, or without a state that it could pass on.
    for survivor in ("a1:ready/1ix", "a1:train/1s?", "a1:ready/1?"):
        assert answer(ask(f"{survivor} {new}", "a1 b1", is_open=False)) == "form resume: c1 d1"
    # Ready, but cut off from the others: it would be waited for for ever.
    assert answer(ask(f"a1:ready/1iO {new}", "a1 b1", is_open=False)) == "form resume: c1 d1"
    one_has_it = "a1:ready/1i? b1:ready/1i c1:ready/0"
    assert answer(ask(one_has_it, "a1 b1", is_open=False)) == "form resume: b1 c1"


def test_a_group_that_lost_a_member_waits_for_the_other_one_with_its_state() -> None:
    new = "c1:ready/0 d1:ready/0"
    waits = ask(f"a1:train/1i? {new}", "a1 b1")
    assert answer(waits) == "keep"
    assert waits.reason == "lost b/1; waiting for a/1 with the newest state"
    assert answer(ask(f"a1:train/1i {new}", "a1 b1")) == "form lost: a1 c1 d1"
    assert answer(ask(f"a1:train/1s? {new}", "a1 b1")) == "form lost: c1 d1"


def test_a_leaving_member_with_the_state_joins_once_more_to_pass_it_on() -> None:
    new = "c1:ready/0 d1:ready/0"
    assert answer(ask(f"a1:train/1iL {new}", "a1 b1")) == "form lost: a1 c1 d1"
    assert answer(ask(f"a1:ready/1iL {new}", "a1 b1", is_open=False)) == "form resume: a1 c1 d1"
    # Not beyond its deadline, nor if another member has it.
    assert answer(ask(f"a1:train/1i! {new}", "a1 b1")) == "form lost: c1 d1"
    assert answer(ask(f"a1:train/1iL e1:train/1i {new}", "a1 b1 e1")) == "form lost: e1 c1 d1"


def test_a_member_with_the_state_is_chosen_before_those_without() -> None:
    fewer = ask("a1:broken/1 b1:broken/1 c1:broken/1i", "a1 b1 c1", low=1, high=1, is_open=False)
    assert answer(fewer) == "form resume: c1"
    # Also one of an older group, which was silent when the newest formed.
    older = ask("a1:ready/0i c1:broken/1 d1:ready/0", "c1", low=1, high=1, is_open=False)
    assert answer(older) == "form resume: a1"
