"""A model of agents' state copies: memory that is lost with the agent, and pushes to others.

Rule: a push arrives complete or not at all. It needs the key that the holder was sent, a sender
whose workers make steps, and a connection between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.core.copy_messages import CopyOrder, DropCopy, KeepCopy, Replicate
from elastic.core.events.agent import AgentEvent, CopiesChanged, PushFailed
from elastic.core.facts import ALL_ALIKE, Assignment, Generation, HeldCopy, JobId, NodeId
from elastic.core.policy.replication import CopyMode
from tests.simulation.checkers import Checkers
from tests.simulation.shards import Shards, Snapshot
from tests.simulation.world import MS, S, Timeline

POLL_NS = 200 * MS
TIMEOUT_NS = 3 * S
UNCOPIED_NS = 45 * S
"""Time within which a run has a copy on another node if one is possible: a node that did not
reply is asked again after 30 s."""
STEPS_MIN = 40

Age = tuple[Generation, int]


@dataclass(frozen=True)
class Trained:
    """The progress of a job in the data plane: its newest group that is not over."""

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
        """Start without nodes; `trained` returns the progress of a job."""
        self.timeline, self.checkers = timeline, checkers
        self.trained = trained
        self.desks: dict[str, CopyHost] = {}
        self.shards = Shards(
            timeline, checkers, lambda: tuple(desk.node_id for desk in self.desks.values())
        )
        self._uncopied_since: dict[JobId, tuple[Generation, int]] = {}
        self._shown: dict[tuple[JobId, Generation], set[NodeId]] = {}
        self.is_wanted: Callable[[JobId], bool] = lambda job_id: True

    def reach(self, address: str) -> CopyHost | None:
        """Return the host at an address, None if that agent was started anew since."""
        desk = self.desks[address.partition(":")[0]]
        return desk if address == desk.address else None

    def reached(self, assignment: Assignment) -> list[CopyHost]:
        """Return the hosts that a member reaches at the addresses in its assignment."""
        found = [self.reach(address) for address in assignment.copies]
        return [desk for desk in found if desk is not None]

    def fetch(self, assignment: Assignment) -> int:
        """Return the steps of the newest copy that a new group can fetch, 0 for none."""
        found = [0]
        for desk in self.reached(assignment):
            held = desk.give(assignment.job_id, assignment.copies_key)
            found.append(held[1] if held is not None else 0)
        return max(found)

    def go_on(self, told: Mapping[int, Assignment], nodes: Sequence[NodeId], stored: int) -> int:
        """Return the steps from which a group of a sharded model continues.

        Args:
            told: the assignment of each member, by rank.
            nodes: the nodes of all members.
            stored: steps of the newest checkpoint in storage.
        """
        key, job_id = max(one.copies_key for one in told.values()), told[0].job_id
        asked = {desk.address: desk for one in told.values() for desk in self.reached(one)}
        self._check_asked(job_id, told[0].generation, {*asked})
        desks = [asked[address] for address in sorted(asked)]
        holders = {desk.node_id for desk in desks if desk.may_give(job_id, key)}
        steps = self.shards.forms(job_id, told[0].generation, nodes, holders)
        if stored > steps:
            self.shards.from_storage(job_id, stored)
        return max(steps, stored)

    def formed(self, job_id: JobId, generation: Generation, shown: Iterable[NodeId]) -> None:
        """Record the nodes on which status showed copies of a job when a group was announced."""
        self._shown[job_id, generation] = {*shown}

    def forget_shown(self) -> None:
        """Forget these records: a new leader may announce again, and know of other copies."""
        self._shown.clear()

    def _check_asked(self, job_id: JobId, generation: Generation, asked: set[str]) -> None:
        """Check that one member of a group asked each node that had rows according to status."""
        shown = self._shown.pop((job_id, generation), set())
        run = self.shards.runs.get(job_id)
        having = {holder for holder, _ in run.copies} if run is not None else set()
        for desk in self.desks.values():
            self.checkers.require(
                desk.address in asked or desk.node_id not in shown & having or not desk.is_up(),
                "the group asks every node that has rows for them",
                f"job {job_id} generation {generation}: nobody asks {desk.node_id}",
            )

    def held(self, job_id: JobId) -> dict[NodeId, Age]:
        """Return the holders of copies of a job, with the ages of the copies."""
        return {d.node_id: d.held[job_id] for d in self.desks.values() if job_id in d.held}

    def check_copied(self, job_ids: list[JobId]) -> None:
        """Check, in the liveness phase, that a run has a copy after a while if it can."""
        now_ns = self.timeline.now_ns
        for job_id in job_ids:
            trained = self.trained(job_id)
            if (
                trained is None
                or trained.steps_done < STEPS_MIN
                or self._is_copied(job_id, trained)
            ):
                self._uncopied_since.pop(job_id, None)
                continue
            generation, since_ns = self._uncopied_since.get(job_id, (0, 0))
            if generation != trained.age[0]:
                self._uncopied_since[job_id] = (trained.age[0], now_ns)
            elif now_ns - since_ns > UNCOPIED_NS:
                self.checkers.never_copied(job_id, trained.age[0])

    def _is_copied(self, job_id: JobId, trained: Trained) -> bool:
        """Return whether a job's newest group has all copies that are possible."""
        up = [desk.node_id for desk in self.desks.values() if desk.is_up()]
        if job_id in self.shards.runs:
            return len(up) < 2 or self.shards.is_protected(job_id)
        generations = [age[0] for age in self.held(job_id).values()]
        return not set(up) - set(trained.nodes) or trained.age[0] in generations


