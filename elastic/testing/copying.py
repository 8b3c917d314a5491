"""A model of what agents do about copies: memory that dies with the agent, and pushes to others.

Rule: a push arrives whole or not at all; it needs the key that the holder was told, a sender whose
workers make steps, and a way between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.core.copy_messages import CopyOrder, DropCopy, KeepCopy, Replicate
from elastic.core.events.agent import AgentEvent, CopiesChanged, PushFailed
from elastic.core.world import Assignment, Generation, HeldCopy, JobId, NodeId
from elastic.testing.checkers import Checkers
from elastic.testing.world import MS, S, Timeline

LOOK_NS = 200 * MS
PATIENCE_NS = 3 * S
UNCOPIED_NS = 45 * S
"""A run whose state could lie on another node does so by then: a node that did not answer is
asked again after 30 s."""
STEPS_MIN = 40

Age = tuple[Generation, int]


@dataclass(frozen=True)
class Trained:
    """Where a job stands in the data plane: its newest group that is not over."""

    age: Age
    steps_done: int
    nodes: tuple[NodeId, ...]


class Copying:
    """The copies on all nodes of one run."""

    def __init__(
        self,
        timeline: Timeline,
        checkers: Checkers,
        trained: Callable[[JobId], Trained | None],
    ) -> None:
        """Begin without nodes; `trained` says how far a job is."""
        self.timeline, self.checkers = timeline, checkers
        self.trained = trained
        self.desks: dict[str, CopyDesk] = {}
        self._uncopied_since: dict[JobId, tuple[Generation, int]] = {}

    def fetch(self, assignment: Assignment) -> int:
        """Return the steps of the newest copy that a new group can be given, 0 for none."""
        found = [0]
        for address in assignment.copies:
            held = self.desks[address].give(assignment.job_id, assignment.copies_key)
            found.append(held[1] if held is not None else 0)
        return max(found)

    def held(self, job_id: JobId) -> dict[NodeId, Age]:
        """Return who holds a copy of a job."""
        return {d.node_id: d.held[job_id] for d in self.desks.values() if job_id in d.held}

    def check_copied(self, job_ids: list[JobId]) -> None:
        """In the liveness phase: a run that could have a copy has one, after a while."""
        now_ns = self.timeline.now_ns
        for job_id in job_ids:
            trained = self.trained(job_id)
            free = [
                d for d in self.desks.values()
                if trained is not None and d.node_id not in trained.nodes and d.is_up()
            ]  # fmt: skip
            is_late = trained is not None and trained.steps_done >= STEPS_MIN and bool(free)
            generations = [age[0] for age in self.held(job_id).values()]
            if trained is None or not is_late or trained.age[0] in generations:
                self._uncopied_since.pop(job_id, None)
                continue
            generation, since_ns = self._uncopied_since.get(job_id, (0, 0))
            if generation != trained.age[0]:
                self._uncopied_since[job_id] = (trained.age[0], now_ns)
            elif now_ns - since_ns > UNCOPIED_NS:
                self.checkers.never_copied(job_id, trained.age[0])


class CopyDesk:
    """One agent's side of it.

    Attributes:
        address: where others reach it.
        held: copies, by job.
    """

    def __init__(
        self,
        copying: Copying,
        node_id: NodeId,
        address: str,
        *,
        post: Callable[[AgentEvent], None],
        is_up: Callable[[], bool],
        has_memory: Callable[[JobId], bool],
    ) -> None:
        """Hold nothing, and be found under this address.

        Args:
            copying: of the run.
            node_id: whose.
            address: where others reach it.
            post: takes events for the agent's machine.
            is_up: whether the agent runs, and is reached.
            has_memory: whether workers of a job run here.
        """
        self.node_id, self.address, self.is_up = node_id, address, is_up
        self.held: dict[JobId, Age] = {}
        self._keys: dict[JobId, str] = {}
        self._orders: dict[JobId, Replicate] = {}
        self._copying, self._post, self._has_memory = copying, post, has_memory
        copying.desks[address] = self

    def died(self) -> None:
        """The agent is gone, and its memory."""
        self.held, self._keys, self._orders = {}, {}, {}

    def perform(self, order: CopyOrder) -> None:
        """Do what the agent's machine says."""
        job_id = order.job_id
        if isinstance(order, KeepCopy):
            self._keys[job_id] = order.key
        elif isinstance(order, DropCopy):
            self._keys.pop(job_id, None)
            age = self.held.pop(job_id, None)
            if age is not None:
                self._copying.checkers.copy_freed(job_id, self.node_id, age)
                self._post(CopiesChanged(self._all()))
        elif not order.address:
            self._orders.pop(job_id, None)
        elif self._orders.get(job_id) != order:
            self._orders[job_id] = order
            self._copying.timeline.after(LOOK_NS, self._look, order, None, 0)

    def take(self, job_id: JobId, key: str, age: Age, source: NodeId) -> bool:
        """A copy comes; returns whether it is taken."""
        known = self.held.get(job_id, (0, 0))
        if not self.is_up() or self._keys.get(job_id) != key or known[0] > age[0]:
            return False
        self._copying.checkers.copy_taken(job_id, self.node_id, age, source)
        self.held[job_id] = age
        self._post(CopiesChanged(self._all()))
        return True

    def give(self, job_id: JobId, key: str) -> Age | None:
        """A worker fetches; returns what it gets."""
        return self.held.get(job_id) if self._keys.get(job_id) == key and self.is_up() else None

    def _all(self) -> tuple[HeldCopy, ...]:
        return tuple(HeldCopy(job_id, *age) for job_id, age in self.held.items())

    def _look(self, order: Replicate, last: Age | None, failing_ns: int) -> None:
        """Push what is newer than what was pushed, and look again; ends with its order."""
        if self._orders.get(order.job_id) is not order:
            return
        trained, now_ns = self._copying.trained(order.job_id), self._copying.timeline.now_ns
        if not self._has_memory(order.job_id):
            del self._orders[order.job_id]  # It is told anew with the next group.
            return
        is_new = (
            trained is not None
            and self.node_id in trained.nodes
            and trained.steps_done > 0
            and (last is None or trained.age[0] != last[0] or _is_due(order, trained.age, last))
        )
        if self.is_up() and trained is not None and is_new:
            holder = self._copying.desks[order.address]
            if holder.take(order.job_id, order.key, trained.age, self.node_id):
                last, failing_ns = trained.age, 0
            elif not failing_ns:
                failing_ns = now_ns
            elif now_ns - failing_ns >= PATIENCE_NS:
                failing_ns = now_ns
                self._post(PushFailed(order.job_id, order.node_id, "no answer"))
        self._copying.timeline.after(LOOK_NS, self._look, order, last, failing_ns)


def _is_due(order: Replicate, age: Age, last: Age) -> bool:
    return age[1] // order.every_n_steps > last[1] // order.every_n_steps
