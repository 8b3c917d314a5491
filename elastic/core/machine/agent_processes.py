"""The processes of an agent: spares, working ones, and ending ones.

Rule: a process number is never reused. Nothing is sent to a process that has not started or is
gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from elastic.core.config import AgentConfig, JobSpec, ns
from elastic.core.events.agent import ANY_JOB, AgentEffect, Kill, OpenLog, SendProcess, Spawn
from elastic.core.facts import EntryKind, ExitCause, ExitKind, JobId, WorkerId
from elastic.core.machine.event_history import note
from elastic.core.machine.transitions import PROCESS, ProcessPhase, check_move
from elastic.core.messages import Assign, Ping, PipeToWorker, Pong, Stop
from elastic.core.policy.failure import STOPPED, describe
from elastic.core.policy.hang import FIRST_TIMES

WARM_UP_S_MAX = 300.0
"""A spare that has not imported torch by then never will; a cold network disk needs a minute."""

_P = ProcessPhase
UNASSIGNED = (_P.SPAWNING, _P.WARMING, _P.WARM)
TELLABLE = (_P.ASSIGNED, _P.STOPPING)
KILLABLE = (_P.WARMING, _P.WARM, _P.ASSIGNED, _P.STOPPING)

SPAWN_PAUSE_S_MIN = 0.1
SPAWN_PAUSE_S_MAX = 30.0
DOUBLINGS_MAX = 40


class SpawnBackoff:
    """A row of failed attempts to start a process, and the pause that follows from its length.

    Attempts in progress at the same time fail together, and count as one failure.

    Attributes:
        num_failures: in a row; 0 after a success.
        not_before_ns: no attempt before this moment.
        detail: text of the newest failure.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.num_failures = 0
        self.not_before_ns = 0
        self.detail = ""
        self._failures_max = config.spawn_failures_max
        self._failed_ns: int | None = None

    def succeeded(self) -> None:
        """A process got warm: what failed before is forgotten."""
        self.num_failures = 0
        self.not_before_ns = 0
        self._failed_ns = None

    def failed(self, spawned_ns: int, detail: str, now_ns: int) -> None:
        self.detail = detail
        if self._failed_ns is not None and spawned_ns <= self._failed_ns:
            return
        self._failed_ns = now_ns
        self.num_failures += 1
        doublings = min(self.num_failures - 1, DOUBLINGS_MAX)
        pause_ns = min(ns(SPAWN_PAUSE_S_MAX), ns(SPAWN_PAUSE_S_MIN) << doublings)
        self.not_before_ns = now_ns + pause_ns

    def has_given_up(self) -> bool:
        """Return whether so many failed in a row that only a waiting worker is worth a try."""
        return self.num_failures >= self._failures_max


class OverdueKind(Enum):
    """What a process has not done in time: to get warm or to end, to run on, to answer."""

    END = auto()
    STOPPED = auto()
    SILENT = auto()


@dataclass
class ProcessState:
    """One process.

    Attributes:
        spawned_ns: when it was asked for.
        job_id: the job whose script's imports it has made, and for which alone it is; "" for any.
        worker_id: its worker, None for a spare.
        end: why we end it, None as long as we do not; decides the cause of its exit.
        kill_at_ns: when it is killed if it still runs: too slow to warm up, or to stop.
        stopped_since_ns: since when the kernel shows it as stopped, None if it runs.
        is_spared: it may stay stopped: the state in its memory is nowhere else.
        silent_since_ns: since when a ping is unanswered, None if none is.
        silent_times: factor on the time that it may be silent, 0 for no limit.
        num_pings, last_pong: numbers of the newest ping and of the newest answer.
    """

    process_id: int
    spawned_ns: int
    phase: ProcessPhase = ProcessPhase.SPAWNING
    pid: int = 0
    job_id: JobId = ANY_JOB
    worker_id: WorkerId | None = None
    end: ExitCause | None = None
    kill_at_ns: int | None = None
    stopped_since_ns: int | None = None
    is_spared: bool = False
    silent_since_ns: int | None = None
    silent_times: int = FIRST_TIMES
    num_pings: int = 0
    last_pong: int = 0

    def move(self, phase: ProcessPhase) -> None:
        check_move(PROCESS, f"process {self.process_id}", self.phase, phase)
        self.phase = phase


