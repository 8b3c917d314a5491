"""The coordinator's state of jobs and their workers, and the whole cluster state.

Rule: this module only records; decisions are in policies, their consequences in `reconcile`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elastic.core.config import CoordinatorConfig, JobSpec
from elastic.core.events.coordinator import CoordinatorEffect, Persist, SendAgent
from elastic.core.facts import (
    ENDED,
    NO_GENERATION,
    ExitCause,
    Generation,
    JobId,
    JobPhase,
    Member,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.machine.cluster_parts import ProbeBook, QueuePlan, Term
from elastic.core.machine.copy_book import CopyBook
from elastic.core.machine.event_history import note
from elastic.core.machine.job_parts import (
    Interruption,
    JobOutcome,
    JobRelease,
    JobReports,
    JobSize,
    JobSubmission,
    NewestGroup,
)
from elastic.core.machine.link_book import LinkBook
from elastic.core.machine.nodes import LIVE, PRESENT, NodeBook, NodeState
from elastic.core.machine.transitions import JOB, GroupPhase, check_move
from elastic.core.messages import CoordinatorMessage
from elastic.core.policy import goodput
from elastic.core.policy.goodput import Account, Ledger
from elastic.core.policy.hang import MainThreadState
from elastic.core.policy.membership import Candidate, CurrentGroup
from elastic.core.policy.ranks import RankPlace, assign_ranks
from elastic.core.records import FORMER_MAX, FormerWorker, JobRecord
from elastic.core.telemetry import START, Telemetry, first_reported
from elastic.core.view import JobSample, JobView, WorkerView


@dataclass
class WorkerState:
    """One worker as the coordinator knows it.

    Attributes:
        stop_cause: set once it was ordered to end; the cause to record for its exit.
        main_thread: last report of its main thread, None if there was none.
        lingers_since_ns: since when it stays in a group that continues without it; None if not.
        group_sent_ns: when the newest group, or the order to leave, was first sent to its agent in
            this term; earlier than `announced_ns` while its agent is away, -1 for never.
        shown_ns: when its stacks were requested because it was late, -1 for never.
        account: its time by category.
        telemetry: of its newest steps in the newest group.
        measured_ns: when that came, 0 for never.
    """

    report: WorkerReport
    node_id: NodeId
    since_ns: int
    account: Account
    steps: int = 0
    stop_cause: ExitCause | None = None
    main_thread: MainThreadState | None = None
    lingers_since_ns: int | None = None
    group_sent_ns: int = -1
    shown_ns: int = -1
    telemetry: Telemetry = field(default_factory=Telemetry)
    measured_ns: int = 0

    def update(self, report: WorkerReport, now_ns: int) -> None:
        moved = (report.phase, report.generation) != (self.report.phase, self.report.generation)
        if moved:
            self.since_ns = now_ns
        # A reported exception is kept: the agent knows only how the process ended.
        self.report = replace(report, failure=report.failure or self.report.failure)

    def has_finished(self, generation: Generation) -> bool:
        """Return whether it has finished as a member of this group."""
        return self.report.phase is WorkerPhase.FINISHED and self.report.generation == generation


@dataclass
class JobState:
    """One job.

    Attributes:
        reason: why it is in its phase; for people.
        waits_for: what keeps the next group from forming, "" while there is a group.
        wake_ns: when this job must be evaluated again.
        copies: which nodes hold, or should hold, copies of its state.
        node_links: which of its nodes do not reach each other.
        ledger: the time of its workers by category.
    """

    spec: JobSpec
    submission: JobSubmission
    phase: JobPhase
    since_ns: int
    reason: str = ""
    waits_for: str = ""
    wake_ns: int | None = None
    size: JobSize = field(default_factory=JobSize)
    newest: NewestGroup = field(default_factory=NewestGroup)
    release: JobRelease = field(default_factory=JobRelease)
    outcome: JobOutcome = field(default_factory=JobOutcome)
    reports: JobReports = field(default_factory=JobReports)
    workers: dict[WorkerId, WorkerState] = field(default_factory=dict)
    copies: CopyBook = field(default_factory=CopyBook)
    node_links: LinkBook = field(default_factory=LinkBook)
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def generation(self) -> Generation:
        """Return the number of the newest group, `NO_GENERATION` before the first one."""
        return self.newest.group.generation if self.newest.group else NO_GENERATION

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the newest group's members by rank."""
        return self.newest.group.members if self.newest.group else ()

    @property
    def is_open(self) -> bool:
        """Return whether its group was announced, and its members were not ordered to end."""
        return self.newest.phase is not GroupPhase.NONE

    @property
    def limits(self) -> JobSpec:
        """Return the spec with the current bounds; workers get the original spec."""
        low, high = self.permitted
        if self.spec.feeds:
            high = min(high, max(low, self.size.growth.workers))
        if (low, high) == (self.spec.min_workers, self.spec.max_workers):
            return self.spec
        return replace(self.spec, min_workers=low, max_workers=high)

    @property
    def permitted(self) -> tuple[int, int]:
        """Return the bounds that a user set, within which a job that feeds another one grows."""
        return self.size.bounds or (self.spec.min_workers, self.spec.max_workers)

    @property
    def job_id(self) -> JobId:
        return self.spec.job_id

    def has_ended(self) -> bool:
        """Return whether the outcome is final; workers may still be ending."""
        return self.phase in ENDED

    def move(self, phase: JobPhase, now_ns: int) -> None:
        """Enter a phase; raise InvariantViolation if that move is not allowed."""
        if phase is not self.phase:
            check_move(JOB, f"job {self.job_id}", self.phase, phase)
            self.phase = phase
            if phase is JobPhase.PAUSED:
                self.newest.interruption = Interruption()
            self.since_ns = now_ns

    def member_ids(self) -> tuple[WorkerId, ...]:
        """Return the ids of the newest group's members by rank."""
        return self.newest.group.worker_ids() if self.newest.group else ()

    def present_members(self) -> list[WorkerState]:
        """Return the newest group's members that are not lost, by rank."""
        return [self.workers[w] for w in self.member_ids() if w in self.workers]

    def rank_of(self, worker_id: WorkerId) -> int:
        """Return the worker's rank in the newest group, -1 if it has none."""
        group = self.newest.group
        return group.ranks.get(worker_id, -1) if group else -1

    def is_member(self, worker_id: WorkerId) -> bool:
        group = self.newest.group
        return group is not None and worker_id in group.ranks

    def places(self) -> tuple[RankPlace, ...]:
        """Return the rank assignment of the newest group's members, by rank."""
        group = self.newest.group
        if group is None:
            return ()
        if self.newest.placed is None or self.newest.placed[0] is not group:
            self.newest.placed = (
                group,
                assign_ranks(group.worker_ids(), group.nodes, group.nodes),
            )
        return self.newest.placed[1]

    def current(self) -> CurrentGroup:
        """Return the newest group as the membership policy sees it."""
        members, leavers = self.member_ids(), self.newest.leavers
        is_asked = leavers.is_unsaved or self.newest.phase is GroupPhase.SAVING
        saved = self.reports.automatic_of(self.generation) if is_asked else ""  # It reads all.
        return CurrentGroup(
            self.generation,
            members,
            self.is_open,
            self.newest.is_asked_to_leave,
            self.newest.phase is GroupPhase.SAVING,
            is_saved=bool(saved) and saved != leavers.saved_before,
            is_unsaved=leavers.is_unsaved and not saved,
            stuck=self.newest.hang.stuck,
            in_place=self.is_in_place(),
            has_trained=self.newest.training_since_ns is not None,
            is_over=self.is_end_announced(),
            anew_ns=self.newest.anew_ns,
        )

    def is_end_announced(self) -> bool:
        """Return whether members of the newest group were notified of its end early."""
        return self.is_open and self.newest.ends_announced == self.generation

    def is_in_place(self) -> bool:
        """Return whether its group trains in a loop that new members can enter."""
        if not self.is_open:
            return False
        return any(w.report.in_place for w in self.present_members())

    def candidates(self, book: NodeBook) -> dict[WorkerId, Candidate]:
        found, nodes, holders = {}, book.nodes, self.state_holders()
        gives_some, by_ns = (
            self.must_release_workers() or bool(self.release.yields),
            self._leave_by_ns(),
        )
        for worker_id, worker in self.workers.items():
            node, report = nodes[worker.node_id], worker.report
            is_out = node.drain.is_on or worker.node_id in self.node_links.out
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
                leave_by_ns=node.drain.by_ns if node.drain.is_on else by_ns,
                spent=report.spent,
                has_state=worker_id in holders,
            )
        return found

    def state_holders(self) -> frozenset[WorkerId]:
        """Return the workers that have the run's newest state in memory, as far as is known.

        A worker that joined a group receives it before the group's first step. If none of those
        that must have it is left, or they are unknown, any whose loop continues may have it.
        """
        alive = {w: worker for w, worker in self.workers.items() if worker.stop_cause is None}
        able = frozenset(w for w, worker in alive.items() if worker.report.in_place)
        known = alive.keys() & (
            self.member_ids() if self.newest.first_steps else self.newest.holders
        )
        return able & known if known else able

    def is_to_leave(self, worker: WorkerState, node: NodeState) -> bool:
        """Return whether a worker cannot be in a group, at least for now."""
        is_out = node.drain.is_on or worker.node_id in self.node_links.out
        return is_out or self.gives_back(worker.report.worker_id)

    def gives_back(self, worker_id: WorkerId) -> bool:
        """Return whether the worker must leave for another job, or because the job pauses."""
        is_releasing = self.must_release_workers() and (self.release.is_leaving or not self.is_open)
        return is_releasing or worker_id in self.release.yields

    def must_release_workers(self) -> bool:
        """Return whether it should hold no workers: it is paused, or preempted."""
        return self.release.paused or bool(self.release.yields_to)

    def _leave_by_ns(self) -> int | None:
        """Return when members that were asked to release their slots are cut off, None for never.

        Never before there is a checkpoint from which the job can continue, if it needs one.
        """
        can_go_on = bool(self.reports.checkpoints or self.spec.feeds)
        is_bounded = self.release.is_leaving and self.release.yields_to and can_go_on
        return self.release.deadline_ns if is_bounded else None

    def is_late(self, now_ns: int) -> bool:
        """Return whether it pauses, and still holds its workers after the deadline."""
        due_ns = self.release.deadline_ns
        return self.release.paused and self.is_open and due_ns is not None and now_ns >= due_ns

    def latest_checkpoint(self) -> str:
        """Return the path of the newest reported checkpoint that is recorded, "" for none.

        Automatic ones belong to the step engine, which finds them by itself: the train function
        must get a checkpoint that it wrote. Before there is one, a job with `resume_from` continues
        from that.
        """
        reported = (c.path for c in reversed(self.reports.checkpoints) if not c.automatic)
        return next(reported, self.spec.resume_from)

    def latest_saved(self) -> str:
        """Return the path of the newest automatic checkpoint that is recorded, "" for none."""
        return next((c.path for c in reversed(self.reports.checkpoints) if c.automatic), "")

    def record(self, unix_ahead_ns: int | None) -> JobRecord:
        """Return the job's durable state.

        Args:
            unix_ahead_ns: the wall clock minus the machine's, None if unknown.
        """
        bounds = self.size.bounds or (0, 0)
        return JobRecord(
            spec=self.spec,
            phase=self.phase,
            generation=self.generation,
            group=self.newest.group,
            failures=self.outcome.history.failures,
            losses=self.outcome.history.losses,
            preemptions=self.outcome.preemptions,
            checkpoints=self.reports.checkpoints,
            reason=self.reason,
            failure=self.outcome.failure,
            failed_worker=self.outcome.failed_worker,
            rank_failures=self.outcome.rank_failures,
            result=self.outcome.result,
            metrics=self.reports.metrics,
            sequence=self.submission.sequence,
            min_workers=bounds[0],
            max_workers=bounds[1],
            paused=self.release.paused,
            stopping=self.release.stopping,
            preempted_by=self.release.preempted_by,
            submitter=self.submission.submitter,
            is_save_requested=self.newest.phase is GroupPhase.SAVING,
            leaves_for=self.release.yields_to if self.release.is_leaving and self.is_open else "",
            since_unix_ns=0 if unix_ahead_ns is None else self.since_ns + unix_ahead_ns,
            goodput=self.ledger.total(),
            former=self.outcome.former,
        )

    def sample(self) -> JobSample:
        group = self.newest.group if self.phase is JobPhase.RUNNING else None
        present = self.present_members() if group is not None else []
        telemetry = first_reported(worker.telemetry for worker in present)
        return JobSample(self.spec.job_id, group, telemetry)

    def view(self, now_ns: int, unix_ahead_ns: int | None) -> JobView:
        """Return the job for the status; an ended one shows STOPPING until its workers are gone."""
        accounts = (worker.account for worker in self.workers.values())
        known, unreported_ns = self.ledger.at(accounts, now_ns)
        record = replace(self.record(unix_ahead_ns), goodput=known)
        reason = self.reason
        if self.has_ended() and self.workers:
            reason = f"{reason} ({self.phase.value}, {len(self.workers)} workers are ending)"
            record = replace(record, phase=JobPhase.STOPPING)
        elif (works := self.newest.hang.works) and self.is_open:
            reason = f"{reason}; {works}" if reason else works
        workers = tuple(
            WorkerView(
                w.report, w.node_id, self.rank_of(worker_id), w.since_ns, w.steps, w.telemetry
            )
            for worker_id, w in sorted(self.workers.items())
        )
        first = self.members[0].node_id if self.is_open else NodeId("")
        copies = self.copies.view(first)
        return JobView(record, reason, self.since_ns, workers, copies, unreported_ns)


