"""Which workers form the next group of a job, or what it waits for.

Rule: one function decides, from the current facts. A group that lost a member is replaced by
its survivors and ready workers: at once, unless an agent still owes a report, the only holders of
the state are out of reach, or fewer than the least number are left. A planned change (a worker
joins, a node drains) waits for a boundary that the members agree on, because there nothing is lost.

The idea of returning the reason with the decision is torchft's `quorum_compute`. Members are not
voted on, but derived from reports, so a decision needs no round trips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from elastic.core.config import CoordinatorConfig, JobSpec, ns
from elastic.core.facts import Generation, NodeId, WorkerId, WorkerPhase
from elastic.core.policy.decision import Decision

POLL_S = 5.0
"""While members save their state at a boundary, a stalled one is checked for so often."""

UNASKED_S = 2.0
"""How long to wait for the others when members left a group without a request of this coordinator.
An earlier one has asked them: either a member was lost, or all are about to reach a boundary."""

ANEW_S = 30.0
"""How long processes that are all replaced together wait for each other's imports."""

FORMABLE_PHASES = (WorkerPhase.READY, WorkerPhase.BROKEN, WorkerPhase.FINISHED)
"""Phases in which a worker can be announced into a group without being interrupted."""

BUSY_PHASES = (WorkerPhase.FORMING, WorkerPhase.TRAINING)
"""Phases that end when the worker's group does."""


class GroupAction(Enum):
    """What the coordinator should do with a job's group."""

    KEEP = "keep"
    """Keep the group unchanged."""
    WAIT = "wait"
    """There is no group, and none can be formed yet."""
    FORM = "form"
    """Form the next generation from `members`, now."""
    ASK = "ask"
    """Ask all members to leave at their next boundary."""
    SUSPEND = "suspend"
    """Members leave now, because too few are left: they wait with their state."""
    REPLACE = "replace"
    """Members leave now, because processes are spent: `members`, or the processes that replace
    them, form the next group."""


@dataclass(frozen=True)
class GroupPlan:
    """An action, with its members (by preference, not yet ranked) and a one-word cause.

    Attributes:
        saves: members must save their state where they leave.
        dumps_stacks: it is unknown which member hangs: request the stacks of all first.
        is_unsaved: members form the next group because their state could not be saved.
    """

    action: GroupAction
    members: tuple[WorkerId, ...] = ()
    cause: str = ""
    saves: bool = False
    dumps_stacks: bool = False
    is_unsaved: bool = False


class Candidate(NamedTuple):
    """One worker of the job; a tuple, because each decision creates up to ten thousand of them.

    Attributes:
        phase, generation: as last reported.
        since_ns: when it entered the phase.
        present: its process is alive as far as known, and was not ordered to end.
        reachable: its node's stream is open, so that messages reach it.
        awaited: its agent is about to reconnect, or to send reports that it kept.
        leaving: its node drains.
        leave_by_ns: by when it must be out of the group, None if not leaving.
        spent: it cannot join another group; a new process replaces it once it has left this one.
        has_state: its loop continues in the next group, with the run's state in its memory.
    """

    worker_id: WorkerId
    node_id: NodeId
    phase: WorkerPhase
    generation: Generation
    since_ns: int
    present: bool = True
    reachable: bool = True
    awaited: bool = False
    leaving: bool = False
    leave_by_ns: int | None = None
    spent: bool = False
    has_state: bool = False


@dataclass(frozen=True)
class CurrentGroup:
    """The newest group.

    Attributes:
        members: by rank; empty before the first group.
        is_open: it was announced, and its members were not ordered to leave at once.
        leave_requested: its members were asked to leave at a boundary.
        saves: they must also save their state there.
        is_saving: and those that have not left yet are still doing so, without a stall.
        is_saved: a checkpoint was recorded since they were asked to leave.
        is_unsaved: the members of the group before should have been saved where they left, and were
            not; nor has a checkpoint been recorded since.
        stuck: why it can never continue, "" if it can.
        in_place: members that have left still have its state in memory, and continue with it.
        has_trained: all its members trained at some time.
        is_over: its members were notified of its end because one was lost, which may have
            reconnected since.
        anew_ns: since when its members are replaced by new processes, which all start together;
            None if they are not.
    """

    generation: Generation = 0
    members: tuple[WorkerId, ...] = ()
    is_open: bool = False
    leave_requested: bool = False
    saves: bool = False
    is_saving: bool = False
    is_saved: bool = False
    is_unsaved: bool = False
    stuck: str = ""
    in_place: bool = False
    has_trained: bool = False
    is_over: bool = False
    anew_ns: int | None = None


