"""What a user means by a job's name, and whose output belongs to a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.coord.lookup import WorkerOrigin, find_job, origins_of
from elastic.core.config import JobSpec
from elastic.core.facts import (
    Entry,
    EntryKind,
    Group,
    JobId,
    JobPhase,
    Member,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.records import JobRecord
from elastic.core.view import ClusterView, JobView, WorkerView
from elastic.errors import NotFound


def job(job_id: str, name: str, phase: JobPhase = JobPhase.STOPPED) -> JobView:
    entry = Entry(EntryKind.FUNCTION, "train")
    spec = JobSpec(job_id=JobId(job_id), name=name, entry=entry, min_workers=1, max_workers=1)
    return JobView(JobRecord(spec, phase), "", 0, ())


JOBS = ClusterView(
    0,
    (),
    (
        job("j-aaaaaa", "digits"),
        job("j-aaaabb", "digits", JobPhase.RUNNING),
        job("j-cccccc", "digits"),
        job("j-dddddd", "gpt"),
        job("j-eeeeee", "gpt"),
        job("j-ffffff", "j-cccccc"),
    ),
)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("j-aaaaaa", "j-aaaaaa"),
        ("digits", "j-aaaabb"),
        ("gpt", "j-eeeeee"),
        ("j-cccccc", "j-cccccc"),
        ("j-d", "j-dddddd"),
        ("j-aaaab", "j-aaaabb"),
    ],
)
def test_an_id_beats_a_name_and_a_name_means_the_job_that_runs_else_the_newest(
    wanted: str, found: str
) -> None:
    assert find_job(JOBS, wanted).record.spec.job_id == found


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("j-aaaa", "begins several job ids: j-aaaaaa (digits), j-aaaabb (digits)"),
        ("j-", "no job has the id or name 'j-'"),
        ("", "no job has the id or name ''"),
        ("nothing", "known jobs: j-aaaaaa (digits)"),
    ],
)
def test_what_names_no_job_or_several_is_refused_with_what_there_is(wanted: str, says: str) -> None:
    with pytest.raises(NotFound) as refused:
        find_job(JOBS, wanted)
    assert says in str(refused.value)


def test_output_comes_from_workers_of_now_and_from_those_that_are_gone() -> None:
    def worker(worker_id: str, rank: int, *, pid: int = 1) -> WorkerView:
        phase = WorkerPhase.READY if pid else WorkerPhase.STARTING
        report = WorkerReport(WorkerId(worker_id), JobId("j"), phase, 2, pid=pid)
        return WorkerView(report, NodeId("n1"), rank, 0)

    members = (
        Member(WorkerId("n1/1"), NodeId("n1"), 0, ""),
        Member(WorkerId("n2/1"), NodeId("n2"), 1, ""),
    )
    shown = job("j", "j")
    record = replace(
        shown.record, group=Group(2, members), generation=2, failed_worker="n3/1 (rank 2)"
    )
    workers = (worker("n1/1", 0), worker("n1/2", -1), worker("n1/3", -1, pid=0))
    shown = replace(shown, record=record, workers=workers)
    found = origins_of(shown, frozenset())
    assert [(o.worker_id, o.node_id, o.rank) for o in found] == [
        ("n1/1", "n1", 0),
        ("n2/1", "n2", 1),
        ("n1/2", "n1", -1),
        ("n3/1", "n3", -1),
    ]
    assert origins_of(shown, frozenset([1])) == (
        WorkerOrigin(WorkerId("n2/1"), NodeId("n2"), 1, 2),
    )
