"""The coordinator's memory of jobs and their workers, and the state that all of it makes up.

Rule: this module keeps books; decisions are policies, and what follows from them is in
`settle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elastic.core.config import CoordinatorConfig, JobSpec
from elastic.core.events.coordinator import (
    FORMER_MAX,
    CoordinatorEffect,
    FormerWorker,
    JobRecord,
    RankFailure,
)
from elastic.core.machine.copy_book import CopyBook
from elastic.core.machine.event_history import note
from elastic.core.machine.link_book import LinkBook
from elastic.core.machine.nodes import LIVE, PRESENT, NodeBook, NodeState
from elastic.core.machine.transitions import JOB, check_move
from elastic.core.policy import goodput
from elastic.core.policy.demands import Allocation
from elastic.core.policy.failure import FailureHistory
from elastic.core.policy.goodput import Account, Ledger
from elastic.core.policy.hang import MainThreadState
from elastic.core.policy.membership import Candidate, CurrentGroup
from elastic.core.policy.ranks import RankPlace, assign_ranks
from elastic.core.telemetry import START, Telemetry
from elastic.core.view import JobView, WorkerView
from elastic.core.world import (
    ENDED,
    NO_GENERATION,
    CheckpointRecord,
    ExitCause,
    Failure,
    Generation,
    Group,
    JobId,
    JobPhase,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)

if TYPE_CHECKING:
    from elastic.core.machine.report_coalescing import PendingReports

RANK_FAILURES_MAX = 16
"""Of a job: each may have a traceback of 32,000 characters, and the record is written whole."""


@dataclass
class WorkerState:
    """One worker as the coordinator knows it.

    Attributes:
        stop_cause: set once it was told to end; what its exit will then count as.
        sight: what it said of its main thread last, None if it never had anything to say.
        lingers_since_ns: it is still in a group that goes on without it; None if it is not.
        reported_ns: when its agent was first told of the newest group, or to leave, in this
            coordinator's life; earlier than `announced_ns` while its agent is away, -1 for never.
        shown_ns: when its stacks were asked for because it was late, -1 for never.
        account: where its time goes.
        telemetry: how its newest steps in the newest group went.
    """

    report: WorkerReport
    node_id: NodeId
    since_ns: int
    account: Account
    steps: int = 0
    stop_cause: ExitCause | None = None
    sight: MainThreadState | None = None
    lingers_since_ns: int | None = None
    reported_ns: int = -1
    shown_ns: int = -1
    telemetry: Telemetry = field(default_factory=Telemetry)

    def update(self, report: WorkerReport, now_ns: int) -> None:
        """Take over a newer report."""
        moved = (report.phase, report.generation) != (self.report.phase, self.report.generation)
        if moved:
            self.since_ns = now_ns
        # An exception once told stays told: the agent knows only how the process ended.
        self.report = replace(report, failure=report.failure or self.report.failure)


@dataclass
class JobState:
    """One job.

    Attributes:
        is_open: the members of `group` were announced and not told to leave at once.
        asked: they were asked to leave at a boundary.
        is_save_requested: and to save their state there, because no member goes on with it.
        announced_ns: when `group` was announced, or told to leave, in this coordinator's life.
        training_since_ns: when the last member of `group` began to train, None before.
        waits_for: what keeps the next group from forming, "" while there is one.
        restart_at_ns: no worker is started before (back-off).
        wake_ns: when this job must be looked at again.
        first_steps: wall clock at the end of each member's first step in this generation.
        holders: members of `group` that were in a group that committed a step; empty after a
            restart of the coordinator.
        finished: what the train function returned, of each member that finished; outlives it.
        rank_failures, failed_in: what members have raised, and in which generation.
        failure_generation, loss_generation: the newest that was charged for a failure, a loss.
        save_request: of the newest wish for a checkpoint that did not come true yet, 0 for none.
        preemptions: how many nodes an announced drain took from its groups; a budget of its own.
        saved_before_ns: when a checkpoint was last wished for because its group needs who leaves.
        anew_ns: since when members of the newest group are replaced by new processes, which all
            begin together; None if they are not.
        has_news_of_leavers: its members were not told yet of a node of theirs that is to leave.
        stuck: why the newest group will never go on, "" if it may.
        ends_announced: the newest group that heard of its end before the next one was worked out.
        hung: members that are about to be killed as hung, and since when their stacks are written.
        works: what a member does that the others have waited for, for long; for people.
        placed: the places of a group, worked out once.
        bounds: (min, max) workers that a user set after the submission, None for those of the spec.
        paused: a user wants it to hold no workers.
        stopping: why it ends once it holds none, "" if it need not; it is paused, too.
        hurries: its workers are to end at once, whatever their scripts have to do.
        yields_to: the job for which it is to leave its slots, as the queue has it, "" for none.
        pause_request: number of the wish for a checkpoint before it holds no workers, 0 for none.
        is_saved: that wish came true.
        releases_all: since then its group was asked to leave, and no other one is formed.
        release_deadline_ns: until when it has time for a checkpoint, then for a boundary; None
            before.
        request_again_ns: a pause that is late does not wish for a checkpoint again before.
        preempted_by: the job that it gave way to, "" once it trains again.
        submitter: by which token or certificate, "" if users are not told from each other.
        passed_over_until_ns: it does not give way before, because it could not be saved when it
            was to.
        micro_batches: that its steps are shared out in, as its members said last in this
            coordinator's life; 0 while it is not known.
        reported: (generation, index) of the newest metrics of this coordinator's life.
        yields: workers that it gives back for another job, as the queue has it.
        copies: where a copy of its state lies, or is to lie.
        links: which of its nodes do not reach each other.
        wave: what its workers say one after the other at the moment, None for nothing.
        unix_ahead_ns: the wall clock less the machine's, at the start; None if not known.
        ledger: where the time of its workers went.
        paused_ns: since when training stands still for another group, None while it does not.
        lost: members that went meanwhile, and how; for people.
        former: workers that are gone, the newest of them.
    """

    spec: JobSpec
    sequence: int
    phase: JobPhase
    since_ns: int
    generation: Generation = NO_GENERATION
    group: Group | None = None
    is_open: bool = False
    asked: bool = False
    is_save_requested: bool = False
    anew_ns: int | None = None
    announced_ns: int = 0
    training_since_ns: int | None = None
    workers: dict[WorkerId, WorkerState] = field(default_factory=dict)
    history: FailureHistory = field(default_factory=FailureHistory)
    checkpoints: tuple[CheckpointRecord, ...] = ()
    reason: str = ""
    waits_for: str = ""
    failure: Failure | None = None
    failed_worker: str = ""
    rank_failures: tuple[RankFailure, ...] = ()
    failed_in: Generation = NO_GENERATION
    failure_generation: Generation = NO_GENERATION
    loss_generation: Generation = NO_GENERATION
    result: str = ""
    metrics: str = ""
    reported: tuple[Generation, int] = (NO_GENERATION, -1)
    restart_at_ns: int = 0
    wake_ns: int | None = None
    first_steps: dict[WorkerId, int] = field(default_factory=dict)
    holders: frozenset[WorkerId] = frozenset()
    finished: dict[WorkerId, str] = field(default_factory=dict)
    stuck: str = ""
    ends_announced: Generation = NO_GENERATION
    hung: dict[WorkerId, int] = field(default_factory=dict)
    works: str = ""
    placed: tuple[Group, tuple[RankPlace, ...]] | None = None
    save_request: int = 0
    preemptions: int = 0
    saved_before_ns: int | None = None
    bounds: tuple[int, int] | None = None
    paused: bool = False
    stopping: str = ""
    hurries: bool = False
    pause_request: int = 0
    is_saved: bool = False
    releases_all: bool = False
    yields_to: str = ""
    release_deadline_ns: int | None = None
    request_again_ns: int = 0
    preempted_by: str = ""
    submitter: str = ""
    passed_over_until_ns: int = 0
    micro_batches: int = 0
    yields: frozenset[WorkerId] = frozenset()
    copies: CopyBook = field(default_factory=CopyBook)
    links: LinkBook = field(default_factory=LinkBook)
    has_news_of_leavers: bool = False
    wave: PendingReports | None = None
    unix_ahead_ns: int | None = None
    ledger: Ledger = field(default_factory=Ledger)
    paused_ns: int | None = None
    lost: list[str] = field(default_factory=list)
    former: tuple[FormerWorker, ...] = ()

    @property
    def limits(self) -> JobSpec:
        """Return the spec with the bounds that hold now; what workers are given is the spec."""
        if self.bounds is None:
            return self.spec
        low, high = self.bounds
        return replace(self.spec, min_workers=low, max_workers=high)

    @property
    def job_id(self) -> JobId:
        """Return the job's id."""
        return self.spec.job_id

    def has_ended(self) -> bool:
        """Return whether the outcome stands; workers may still be on their way out."""
        return self.phase in ENDED

    def move(self, phase: JobPhase, now_ns: int) -> None:
        """Enter a phase."""
        if phase is not self.phase:
            check_move(JOB, f"job {self.job_id}", self.phase, phase)
            self.phase = phase
            if phase is JobPhase.PAUSED:
                self.paused_ns, self.lost = None, []
            self.since_ns = now_ns

    def member_ids(self) -> tuple[WorkerId, ...]:
        """Return the newest group's members by rank."""
        return self.group.worker_ids() if self.group else ()

    def rank_of(self, worker_id: WorkerId) -> int:
        """Return the worker's rank in the newest group, -1 if it has none."""
        return self.group.ranks.get(worker_id, -1) if self.group else -1

    def is_member(self, worker_id: WorkerId) -> bool:
        """Return whether the worker is in the newest group."""
        return self.group is not None and worker_id in self.group.ranks

    def places(self) -> tuple[RankPlace, ...]:
        """Return the places of the newest group's members, by rank."""
        group = self.group
        if group is None:
            return ()
        if self.placed is None or self.placed[0] is not group:
            node_of = {m.worker_id: m.node_id for m in group.members}
            self.placed = group, assign_ranks(group.worker_ids(), node_of, group.worker_ids())
        return self.placed[1]

    def current(self) -> CurrentGroup:
        """Return the newest group as the membership policy sees it."""
        members = self.member_ids()
        return CurrentGroup(
            self.generation,
            members,
            self.is_open,
            self.asked,
            self.is_save_requested,
            stuck=self.stuck,
            in_place=self.is_in_place(),
            has_trained=self.training_since_ns is not None,
            is_over=self.is_end_announced(),
            anew_ns=self.anew_ns,
        )

    def is_end_announced(self) -> bool:
        """Return whether members of the newest group heard that it is over, before the next one."""
        return self.is_open and self.ends_announced == self.generation

    def is_in_place(self) -> bool:
        """Return whether its group trains in a loop that newcomers can enter."""
        if not self.is_open:
            return False
        members = (self.workers.get(worker_id) for worker_id in self.member_ids())
        return any(w is not None and w.report.in_place for w in members)

    def candidates(self, book: NodeBook) -> dict[WorkerId, Candidate]:
        """Return all workers as the membership policy sees them."""
        found, nodes = {}, book.nodes
        gives_some, by_ns = self.must_release_workers() or bool(self.yields), self._leave_by_ns()
        for worker_id, worker in self.workers.items():
            node, report = nodes[worker.node_id], worker.report
            is_out = node.draining or worker.node_id in self.links.out
            leaves = is_out or (gives_some and self.gives_back(worker_id))
            found[worker_id] = Candidate(
                worker_id,
                worker.node_id,
                report.phase,
                report.generation,
                worker.since_ns,
                present=worker.stop_cause is None and node.phase in PRESENT,
                reachable=node.phase in LIVE,
                awaited=node.is_awaited(),
                leaving=leaves,
                leave_by_ns=node.leave_by_ns if node.draining else by_ns,
                spent=report.spent,
            )
        return found

    def is_to_leave(self, worker: WorkerState, node: NodeState) -> bool:
        """Return whether a worker can be in no group from now on, for the time being at least."""
        is_out = node.draining or worker.node_id in self.links.out
        return is_out or self.gives_back(worker.report.worker_id)

    def gives_back(self, worker_id: WorkerId) -> bool:
        """Return whether the worker is to leave for another job, or because the job pauses."""
        rests = self.must_release_workers() and (self.releases_all or not self.is_open)
        return rests or worker_id in self.yields

    def must_release_workers(self) -> bool:
        """Return whether it is to hold no workers: a user says so, or another job comes first."""
        return self.paused or bool(self.yields_to)

    def _leave_by_ns(self) -> int | None:
        """Return when members that were asked to make room are cut off.

        Never before there is a checkpoint that the job goes on from.
        """
        is_bounded = self.releases_all and self.yields_to and self.checkpoints
        return self.release_deadline_ns if is_bounded else None

    def is_late(self, now_ns: int) -> bool:
        """Return whether it pauses, and holds its workers for longer than who gives way may."""
        due_ns = self.release_deadline_ns
        return self.paused and self.is_open and due_ns is not None and now_ns >= due_ns

    def forget_rest(self) -> None:
        """How far it came on the way to rest does not count for the next time."""
        self.pause_request, self.is_saved, self.releases_all = 0, False, False
        self.release_deadline_ns, self.request_again_ns = None, 0

    def latest_checkpoint(self) -> str:
        """Return the path of the newest reported checkpoint that is recorded, "" for none.

        Automatic ones are the step engine's, which finds them by itself: what the train function
        is called with must be what it wrote. Before there is one, a job that was resumed goes on
        from where it was submitted to.
        """
        reported = (c.path for c in reversed(self.checkpoints) if not c.automatic)
        return next(reported, self.spec.resume_from)

    def latest_saved(self) -> str:
        """Return the path of the newest automatic checkpoint that is recorded, "" for none."""
        return next((c.path for c in reversed(self.checkpoints) if c.automatic), "")

    def note_failure(self, rank: int, failure: Failure) -> bool:
        """Keep what a member of the present group raised; return whether that is news."""
        if self.failed_in != self.generation:
            self.rank_failures, self.failed_in = (), self.generation
        is_known = any(one.rank == rank for one in self.rank_failures)
        if rank < 0 or is_known or len(self.rank_failures) == RANK_FAILURES_MAX:
            return False
        self.rank_failures = (*self.rank_failures, RankFailure(rank, failure))
        return True

    def record(self) -> JobRecord:
        """Return what must survive the coordinator."""
        ahead_ns = self.unix_ahead_ns
        return JobRecord(
            spec=self.spec,
            phase=self.phase,
            generation=self.generation,
            group=self.group,
            failures=self.history.failures,
            losses=self.history.losses,
            preemptions=self.preemptions,
            checkpoints=self.checkpoints,
            reason=self.reason,
            failure=self.failure,
            failed_worker=self.failed_worker,
            rank_failures=self.rank_failures,
            result=self.result,
            metrics=self.metrics,
            sequence=self.sequence,
            min_workers=self.bounds[0] if self.bounds else 0,
            max_workers=self.bounds[1] if self.bounds else 0,
            paused=self.paused,
            stopping=self.stopping,
            preempted_by=self.preempted_by,
            submitter=self.submitter,
            is_save_requested=self.is_save_requested,
            leaves_for=self.yields_to if self.releases_all and self.is_open else "",
            since_unix_ns=0 if ahead_ns is None else self.since_ns + ahead_ns,
            goodput=self.ledger.total(),
            former=self.former,
        )

    def view(self, now_ns: int) -> JobView:
        """Return what status shows; an ended job shows STOPPING until its workers are gone."""
        accounts = (worker.account for worker in self.workers.values())
        known, unreported_ns = self.ledger.at(accounts, now_ns)
        record = replace(self.record(), goodput=known)
        reason = self.reason
        if self.has_ended() and self.workers:
            reason = f"{reason} ({self.phase.value}, {len(self.workers)} workers are ending)"
            record = replace(record, phase=JobPhase.STOPPING)
        elif self.works and self.is_open:
            reason = f"{reason}; {self.works}" if reason else self.works
        workers = tuple(
            WorkerView(
                w.report, w.node_id, self.rank_of(worker_id), w.since_ns, w.steps, w.telemetry
            )
            for worker_id, w in sorted(self.workers.items())
        )
        first = self.group.members[0].node_id if self.is_open and self.group else NodeId("")
        copies = self.copies.view(first)
        return JobView(record, reason, self.since_ns, workers, copies, unreported_ns)