def decide(
    spec: JobSpec,
    current: CurrentGroup,
    candidates: Sequence[Candidate],
    now_ns: int,
    config: CoordinatorConfig,
) -> Decision[GroupPlan]:
    """Decide what happens to the group of one job.

    Args:
        spec: bounds and replica size.
        current: the newest group.
        candidates: every worker of the job that is known, in any order.
        now_ns: monotonic.
        config: grace periods.

    Returns:
        A plan; the reason of WAIT includes how many workers are missing.

    Guarantees:
        FORM has at least min and at most max members, in whole replicas, all present and
        reachable (test_membership: formed groups respect bounds).
        The order of `candidates` never matters (test_membership: order is irrelevant).
    """
    by_id = {c.worker_id: c for c in sorted(candidates, key=lambda c: c.worker_id)}
    if current.is_open:
        return _decide_open(spec, current, by_id, now_ns, config)
    return _decide_closed(spec, current, by_id, now_ns, config)


def choose(
    spec: JobSpec,
    current: CurrentGroup,
    by_id: dict[WorkerId, Candidate],
    *,
    interrupting: bool,
    with_leavers: bool = False,
) -> tuple[WorkerId, ...]:
    """Return the largest legal group: members first (by rank), then others by id; maybe empty.

    Args:
        spec: bounds and replica size.
        current: the newest group.
        by_id: every worker that is known.
        interrupting: also count members that form or train (they are interrupted for it).
        with_leavers: also count members that must leave.
    """
    members = set(current.members)
    order = [w for w in current.members if w in by_id]
    order += [w for w in by_id if w not in members]
    able = []
    for worker_id in order:
        candidate = by_id[worker_id]
        is_member = worker_id in members
        leaves = candidate.leaving and not (with_leavers and is_member)
        if not (candidate.present and candidate.reachable) or leaves:
            continue
        is_interrupted = interrupting and is_member
        is_free = candidate.phase in FORMABLE_PHASES and not candidate.spent
        if is_free or is_interrupted:
            able.append(worker_id)
    size = min(len(able), spec.max_workers) // spec.workers_per_replica * spec.workers_per_replica
    return tuple(able[:size]) if size >= spec.min_workers else ()