class CopyHost:
    """One agent's copies and its pushes to others.

    Attributes:
        held: the copies that it holds, by job.
    """

    def __init__(
        self,
        copying: Copying,
        node_id: NodeId,
        host: str,
        *,
        post: Callable[[AgentEvent], None],
        is_up: Callable[[], bool],
        has_memory: Callable[[JobId], bool],
    ) -> None:
        """Create a host without copies and register it.

        Args:
            copying: the copies of the run.
            node_id: the agent's node.
            host: the host name at which others reach it.
            post: receives events for the agent's machine.
            is_up: returns whether the agent runs and is reachable.
            has_memory: returns whether workers of a job run here.
        """
        self.node_id, self.host, self.is_up = node_id, host, is_up
        self.life = 0
        self.held: dict[JobId, Age] = {}
        self._keys: dict[JobId, str] = {}
        self._orders: dict[JobId, Replicate] = {}
        self._copying, self._post, self._has_memory = copying, post, has_memory
        copying.desks[host] = self

    @property
    def address(self) -> str:
        """Return "host:port" for others; each life of the agent has another port."""
        return f"{self.host}:{self.life}"

    def died(self) -> None:
        """Drop all state: the agent has died, with its memory."""
        self.held, self._keys, self._orders = {}, {}, {}
        self._copying.shards.died(self.node_id)

    def lose(self) -> None:
        """Lose the copies that it holds, and nothing else."""
        self.held = {}
        self._copying.shards.lost(self.node_id)
        self._post(CopiesChanged(self._all()))

    def perform(self, order: CopyOrder) -> None:
        """Perform an order of the agent's machine."""
        job_id = order.job_id
        if isinstance(order, KeepCopy):
            self._keys[job_id] = order.key
        elif isinstance(order, DropCopy):
            known = [one for one in self._all() if order.source in (ALL_ALIKE, one.source)]
            if any(
                one.job_id == job_id and order.spares(one.generation, one.steps) for one in known
            ):
                return
            if self._copying.shards.freed(job_id, self.node_id, order.source):
                self._post(CopiesChanged(self._all()))
            if order.source:
                return
            self._keys.pop(job_id, None)
            age = self.held.pop(job_id, None)
            if age is not None:
                self._copying.checkers.copy_freed(job_id, self.node_id, age)
                self._post(CopiesChanged(self._all()))
        elif not order.address:
            self._orders.pop(job_id, None)
            self._show(job_id, CopyMode.OFF)
        else:
            self._orders[job_id] = order
            if run := self._copying.shards.runs.get(job_id):
                run.arrived.pop(self.node_id, None)
            self._show(job_id, CopyMode.ON)
            look = self._check_at_rows if order.source else self._check
            self._copying.timeline.after(POLL_NS, look, order, None, 0)

    def take(self, job_id: JobId, key: str, age: Age, source: NodeId) -> bool:
        """Receive a copy; return whether it is accepted."""
        known = self.held.get(job_id, (0, 0))
        if not self.is_up() or self._keys.get(job_id) != key or known[0] > age[0]:
            return False
        self._copying.checkers.copy_taken(job_id, self.node_id, age, source)
        self.held[job_id] = age
        self._post(CopiesChanged(self._all()))
        return True

    def take_rows(self, job_id: JobId, key: str, one: Snapshot, source: NodeId) -> bool:
        """Receive a copy of a node's rows; return whether it is accepted."""
        if not self.may_give(job_id, key):
            return False
        run = self._copying.shards.runs[job_id]
        known = run.copies.get((self.node_id, source), {}).values()
        if any(other.generation > one.generation for other in known):
            return False
        if one not in known:
            self._copying.shards.taken(job_id, self.node_id, source, one)
            self._post(CopiesChanged(self._all()))
        return True

    def may_give(self, job_id: JobId, key: str) -> bool:
        """Return whether this agent runs and has this key for the job."""
        return self._keys.get(job_id) == key and self.is_up()

    def give(self, job_id: JobId, key: str) -> Age | None:
        """Return the copy that a worker with this key can fetch, None for none."""
        return self.held.get(job_id) if self.may_give(job_id, key) else None

    def jobs(self) -> set[JobId]:
        """Return the jobs of which it holds copies."""
        return {copy.job_id for copy in self._all()}

    def _all(self) -> tuple[HeldCopy, ...]:
        whole = tuple(HeldCopy(job_id, *age) for job_id, age in self.held.items())
        return (*whole, *self._copying.shards.held(self.node_id))

    def _show(self, job_id: JobId, bringing: CopyMode) -> None:
        """Show the workers whether their rows are copied to another node."""
        run = self._copying.shards.runs.get(job_id)
        if run is not None:
            run.bringing[self.node_id] = bringing

    def _check_at_rows(self, order: Replicate, last: Snapshot | None, failing_ns: int) -> None:
        """Push this node's newest rows, and repeat until the order ends."""
        job_id, now_ns = order.job_id, self._copying.timeline.now_ns
        if self._orders.get(job_id) is not order:
            return
        if not self._has_memory(job_id):
            del self._orders[job_id]
            return
        one = self._copying.shards.to_push(job_id, self.node_id, order.generation)
        if self.is_up() and one is not None and one != last:
            holder = self._holder(order)
            if holder is not None and holder.take_rows(job_id, order.key, one, self.node_id):
                self._copying.shards.runs[job_id].arrived[self.node_id] = one
                self._show(job_id, CopyMode.ON)
                last, failing_ns = one, 0
            elif not failing_ns:
                failing_ns = now_ns
            elif now_ns - failing_ns >= TIMEOUT_NS:
                failing_ns = now_ns
                self._show(job_id, CopyMode.OFF)
                self._post(PushFailed(job_id, order.node_id, "no answer"))
        self._copying.timeline.after(POLL_NS, self._check_at_rows, order, last, failing_ns)

    def _holder(self, order: Replicate) -> CopyHost | None:
        return self._copying.reach(order.address)

    def _check(self, order: Replicate, last: Age | None, failing_ns: int) -> None:
        """Push the state if it is newer than the last push, and repeat until the order ends."""
        if self._orders.get(order.job_id) is not order:
            return
        trained, now_ns = self._copying.trained(order.job_id), self._copying.timeline.now_ns
        if not self._has_memory(order.job_id):
            del self._orders[order.job_id]  # The next group brings a new order.
            return
        is_new = (
            trained is not None
            and self.node_id in trained.nodes
            and trained.steps_done > 0
            and (last is None or trained.age[0] != last[0] or _is_due(order, trained.age, last))
        )
        if self.is_up() and trained is not None and is_new:
            holder = self._holder(order)
            if holder is not None and holder.take(
                order.job_id, order.key, trained.age, self.node_id
            ):
                last, failing_ns = trained.age, 0
            elif not failing_ns:
                failing_ns = now_ns
            elif now_ns - failing_ns >= TIMEOUT_NS:
                failing_ns = now_ns
                self._post(PushFailed(order.job_id, order.node_id, "no answer"))
        self._copying.timeline.after(POLL_NS, self._check, order, last, failing_ns)


def _is_due(order: Replicate, age: Age, last: Age) -> bool:
    return age[1] // order.every_n_steps > last[1] // order.every_n_steps