@dataclass
class ClusterState:
    """All that the coordinator's machine knows, and the effects that the current step made.

    Attributes:
        owner: the job of each worker in the books.
        dirty: jobs that must be looked at before the step ends, in order of first mention.
        term, history: which leadership of which store this is; see `Welcome`.
        first_serial: workers of a node are numbered from here on; a later term begins higher, so
            that an id is not given again by a coordinator that has forgotten it.
        polls: jobs whose members wait for each other, and when to look at each again.
        probes: nodes that were asked for a sign of life and have not given one: when, how long.
        num_probes: asked so far.
        secret: the keys of copies are made of it.
        first_save, num_saves: wishes for checkpoints are numbered from there on; so many so far.
        check_by_ns: when the machine has asked to be called for a look or a probe, None for never.
        num_checked: of the sessions, in this round of checks.
        hold_until_ns: after a restart no worker is started before, so that agents can report
            what runs already.
        grants: what the queue has for each job; a job that is not in it has no rival.
        replan: something changed that the queue depends on.
        replan_at_ns: when time alone changes what the queue says, None for never.
        unix_ahead_ns: the wall clock less the machine's, at the start; None if not known.
    """

    config: CoordinatorConfig
    name: str
    book: NodeBook = field(default_factory=NodeBook)
    jobs: dict[JobId, JobState] = field(default_factory=dict)
    owner: dict[WorkerId, JobId] = field(default_factory=dict)
    dirty: dict[JobId, None] = field(default_factory=dict)
    polls: dict[JobId, int] = field(default_factory=dict)
    probes: dict[NodeId, tuple[int, int]] = field(default_factory=dict)
    num_probes: int = 0
    secret: bytes = field(default=b"", repr=False)
    first_save: int = 0
    num_saves: int = 0
    check_by_ns: int | None = None
    num_checked: int = 0
    sequence: int = 0
    term: int = 1
    history: str = ""
    first_serial: int = 0
    hold_until_ns: int = 0
    grants: dict[JobId, Allocation] = field(default_factory=dict)
    replan: bool = False
    replan_at_ns: int | None = None
    unix_ahead_ns: int | None = None
    now_ns: int = 0
    effects: list[CoordinatorEffect] = field(default_factory=list)

    def do(self, *effects: CoordinatorEffect) -> None:
        """Ask for effects, in this order."""
        self.effects.extend(effects)

    def note(self, name: str, job_id: str = "", **fields: object) -> None:
        """Ask for a line in the event log."""
        self.do(note(name, job_id, **fields))

    def touch(self, job: JobState) -> None:
        """Look at this job before the step ends."""
        self.dirty[job.job_id] = None

    def touch_active(self) -> None:
        """Look at every job that has not ended: capacity changed."""
        self.replan = True
        for job in self.active():
            self.touch(job)

    def active(self) -> Iterable[JobState]:
        """Return the jobs that have not ended, oldest first."""
        return [job for job in self.jobs.values() if not job.has_ended()]

    def node_of(self, worker: WorkerState) -> NodeState:
        """Return the node that a worker runs on."""
        return self.book.nodes[worker.node_id]

    def job_of(self, worker_id: WorkerId) -> JobState | None:
        """Return the job that a worker in the books belongs to."""
        job_id = self.owner.get(worker_id)
        return self.jobs[job_id] if job_id is not None else None

    def add_worker(self, job: JobState, state: NodeState, report: WorkerReport) -> WorkerState:
        """Enter a worker into the books."""
        account = Account(START, self.now_ns)
        if report.phase is not WorkerPhase.STARTING:
            account.told = None
        worker = WorkerState(report, state.node.node_id, self.now_ns, account)
        job.workers[report.worker_id] = worker
        self.charge(job, worker)
        self.owner[report.worker_id] = job.job_id
        self.replan = True
        state.held[report.worker_id] = job.spec.resources_per_worker
        state.saw_worker(report.worker_id)
        return worker

    def charge(self, job: JobState, worker: WorkerState) -> None:
        """Account for what a worker did until now; to be called when it does something else."""
        node = self.book.nodes.get(worker.node_id)
        now = goodput.Situation(
            phase=worker.report.phase,
            is_leaving=worker.stop_cause is not None or (node is not None and node.draining),
            has_trained=worker.account.has_trained,
            has_group=job.is_open,
        )
        job.ledger.move(worker.account, goodput.category(now), self.now_ns)

    def remove_worker(self, job: JobState, worker_id: WorkerId) -> WorkerState:
        """Strike a worker from the books."""
        worker = job.workers.pop(worker_id)
        is_lost = worker.stop_cause is None and not job.has_ended()
        gone = FormerWorker(worker_id, job.rank_of(worker_id), worker.report.generation)
        job.former = (*job.former, gone)[-FORMER_MAX:]
        job.ledger.close(worker.account, self.now_ns, is_lost=is_lost)
        self.owner.pop(worker_id, None)
        node = self.book.nodes.get(worker.node_id)
        if node is not None:
            node.held.pop(worker_id, None)
        self.touch(job)
        self.touch_active()
        return worker