def _decide_open(
    spec: JobSpec,
    current: CurrentGroup,
    by_id: dict[WorkerId, Candidate],
    now_ns: int,
    config: CoordinatorConfig,
) -> Decision[GroupPlan]:
    """Decide on an open group: whether it is complete, broken, or should change."""
    members = [by_id[w] for w in current.members if w in by_id and by_id[w].present]
    strangers = [c for c in by_id.values() if c.present and c.worker_id not in current.members]
    lost = [w for w in current.members if w not in by_id or not by_id[w].present]
    overdue = [
        c.worker_id for c in members if c.leave_by_ns is not None and c.leave_by_ns <= now_ns
    ]
    staying = {worker_id: c for worker_id, c in by_id.items() if worker_id not in overdue}
    # If a group is replaced too early, reports of its members on the way are lost.
    awaited = [c.worker_id for c in members if c.awaited]
    if lost or current.is_over:
        why = f"lost {', '.join(lost)}" if lost else "its members were notified that it is over"
        if awaited:
            return Decision(
                GroupPlan(GroupAction.KEEP), f"{why}; waiting for a report of {', '.join(awaited)}"
            )
        return _replace_ended(spec, current, staying, "lost", why)
    if overdue:
        return _replace_ended(
            spec, current, staying, "drain", f"{', '.join(overdue)} must leave now"
        )
    # Whatever else is waited for, a member that must leave is cut off in time.
    wake = [c.leave_by_ns for c in members if c.leave_by_ns is not None]

    # A member that has not got the announcement yet still reports the previous generation.
    here = [c for c in members if c.generation == current.generation]
    broken = [c for c in here if c.phase is WorkerPhase.BROKEN]
    if broken:
        until = min(c.since_ns for c in broken) + ns(config.broken_grace_s)
        if awaited:
            why = f"the group broke; waiting for a report of {', '.join(awaited)}"
            return Decision(GroupPlan(GroupAction.KEEP), why, min(wake, default=None))
        if now_ns >= until:
            why = "the group broke, no member is lost"
            return _replace_ended(spec, current, by_id, "broken", why)
        return Decision(
            GroupPlan(GroupAction.KEEP),
            "the group broke, waiting for the cause",
            min([until, *wake]),
        )
    stuck_ns = _stuck_at_ns(members, here, config)
    if stuck_ns is not None and not awaited:
        if now_ns >= stuck_ns:
            return _replace_stuck(spec, current, by_id)
        wake.append(stuck_ns)

    if current.stuck:
        return _replace_ended(spec, current, by_id, "broken", current.stuck)

    left_out = _left_out(by_id, current.members)
    if left_out and not awaited:
        again = _choose_with_state(spec, current, by_id, interrupting=True)
        if not set(left_out).isdisjoint(again):
            back = ", ".join(w for w in left_out if w in again)
            why = f"{back} has a newer state than its members"
            return Decision(GroupPlan(GroupAction.FORM, again, "join"), why)

    wanted = choose(spec, current, by_id, interrupting=True)
    # A member that stays keeps the state; if none does, only saved state survives.
    saves = set(current.members).isdisjoint(wanted) if wanted else current.saves
    left = [c for c in here if c.phase is WorkerPhase.READY]
    if left:
        out = sum(1 for c in here if c.phase in FORMABLE_PHASES)
        is_saving = current.is_saving and saves
        until = min(c.since_ns for c in left) + _timeout_ns(current, is_saving, awaited, config)
        if out == len(members) or now_ns >= until:
            return _replace_out(spec, current, by_id, wanted)
        # Members that have left cannot save any more: with those, the next group saves.
        if current.saves is not saves and (current.saves or not current.in_place):
            return _request_leave(saves, min([until, *wake]))
        poll = [now_ns + ns(POLL_S)] if is_saving else []
        reason = f"{out} of {len(members)} members are at the boundary"
        return Decision(GroupPlan(GroupAction.KEEP), reason, min([until, *poll, *wake]))

    wake_ns = min(wake, default=None)
    silent = [c.worker_id for c in members if not c.reachable]
    if silent:
        return Decision(
            GroupPlan(GroupAction.KEEP), f"the node of {', '.join(silent)} does not answer", wake_ns
        )
    ends = any(c.phase is WorkerPhase.FINISHED for c in members)
    # A script that was notified saves, or goes on to train, until its node must leave.
    drains = any(c.leaving and c.leave_by_ns is not None for c in members)
    if spec.own_steps and not (ends or drains or any(_is_starting(c) for c in strangers)):
        joining = len(set(wanted) - set(current.members))
        if joining and any(c.spent for c in members):
            # It has no boundaries, so they could never join.
            return _replace(spec, current, by_id, "join", f"{joining} to join")
    forms = "" if current.has_trained else _forms(current, here)
    return _request(current, wanted, saves, wake_ns, forms=forms)


def _timeout_ns(
    current: CurrentGroup, is_saving: bool, awaited: Sequence[WorkerId], config: CoordinatorConfig
) -> int:
    """Return how long members that left a group wait for the others."""
    if is_saving:
        return ns(config.boundary_save_s)
    if current.leave_requested or current.saves or awaited:
        return ns(config.boundary_timeout_s)
    return ns(min(config.boundary_timeout_s, UNASKED_S))


def _forms(current: CurrentGroup, here: Sequence[Candidate]) -> str:
    """Return a phrase for how many members have joined, "" once all train."""
    trained = (WorkerPhase.TRAINING, WorkerPhase.FINISHED)
    if sum(1 for c in here if c.phase in trained) == len(current.members):
        return ""
    return forming(len(here), len(current.members))


def forming(count: int, size: int) -> str:
    """Return the phrase for a group that does not train completely yet."""
    return f"forming: {count} of {size} members are there"


def _request(
    current: CurrentGroup,
    wanted: tuple[WorkerId, ...],
    saves: bool,
    wake_ns: int | None,
    *,
    forms: str,
) -> Decision[GroupPlan]:
    """Decide whether a healthy group should change at its next boundary."""
    joining = len(set(wanted) - set(current.members))
    leaving = len(set(current.members) - set(wanted))
    if saves and current.is_unsaved:
        reason = "no member stays, and storage has not taken their state: they train on until then"
        return Decision(GroupPlan(GroupAction.KEEP), reason, wake_ns)
    if wanted and joining + leaving:
        reason = f"{joining} to join and {leaving} to leave at the next boundary"
        if current.leave_requested and current.saves is saves:
            return Decision(
                GroupPlan(GroupAction.KEEP), f"{forms}; {reason}" if forms else reason, wake_ns
            )
        cause = "drain" if leaving else "join"
        return Decision(GroupPlan(GroupAction.ASK, cause=cause, saves=saves), reason, wake_ns)
    if current.saves is not saves:
        return _request_leave(saves, wake_ns)
    return Decision(
        GroupPlan(GroupAction.KEEP), forms or f"{len(current.members)} workers", wake_ns
    )