class ProcessBook:
    """All processes of one agent that are not gone, by number."""

    def __init__(self, config: AgentConfig, out: list[AgentEffect]) -> None:
        self.spawning = SpawnBackoff(config)
        self._out = out
        self._all: dict[int, ProcessState] = {}
        self._num_spawned = 0
        self._ping_interval_ns = ns(config.ping_interval_s)
        self._control_ns = ns(config.control_timeout_s)
        self._stopped_ns = ns(config.stopped_timeout_s)
        self._ping_at_ns: int | None = None
        self._spawn_at_ns: int | None = None

    def get(self, process_id: int | None) -> ProcessState | None:
        """Return the process of this number, None if it is gone or was never asked for."""
        return self._all.get(process_id) if process_id is not None else None

    def all(self) -> tuple[ProcessState, ...]:
        """Return all, oldest first."""
        return tuple(self._all.values())

    def working(self) -> list[ProcessState]:
        """Return those with a worker, also the killed ones, oldest first."""
        return [process for process in self._all.values() if process.worker_id is not None]

    def num_unassigned(self) -> int:
        """Return how many are, or may get, ready for a worker."""
        return sum(1 for process in self._all.values() if process.phase in UNASSIGNED)

    # ------------------------------------------------------------ events

    def started(self, process: ProcessState, pid: int, now_ns: int) -> None:
        """The operating system made it; it imports torch now."""
        if process.phase is ProcessPhase.SPAWNING:
            process.pid = pid
            process.move(ProcessPhase.WARMING)
            process.kill_at_ns = now_ns + ns(WARM_UP_S_MAX)

    def warmed(self, process: ProcessState, pid: int) -> None:
        """It waits for a job: spawning works."""
        if process.phase in (ProcessPhase.SPAWNING, ProcessPhase.WARMING):
            process.pid = process.pid or pid
            process.move(ProcessPhase.WARM)
            process.kill_at_ns = None
            self.spawning.succeeded()

    def exited(self, process: ProcessState) -> None:
        process.move(ProcessPhase.GONE)
        del self._all[process.process_id]

    def failed(self, process: ProcessState, detail: str, now_ns: int) -> None:
        """Record that it did not start, or ended by itself before it got a job."""
        self.spawning.failed(process.spawned_ns, detail, now_ns)
        row = self.spawning.num_failures
        self._out.append(note("spare_failed", process=process.process_id, detail=detail, row=row))

    def halted(self, process: ProcessState, stopped: bool, now_ns: int) -> None:
        """The kernel shows it as stopped, or as running again."""
        if not stopped:
            process.stopped_since_ns = None
            if process.silent_since_ns is not None:
                process.silent_since_ns = now_ns
        elif process.stopped_since_ns is None:
            process.stopped_since_ns = now_ns

    def ponged(self, process: ProcessState, pong: Pong, now_ns: int) -> None:
        """Record a reply of its control thread; ignore one that is not newer than the last."""
        process.silent_times = pong.times
        if process.last_pong < pong.number <= process.num_pings:
            process.last_pong = pong.number
            process.silent_since_ns = None if pong.number == process.num_pings else now_ns

    # ------------------------------------------------------------ actions

    def take_warm(self, spec: JobSpec) -> ProcessState | None:
        """Return a warm spare for a job, one of its own before any other; None if there is none."""
        warm = [process for process in self._all.values() if process.phase is ProcessPhase.WARM]
        fitting = [process for process in warm if process.job_id in ("", spec.job_id)]
        return max(fitting, key=lambda process: process.job_id, default=None)

    def assign(self, process: ProcessState, assign: Assign, now_ns: int) -> None:
        """Make a warm spare a worker."""
        process.move(ProcessPhase.ASSIGNED)
        process.worker_id = assign.worker_id
        if self._ping_at_ns is None:
            self._ping_at_ns = now_ns + self._ping_interval_ns
        self._out.append(OpenLog(process.process_id, assign))
        self.send(process, assign)

    def send(self, process: ProcessState, message: PipeToWorker) -> None:
        """Write to a working process's pipe; one that is killed reads no more."""
        if process.phase in TELLABLE:
            self._out.append(SendProcess(process.process_id, message))

    def stop(self, process: ProcessState, order: Stop, now_ns: int) -> None:
        """Ask a working process to end; a second order may only shorten its time."""
        kill_at_ns = now_ns + order.grace_ns
        cause = ExitCause(ExitKind.STOPPED, detail=order.reason)
        if order.grace_ns <= 0:
            self.kill(process, cause)
        elif process.phase is ProcessPhase.ASSIGNED:
            self.send(process, order)
            process.move(ProcessPhase.STOPPING)
            process.end, process.kill_at_ns = cause, kill_at_ns
        elif process.phase is ProcessPhase.STOPPING and process.kill_at_ns is not None:
            if not order.asks:
                self.send(process, order)  # Its script may have been asked before.
            process.kill_at_ns = min(process.kill_at_ns, kill_at_ns)

    def kill(self, process: ProcessState, cause: ExitCause) -> None:
        """Send SIGKILL, once; the first reason that we had to end it stays the reason."""
        if process.phase in KILLABLE:
            process.move(ProcessPhase.KILLED)
            process.end = process.end or cause
            process.kill_at_ns = None
            self._out.append(Kill(process.process_id, cause.detail))

    # ------------------------------------------------------------ time

    def turn(
        self, now_ns: int, *, waiting: Sequence[JobSpec], spares: Sequence[JobSpec | None]
    ) -> None:
        """Kill overdue processes, ping working ones, and keep the wanted number of spares.

        Args:
            now_ns: monotonic.
            waiting: jobs of workers that have no process yet; each takes one that is warm.
            spares: processes wanted beside those, and for which job, None for any; they are not
                replaced while spawning fails.
        """
        for process in self.all():
            self._end_overdue(process, now_ns)
        self._ping(now_ns)
        self._balance(now_ns, waiting, spares)

    def forgive(self, late_ns: int) -> None:
        """Extend all time limits, because this agent itself did not run for so long."""
        for process in self._all.values():
            if process.silent_since_ns is not None:
                process.silent_since_ns += late_ns
            if process.stopped_since_ns is not None:
                process.stopped_since_ns += late_ns
            if process.phase is ProcessPhase.WARMING and process.kill_at_ns is not None:
                process.kill_at_ns += late_ns

    def next_deadline_ns(self) -> int | None:
        moments = [moment for moment in (self._ping_at_ns, self._spawn_at_ns) if moment is not None]
        for process in self._all.values():
            moments.extend(moment for moment, _ in self._limits(process))
        return min(moments, default=None)

    def _limits(self, process: ProcessState) -> list[tuple[int, OverdueKind]]:
        """Return when the process is to be killed, and for what, in order of precedence."""
        if process.phase not in KILLABLE:
            return []
        limits = []
        if process.kill_at_ns is not None:
            limits.append((process.kill_at_ns, OverdueKind.END))
        if process.stopped_since_ns is not None and not process.is_spared:
            limits.append((process.stopped_since_ns + self._stopped_ns, OverdueKind.STOPPED))
        is_kept = process.stopped_since_ns is not None and process.is_spared
        is_asked = process.phase is ProcessPhase.ASSIGNED and not is_kept
        if process.silent_since_ns is not None and process.silent_times and is_asked:
            limit_ns = process.silent_times * self._control_ns
            limits.append((process.silent_since_ns + limit_ns, OverdueKind.SILENT))
        return limits

    def _why(self, process: ProcessState, overdue: OverdueKind) -> str:
        if overdue is OverdueKind.STOPPED:
            return f"{STOPPED} for {self._stopped_ns / 1e9:g} s"
        if overdue is OverdueKind.SILENT:
            limit_s = process.silent_times * self._control_ns / 1e9
            return f"its control thread did not answer for {limit_s:g} s"
        if process.end is not None:
            return f"did not end within its grace period: {process.end.detail}"
        return "did not get warm in time"

    def _end_overdue(self, process: ProcessState, now_ns: int) -> None:
        for limit_ns, overdue in self._limits(process):
            if now_ns < limit_ns:
                continue
            cause = ExitCause(ExitKind.HUNG, detail=self._why(process, overdue))
            if process.phase is ProcessPhase.WARMING and process.stopped_since_ns is None:
                self.failed(process, cause.detail, now_ns)
            worker = process.worker_id or ""
            self._out.append(
                note("process_overdue", process=process.process_id, worker=worker, why=cause.detail)
            )
            self.kill(process, cause)
            return

    def _ping(self, now_ns: int) -> None:
        """Ping all working processes together; there are only a few on a node."""
        if self._ping_at_ns is None or now_ns < self._ping_at_ns:
            return
        working = [p for p in self._all.values() if p.phase is ProcessPhase.ASSIGNED]
        self._ping_at_ns = now_ns + self._ping_interval_ns if working else None
        for process in working:
            process.num_pings += 1
            if process.silent_since_ns is None:
                process.silent_since_ns = now_ns
            self.send(process, Ping(process.num_pings))

    def _balance(
        self, now_ns: int, waiting: Sequence[JobSpec], spares: Sequence[JobSpec | None]
    ) -> None:
        """Spawn missing processes; end spares that are not needed."""
        idle = [process for process in self._all.values() if process.phase in UNASSIGNED]
        idle.sort(key=lambda p: (-UNASSIGNED.index(p.phase), not p.job_id, p.process_id))
        missing: list[JobSpec | None] = []
        for spec in waiting:
            found = [process for process in idle if process.job_id in ("", spec.job_id)][:1]
            idle = [process for process in idle if process not in found]
            missing += [] if found else [spec]
        for wanted in spares:
            job_id = importing_job(wanted)
            found = [process for process in idle if process.job_id == job_id][:1]
            idle = [process for process in idle if process not in found]
            missing += [] if found or self.spawning.has_given_up() else [wanted]
        for process in idle:
            if process.phase in KILLABLE:
                self.kill(process, ExitCause(ExitKind.STOPPED, detail="no such spare is wanted"))
        self._spawn_at_ns = self.spawning.not_before_ns if missing else None
        if missing and now_ns >= self.spawning.not_before_ns:
            self._spawn_at_ns = None
            for spec_or_none in missing:
                self._spawn(spec_or_none, now_ns)

    def _spawn(self, spec: JobSpec | None, now_ns: int) -> None:
        self._num_spawned += 1
        number, job_id = self._num_spawned, importing_job(spec)
        self._all[number] = ProcessState(number, now_ns, job_id=job_id)
        self._out.append(Spawn(number, job_id, spec.entry if spec is not None and job_id else None))


def importing_job(spec: JobSpec | None) -> JobId:
    """Return the job for which a spare can make imports ahead, "" for none."""
    if spec is None or not (spec.entry.kind is EntryKind.SCRIPT or spec.entry.imports):
        return ANY_JOB
    return spec.job_id


def cause_of_exit(process: ProcessState, cause: ExitCause) -> ExitCause:
    """Return the cause of an exit: ours if we ordered it, else that of the operating system.

    A process that we were about to kill as hung, but that ended with a code, was not hung.
    """
    end = process.end
    if end is None or (end.kind is ExitKind.HUNG and cause.kind is not ExitKind.SIGNAL):
        return cause
    return ExitCause(end.kind, detail=f"{end.detail} ({describe(cause)})")