@dataclass
class ClusterState:
    """The whole state of the coordinator's machine, and the effects of the current step.

    Attributes:
        owner: the job of each known worker.
        dirty: jobs to evaluate before the step ends, in order of first mention.
        num_saves: how many checkpoint requests were made in this term.
        num_checked: sessions checked in this round of checks.
        sequence: number of the job that was submitted last.
    """

    config: CoordinatorConfig
    name: str
    term: Term = field(default_factory=Term)
    book: NodeBook = field(default_factory=NodeBook)
    jobs: dict[JobId, JobState] = field(default_factory=dict)
    owner: dict[WorkerId, JobId] = field(default_factory=dict)
    dirty: dict[JobId, None] = field(default_factory=dict)
    queue: QueuePlan = field(default_factory=QueuePlan)
    probes: ProbeBook = field(default_factory=ProbeBook)
    num_saves: int = 0
    num_checked: int = 0
    sequence: int = 0
    now_ns: int = 0
    effects: list[CoordinatorEffect] = field(default_factory=list)

    def do(self, *effects: CoordinatorEffect) -> None:
        """Add effects, in this order."""
        self.effects.extend(effects)

    def send(self, node: NodeState, message: CoordinatorMessage) -> None:
        """Send to a node's agent, if it is connected; its next Hello repairs a loss."""
        if node.session is not None:
            self.do(SendAgent(node.session, message))

    def persist(self, job: JobState) -> None:
        """Make a job's state durable before the effects that follow."""
        self.do(Persist((job.record(self.term.unix_ahead_ns),)))

    def note(self, name: str, job_id: str = "", **fields: object) -> None:
        """Add a line for the event log."""
        self.do(note(name, job_id, **fields))

    def touch(self, job: JobState) -> None:
        """Evaluate this job before the step ends."""
        self.dirty[job.job_id] = None

    def touch_active(self) -> None:
        """Evaluate every job that has not ended: capacity changed."""
        self.queue.is_outdated = True
        for job in self.active():
            self.touch(job)

    def active(self) -> Iterable[JobState]:
        """Return the jobs that have not ended, oldest first."""
        return [job for job in self.jobs.values() if not job.has_ended()]

    def node_of(self, worker: WorkerState) -> NodeState:
        return self.book.nodes[worker.node_id]

    def job_of(self, worker_id: WorkerId) -> JobState | None:
        """Return the job of a worker, None if the worker is not known."""
        job_id = self.owner.get(worker_id)
        return self.jobs[job_id] if job_id is not None else None

    def add_worker(self, job: JobState, state: NodeState, report: WorkerReport) -> WorkerState:
        account = Account(START, self.now_ns)
        if report.phase is not WorkerPhase.STARTING:
            account.reported = None
        worker = WorkerState(report, state.node.node_id, self.now_ns, account)
        job.workers[report.worker_id] = worker
        self.book_time(job, worker)
        self.owner[report.worker_id] = job.job_id
        self.queue.is_outdated = True
        state.held[report.worker_id] = job.spec.resources_per_worker
        state.saw_worker(report.worker_id)
        return worker

    def book_time(self, job: JobState, worker: WorkerState) -> None:
        """Book a worker's time until now; called whenever its category may change."""
        node = self.book.nodes.get(worker.node_id)
        now = goodput.Situation(
            phase=worker.report.phase,
            is_leaving=worker.stop_cause is not None or (node is not None and node.drain.is_on),
            has_trained=worker.account.has_trained,
            has_group=job.is_open,
        )
        job.ledger.move(worker.account, goodput.category(now), self.now_ns)

    def remove_worker(self, job: JobState, worker_id: WorkerId) -> WorkerState:
        """Remove a worker, and evaluate the jobs that may use its slot."""
        worker = job.workers.pop(worker_id)
        is_lost = worker.stop_cause is None and not job.has_ended()
        gone = FormerWorker(worker_id, job.rank_of(worker_id), worker.report.generation)
        job.outcome.former = (*job.outcome.former, gone)[-FORMER_MAX:]
        job.ledger.close(worker.account, self.now_ns, is_lost=is_lost)
        self.owner.pop(worker_id, None)
        node = self.book.nodes.get(worker.node_id)
        if node is not None:
            node.held.pop(worker_id, None)
        self.touch(job)
        self.touch_active()
        return worker