def _request_leave(saves: bool, wake_ns: int | None) -> Decision[GroupPlan]:
    """Return a new request for the same boundary, with or without saving the state."""
    plan, reason = (
        GroupPlan(GroupAction.ASK, cause="drain", saves=True),
        "no member stays: it is saved first",
    )
    if not saves:
        plan, reason = (
            GroupPlan(GroupAction.ASK, cause="resume"),
            "goes on after all: nothing need be saved",
        )
    return Decision(plan, reason, wake_ns)


def _stuck_at_ns(
    members: Sequence[Candidate], here: Sequence[Candidate], config: CoordinatorConfig
) -> int | None:
    """Return when a group counts as hung in which all members form, None if any does not.

    One of them hangs. The others leave the group that is over, and join the next one.
    """
    if (
        not here
        or len(here) < len(members)
        or any(c.phase is not WorkerPhase.FORMING for c in here)
    ):
        return None
    return max(c.since_ns for c in here) + ns(config.form_timeout_s)


def _replace(
    spec: JobSpec,
    current: CurrentGroup,
    by_id: dict[WorkerId, Candidate],
    cause: str,
    why: str,
) -> Decision[GroupPlan]:
    """Replace a group that cannot continue: form the next one, or suspend if too few are left."""
    members = choose(spec, current, by_id, interrupting=True)
    return _replace_by(spec, current, by_id, members, cause, why)


def _replace_ended(
    spec: JobSpec,
    current: CurrentGroup,
    by_id: dict[WorkerId, Candidate],
    cause: str,
    why: str,
) -> Decision[GroupPlan]:
    """Replace a group that ended between two boundaries, by one with its state if that is alive."""
    members = _choose_with_state(spec, current, by_id, interrupting=True)
    holders = _to_wait_for(current, by_id, members)
    if holders:
        return Decision(GroupPlan(GroupAction.KEEP), f"{why}; {_waiting_for_state(holders)}")
    return _replace_by(spec, current, by_id, members, cause, why)


def _replace_by(
    spec: JobSpec,
    current: CurrentGroup,
    by_id: dict[WorkerId, Candidate],
    members: tuple[WorkerId, ...],
    cause: str,
    why: str,
) -> Decision[GroupPlan]:
    if not members:
        remaining = [c for c in by_id.values() if c.present and c.reachable and not c.leaving]
        count = sum(1 for c in remaining if c.phase is not WorkerPhase.STARTING)
        return Decision(
            GroupPlan(GroupAction.SUSPEND, cause=cause),
            f"{why}; {count} of {spec.min_workers} workers are left",
        )
    if cause == "join" and len(members) < len(current.members):
        cause = "drain"
    action = GroupAction.REPLACE if any(by_id[w].spent for w in members) else GroupAction.FORM
    return Decision(GroupPlan(action, members, cause), why)


def _replace_stuck(
    spec: JobSpec, current: CurrentGroup, by_id: dict[WorkerId, Candidate]
) -> Decision[GroupPlan]:
    """Replace a group in which all members form and none finishes: one of them hangs."""
    found = _replace_ended(spec, current, by_id, "broken", "no member has finished forming")
    return replace(found, value=replace(found.value, dumps_stacks=True))


def _replace_out(
    spec: JobSpec,
    current: CurrentGroup,
    by_id: dict[WorkerId, Candidate],
    wanted: tuple[WorkerId, ...],
) -> Decision[GroupPlan]:
    """Form the next group after members left at a boundary, with a member that has the state.

    If since the request all members with the state must leave, and have not saved it, they join
    once more: they pass it to others, or save it, before they leave at another boundary. So they do
    if storage has not taken it: others would begin from an older state, before these must go.
    """
    members = set(current.members)
    is_unsaved = bool(current.saves and not current.is_saved and wanted and spec.run_path)
    is_lost = is_unsaved or not current.saves
    if current.in_place and is_lost and members.isdisjoint(wanted):
        again = choose(spec, current, by_id, interrupting=True, with_leavers=True)
        if not members.isdisjoint(again):
            reason = "all that have the state are to leave"
            reason += ", and storage has not taken it" if is_unsaved else ""
            plan = GroupPlan(GroupAction.FORM, again, "drain", is_unsaved=is_unsaved)
            return Decision(plan, reason)
    return _replace(spec, current, by_id, "join", "the group ended at a step boundary")


