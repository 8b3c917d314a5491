"""Which members of a group are hung: their main thread makes no progress, and all others wait.

Rule: only a member's own reports count, and only while it repeats them. A member that makes
progress, however slow, is never hung; if none is without progress, or one is silent, none is
judged hung (probes deal with silence). If all wait for each other and none makes progress, a
message was lost: a link is cut, or they are in different collectives. The group is formed again.

Limit: `JobSpec.hang_timeout_s` (`FailureConfig`, `--hang-timeout`; 30 s, 0 for never) from the
later of: all others wait; its own last progress. Ten times that before its first step; at least
three times its longest pause (`MainThreadState.limit_ns`). Twice the timeout where all wait; twice
that limit where none waits and some have stalled.

Evidence: a worker looks at its own main thread ten times a second (`ActivityMonitor`), and reports
three states: it waits for peers; it has stalled, for a second; it works for 10 s without a step
(for people only, never judged). It repeats that while it holds, and reports once when it is over.

Who decides: the coordinator. While a member waits, `core.machine.suspicion.check` asks `judge` ten
times a second; `core.machine.timeouts.end_hung` requests the stacks of all members, and kills those
that hang 0.3 s later.

Other limits, the first two kept by its agent, the others by the coordinator (in `core.machine`):

    a process is stopped (SIGSTOP)    0.5 s                              agent_processes, `_limits`
    its control thread is silent      30 s; 300 s before its first step  agent_processes, `_limits`
    a worker starts                   30 min; 4 h if a loop is in place  timeouts, `patience_s`
    it joins a group                  60 s after a first member trains   timeouts, `patience_s`
    it leaves one                     60 s; 30 min for a loop in place   timeouts, `patience_s`
    a node does not answer a probe    0.6 s                              suspicion, `silent`

The 30 min are `TorchConfig(timeout_s)`. A loop that has stalled has the hang timeout to leave. A
process that reports long work may keep its control thread silent without limit.

Not all waiting is visible: a rank that waits in a collective of the script's own may look hung. In
a group with subgroups (shards and their replicas) the collectives begun in each show which member
waits for which, and the end of such a chain is judged hung. In a cycle all that make no progress
are, as without subgroups. If all have made no progress for long, a rank that has begun a collective
which others have not counts as waiting for them: two hung ranks may each hide the only one that
waits for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.core.config import NS_PER_S
from elastic.core.events.worker import ActivitySampled
from elastic.core.facts import Assignment, CollectiveCount, Generation, WorkerId
from elastic.core.messages import Pulse
from elastic.core.policy.decision import Decision
from elastic.core.policy.pacing import WAITING_NS, waiting_is_long_after_ns

POLL_NS = NS_PER_S // 10
LATE_NS = 3 * POLL_NS
STILL_NS = NS_PER_S
"""A stall is reported after this."""
WAITING_AGAIN_NS = NS_PER_S // 2
STILL_AGAIN_NS = NS_PER_S
WORKING_NS, WORKING_AGAIN_NS = 10 * NS_PER_S, 5 * NS_PER_S
"""Work without a step is reported after this, for people, and again in this interval."""
FRESH_NS = 3 * NS_PER_S
"""A report expires after this; a worker repeats it in time."""
WORK_FRESH_NS = 15 * NS_PER_S
"""The same for reports of work."""
STUCK_TIMES = 2
"""Factor on the hang timeout if all wait, or all have stalled. A worker counts its wait from the
last received bytes (`worker.base.activity.PeerTraffic`): a slow network is not a cut one."""
FIRST_TIMES = 10
"""Factor on the hang timeout for a process without a committed step: compilers, devices and
libraries start in it, some in native code without visible progress."""
LONGEST_TIMES = 3
"""Factor on the longest pause of a process so far: it may pause that long again."""
STALLED_MAX = 256
"""If more members have stalled, all are judged hung without an analysis."""


class ActivityMonitor:
    """Samples the main thread of a worker that trains, ten times a second.

    Attributes:
        check_at_ns: when to sample next.
    """

    def __init__(self) -> None:
        self.check_at_ns = 0
        self._beats = -1
        self._moved_ns = 0
        self._longest_ns = 0
        self._worked_ns = 0
        self._step = (0, 0)
        self._reported = (False, False, False)
        self._reported_ns = 0
        self._long_ns = WAITING_NS

    def begin(self, now_ns: int, world_size: int) -> None:
        """Reset the state, because another generation trains."""
        self.check_at_ns = now_ns + POLL_NS
        self._long_ns = waiting_is_long_after_ns(world_size)
        self._beats = -1
        self._moved_ns = self._worked_ns = now_ns
        self._reported = (False, False, False)

    def sample(self, seen: ActivitySampled, place: Assignment, now_ns: int) -> Pulse | None:
        """Process one sample; return what to report of this member, None for nothing."""
        late_ns = now_ns - self.check_at_ns
        if late_ns > LATE_NS:
            # The process was stopped, or code held the GIL: progress could not be observed.
            self._moved_ns += late_ns
        self.check_at_ns = now_ns + POLL_NS
        if seen.beats != self._beats:
            if self._beats > 0 and seen.has_stepped and not self._reported[0]:
                self._longest_ns = max(self._longest_ns, now_ns - self._moved_ns)
            self._beats, self._moved_ns = seen.beats, now_ns
        step = (seen.epoch, seen.step)
        if step != self._step or seen.waiting_ns:
            self._step, self._worked_ns = step, now_ns
        waits = seen.waiting_ns >= self._long_ns
        still_ns, working_ns = now_ns - self._moved_ns, now_ns - self._worked_ns
        # Before the training loop starts, user code may take any time for data and models.
        is_stalled = seen.beats > 0 and not seen.waiting_ns and still_ns >= STILL_NS
        works = seen.beats > 0 and not is_stalled and working_ns >= WORKING_NS
        found = (waits, is_stalled, works)
        again_ns = WAITING_AGAIN_NS if waits else STILL_AGAIN_NS if is_stalled else WORKING_AGAIN_NS
        is_due = any(found) and now_ns - self._reported_ns >= again_ns
        if found == self._reported and not is_due:
            return None
        self._reported, self._reported_ns = found, now_ns
        return Pulse(
            place.worker_id,
            place.generation,
            waiting_ns=seen.waiting_ns if waits else 0,
            still_ns=still_ns if is_stalled else 0,
            epoch=seen.epoch,
            step=seen.step,
            begun=seen.begun if waits or is_stalled else (),
            longest_ns=self._longest_ns,
            has_stepped=seen.has_stepped,
            working_ns=working_ns if works else 0,
            work=seen.work if works else "",
        )


@dataclass(frozen=True)
class MainThreadState:
    """A member's last report of its main thread.

    Attributes:
        generation: of its group.
        reported_ns: when the report came.
        waiting_since_ns: since when it waits for its peers, None if it does not.
        still_since_ns: since when it has stalled without waiting, None if it has not.
        epoch, step: its position.
        begun: the collectives that it has begun in groups within its group.
        longest_ns: its longest pause in this process after which it moved on.
        has_stepped: it has committed a step in this process.
        working_since_ns: since when it works without a step, None if not for long.
        work: its current work, for people.
    """

    generation: Generation
    reported_ns: int
    waiting_since_ns: int | None = None
    still_since_ns: int | None = None
    epoch: int = 0
    step: int = 0
    begun: tuple[CollectiveCount, ...] = ()
    longest_ns: int = 0
    has_stepped: bool = True
    working_since_ns: int | None = None
    work: str = ""

    @staticmethod
    def of(pulse: Pulse, now_ns: int) -> MainThreadState:
        """Return what a report says that comes now."""

        def since_ns(duration_ns: int) -> int | None:
            return now_ns - duration_ns if duration_ns > 0 else None

        return MainThreadState(
            generation=pulse.generation,
            reported_ns=now_ns,
            waiting_since_ns=since_ns(pulse.waiting_ns),
            still_since_ns=since_ns(pulse.still_ns),
            epoch=pulse.epoch,
            step=pulse.step,
            begun=pulse.begun,
            longest_ns=pulse.longest_ns,
            has_stepped=pulse.has_stepped,
            working_since_ns=since_ns(pulse.working_ns),
            work=pulse.work,
        )

    def limit_ns(self, timeout_ns: int) -> int:
        times = 1 if self.has_stepped else FIRST_TIMES
        return max(times * timeout_ns, LONGEST_TIMES * self.longest_ns)

    def waits(self, generation: Generation, now_ns: int) -> bool:
        """Return whether it waits for its peers in this group now."""
        return self.waiting_since_ns is not None and self.is_fresh(generation, now_ns)

    def is_stalled(self, generation: Generation, now_ns: int) -> bool:
        """Return whether it has stalled in this group now, without waiting."""
        return self.still_since_ns is not None and self.is_fresh(generation, now_ns)

    def is_fresh(self, generation: Generation, now_ns: int) -> bool:
        """Return whether the report is of this group, and has not expired."""
        return self.generation == generation and now_ns - self.reported_ns <= FRESH_NS


@dataclass(frozen=True)
class WatchedMember:
    """A member of the newest group.

    Attributes:
        trains: it is inside its train function in this generation, and was not ordered to end.
        main_thread: its last report, None for none.
    """

    worker_id: WorkerId
    trains: bool
    main_thread: MainThreadState | None = None


@dataclass(frozen=True)
class Hang:
    """Members that hang, and since when the whole group has stalled because of them.

    Attributes:
        since_ns: 0 while a member moves, or may.
        is_stuck: no member is at fault: all wait for each other, and none can continue.
        works: long work of a member for which the others wait, for people; "" for none.
    """

    culprits: tuple[WorkerId, ...] = ()
    since_ns: int = 0
    is_stuck: bool = False
    works: str = ""


def judge(
    generation: Generation, members: Sequence[WatchedMember], now_ns: int, timeout_ns: int
) -> Decision[Hang]:
    """Decide which members hang.

    Time counts from when all others wait, and from the last progress of those that do not: a rank
    that computes alone for long, and then makes all others wait briefly, has not hung for long.

    Args:
        generation: of the group.
        members: all of them.
        now_ns: monotonic.
        timeout_ns: how long a member may stall; 0 for no limit.
    """
    waiting: dict[WorkerId, int] = {}
    stalled: dict[WorkerId, int] = {}
    limits: dict[WorkerId, int] = {}
    moves = works = ""
    for member in members:
        main_thread = member.main_thread
        if not member.trains or main_thread is None:
            return Decision(Hang(), f"{member.worker_id} does not report its progress")
        limits[member.worker_id] = main_thread.limit_ns(timeout_ns)
        if main_thread.waits(generation, now_ns):
            waiting[member.worker_id] = main_thread.waiting_since_ns or 0
        elif main_thread.is_stalled(generation, now_ns):
            stalled[member.worker_id] = main_thread.still_since_ns or 0
        else:
            moves = member.worker_id
            works = works or _what_it_does(member.worker_id, main_thread, generation, now_ns)
    if moves:
        return Decision(Hang(works=works), works or f"{moves} moves")
    if waiting and not stalled:
        return _judge_all(max(waiting.values()), now_ns, timeout_ns)
    chain = WaitChain(
        {m.worker_id: m.main_thread.begun for m in members if m.main_thread is not None}
    )
    hidden = [] if waiting else [w for w in stalled if chain.is_ahead(w)]
    if not waiting and not hidden:
        return Decision(Hang(), "no member waits")
    since_ns = max(*waiting.values(), *stalled.values())
    limit_ns = max(limits[worker_id] for worker_id in stalled)
    if not timeout_ns or now_ns - since_ns < limit_ns * (STUCK_TIMES if hidden else 1):
        return Decision(Hang(since_ns=since_ns), f"waiting for {', '.join(stalled)}")
    waiters = [*waiting] or hidden
    names = _at_the_end(waiters, [*stalled], chain)
    return Decision(Hang(names, since_ns), f"{len(waiters)} members wait for {', '.join(names)}")


def _what_it_does(
    worker_id: WorkerId, main_thread: MainThreadState, generation: Generation, now_ns: int
) -> str:
    since_ns, is_old = (
        main_thread.working_since_ns,
        now_ns - main_thread.reported_ns > WORK_FRESH_NS,
    )
    if since_ns is None or main_thread.generation != generation or is_old:
        return ""
    seconds = (now_ns - since_ns) / NS_PER_S
    return f"{worker_id} works for {seconds:.0f} s now: {main_thread.work or 'computes'}"


def _judge_all(since_ns: int, now_ns: int, timeout_ns: int) -> Decision[Hang]:
    """Decide whether a group in which all wait is stuck."""
    waited_ns = now_ns - since_ns
    if not timeout_ns or waited_ns < STUCK_TIMES * timeout_ns:
        return Decision(Hang(since_ns=since_ns), "all wait")
    why = (
        f"all members have waited for each other for {waited_ns / NS_PER_S:.1f} s: a link between "
        f"two of them is cut, or they are in different collectives"
    )
    return Decision(Hang(since_ns=since_ns, is_stuck=True), why)


class WaitChain:
    """Which member waits for which, as far as groups within the group show."""

    def __init__(self, begun: Mapping[WorkerId, Sequence[CollectiveCount]]) -> None:
        """Sort the members of each subgroup by their progress."""
        self._begun = begun
        self._groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, WorkerId]]] = {}
        for worker_id, ones in begun.items():
            for one in ones:
                self._groups.setdefault((one.name, one.ranks), []).append((one.count, worker_id))
        for group in self._groups.values():
            group.sort()

    def is_ahead(self, worker_id: WorkerId) -> bool:
        """Return whether it has begun a collective that another member of its group has not."""
        begun = self._begun.get(worker_id, ())
        return any(self._groups[one.name, one.ranks][0][0] < one.count for one in begun)

    def before(self, worker_id: WorkerId) -> dict[WorkerId, None]:
        """Return the members it waits for: those that have begun less, transitively."""
        found: dict[WorkerId, None] = {}
        seen: dict[tuple[str, tuple[int, ...]], int] = {}
        todo = [worker_id]
        while todo:
            for one in self._begun.get(todo.pop(), ()):
                key = (one.name, one.ranks)
                if one.count <= seen.get(key, 0):
                    continue
                seen[key] = one.count
                for count, other in self._groups[key]:
                    if count >= one.count:
                        break
                    if other not in found:
                        found[other] = None
                        todo.append(other)
        return found


def _at_the_end(
    waiting: Sequence[WorkerId], stalled: Sequence[WorkerId], chain: WaitChain
) -> tuple[WorkerId, ...]:
    """Return the stalled members that are waited for and wait for no other stalled one."""
    if len(stalled) == 1 or len(stalled) > STALLED_MAX:
        return tuple(stalled)
    before = {worker_id: chain.before(worker_id) for worker_id in stalled}
    awaited: dict[WorkerId, None] = {}
    for worker_id in waiting:
        # A member whose wait is not visible may wait for all of them.
        awaited.update(chain.before(worker_id) or dict.fromkeys(stalled))
        if all(one in awaited for one in stalled):
            break

    def is_held_up(worker_id: WorkerId) -> bool:
        others = (one for one in before[worker_id] if one in before)
        return any(worker_id not in before[one] for one in others)

    found = tuple(w for w in stalled if w in awaited and not is_held_up(w))
    return found or tuple(stalled)
