"""Restores a job's state from the journal, for a new coordinator.

Rule: what is not in a record (`JobState.record`) is unknown: agents report the workers, and times
count from now.
"""

from __future__ import annotations

from elastic.core.facts import NO_GENERATION, JobPhase
from elastic.core.machine.job_parts import (
    Growth,
    JobOutcome,
    JobRelease,
    JobReports,
    JobSize,
    JobSubmission,
    LeavingNodes,
    NewestGroup,
)
from elastic.core.machine.jobs import JobState
from elastic.core.machine.link_book import LinkBook
from elastic.core.machine.transitions import GroupPhase, ReleasePhase
from elastic.core.policy.failure import FailureHistory
from elastic.core.policy.goodput import Ledger
from elastic.core.records import JobRecord


def restore(record: JobRecord, now_ns: int, unix_ahead_ns: int | None = None) -> JobState:
    """Return the state for a journal record; its workers are not known yet.

    If the wall clock is unknown, now or to the writer of the record, its phase begins now.
    """
    is_known = unix_ahead_ns is not None and record.since_unix_ns
    # That clock may have been set back meanwhile.
    since_ns = min(now_ns, record.since_unix_ns - (unix_ahead_ns or 0)) if is_known else now_ns
    # A group is replaced only after its losses were charged: more of them may still be reported.
    is_open = record.phase is JobPhase.RUNNING
    leaves = is_open and record.is_save_requested
    charged = max(NO_GENERATION, record.generation - 1) if is_open else record.generation
    pauses = record.paused or bool(record.leaves_for)
    group_phase = GroupPhase.OPEN if is_open else GroupPhase.NONE
    reports = JobReports(checkpoints=record.checkpoints, metrics=record.metrics)
    return JobState(
        spec=record.spec,
        submission=JobSubmission(record.sequence, record.submitter),
        phase=record.phase,
        since_ns=since_ns,
        newest=NewestGroup(
            group=record.group,
            phase=GroupPhase.SAVING if leaves else group_phase,
            announced_ns=now_ns,
            # It may be the one that they were asked for: then they save once more, where a
            # checkpoint from before the request would lose steps.
            leavers=LeavingNodes(saved_before=reports.automatic_of(record.generation)),
        ),
        release=JobRelease(
            phase=ReleasePhase.LEAVING if leaves and pauses else ReleasePhase.NONE,
            paused=record.paused,
            stopping=record.stopping,
            yields_to=record.leaves_for if leaves else "",
            preempted_by=record.preempted_by,
        ),
        outcome=JobOutcome(
            failure=record.failure,
            failed_worker=record.failed_worker,
            rank_failures=record.rank_failures,
            failed_in=record.generation,
            failure_generation=charged if record.failures else NO_GENERATION,
            loss_generation=charged if record.losses else NO_GENERATION,
            history=FailureHistory(record.failures, record.losses),
            preemptions=record.preemptions,
            result=record.result,
            former=record.former,
        ),
        reports=reports,
        reason=record.reason,
        size=JobSize(
            record.bounds if record.min_workers or record.max_workers else None,
            Growth(len(record.group.members) if record.group else 0),
        ),
        node_links=LinkBook(nowhere_ns=now_ns),
        ledger=Ledger([*record.goodput.times()]),
    )