def _choose_with_state(
    spec: JobSpec, current: CurrentGroup, by_id: dict[WorkerId, Candidate], *, interrupting: bool
) -> tuple[WorkerId, ...]:
    """Return the largest legal group, with the state of the run if that is possible now.

    Workers that have it are preferred like members, also those of an older group. If only workers
    on draining nodes have it, they join once more: they pass it on, or save it, before they
    leave at a boundary. Not other leavers, which cannot reach the others, or have no slot any more.
    """
    members = choose(spec, current, by_id, interrupting=interrupting)
    left_out = _left_out(by_id, members)
    if not left_out:
        return members
    able = {w: c for w, c in by_id.items() if not c.leaving or c.leave_by_ns is not None}
    others = [w for w in current.members if w not in left_out]
    waiting = [w for w in left_out if w in current.members or by_id[w].phase in FORMABLE_PHASES]
    preferred = replace(current, members=(*waiting, *others))
    return choose(spec, preferred, able, interrupting=interrupting, with_leavers=True)


def _left_out(by_id: dict[WorkerId, Candidate], members: Sequence[WorkerId]) -> list[WorkerId]:
    """Return the living workers with the state of the run, if none of them is in `members`.

    A group of those would begin from an older state.
    """
    if not members or any(by_id[worker_id].has_state for worker_id in members):
        return []
    return [w for w, c in by_id.items() if c.has_state and c.present and not c.spent]


def _to_wait_for(
    current: CurrentGroup, by_id: dict[WorkerId, Candidate], members: Sequence[WorkerId]
) -> list[WorkerId]:
    """Return those of `_left_out` that must be awaited: silent, or in a group that is over."""
    interrupted = current.members if current.is_open else ()  # A new group takes them out of it.
    return [
        w
        for w in _left_out(by_id, members)
        if not by_id[w].reachable or (by_id[w].phase in BUSY_PHASES and w not in interrupted)
    ]


def _must_be_awaited(
    current: CurrentGroup, by_id: dict[WorkerId, Candidate], members: Sequence[WorkerId]
) -> list[WorkerId]:
    """Return the workers without which no group of `members` should form now.

    Those may have the newest state. Each will come, or is given up within a time of its own.
    """
    away = [w for w in current.members if w in by_id and by_id[w].awaited]
    found = [w for w in away if by_id[w].present and not by_id[w].reachable]
    return found or _to_wait_for(current, by_id, members)


def _waiting_for_state(holders: Sequence[WorkerId]) -> str:
    return f"waiting for {', '.join(holders)} with the newest state"


def _decide_closed(
    spec: JobSpec,
    current: CurrentGroup,
    by_id: dict[WorkerId, Candidate],
    now_ns: int,
    config: CoordinatorConfig,
) -> Decision[GroupPlan]:
    """Decide without an open group: form one as soon as enough workers wait for it."""
    members = _choose_with_state(spec, current, by_id, interrupting=False)
    here = [c for c in by_id.values() if c.present and not c.spent]
    ready = [c for c in here if c.reachable and c.phase in FORMABLE_PHASES]
    busy = [c for c in here if c.phase in BUSY_PHASES]
    starting = sum(1 for c in by_id.values() if c.present and _is_starting(c))
    if not members:
        state = f"{len(ready)} of {spec.min_workers} workers ready, {starting} starting"
        if busy:
            state += f", {len(busy)} leaving the old group"
        away = sum(1 for c in by_id.values() if c.present and not c.reachable)
        if away:
            state += f", {away} on nodes that do not answer"
        return Decision(GroupPlan(GroupAction.WAIT), state)
    holders = _must_be_awaited(current, by_id, members)
    if holders:
        state = f"{len(members)} workers ready, {_waiting_for_state(holders)}"
        return Decision(GroupPlan(GroupAction.WAIT), state)
    # With a state to resume, others join at a boundary, which costs less than to wait for them.
    # If all start over, a group without them would have to end to let them in.
    until = None
    if current.anew_ns is not None:
        until = current.anew_ns + ns(max(config.start_timeout_s, ANEW_S))
    elif current.generation == 0 and not (spec.resumes or spec.resume_from):
        until = min(c.since_ns for c in ready) + ns(config.start_timeout_s)
    if len(members) < spec.max_workers and starting and until is not None and now_ns < until:
        return Decision(
            GroupPlan(GroupAction.WAIT),
            f"{len(members)} of {spec.max_workers} workers ready, {starting} starting",
            until,
        )
    cause = "start" if current.generation == 0 else "resume"
    return Decision(GroupPlan(GroupAction.FORM, members, cause), f"{len(members)} workers ready")


def _is_starting(candidate: Candidate) -> bool:
    """Return whether this worker, or the replacement of its process, will become ready."""
    return candidate.phase is WorkerPhase.STARTING or candidate.spent
