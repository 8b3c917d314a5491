"""A model of what agents do about copies: memory that dies with the agent, and pushes to others.

Rule: a push arrives whole or not at all; it needs the key that the holder was told, a sender whose
workers make steps, and a way between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.core.copy_messages import CopyEndpoint, CopyOrder, DropCopy, KeepCopy, Replicate
from elastic.core.events.agent import AgentEvent, CopiesChanged, PushFailed
from elastic.core.policy.replication import CopyMode
from elastic.core.world import ALL_ALIKE, Assignment, Generation, HeldCopy, JobId, NodeId
from tests.simulation.checkers import Checkers
from tests.simulation.shards import Shards, Snapshot
from tests.simulation.world import MS, S, Timeline

POLL_NS = 200 * MS
TIMEOUT_NS = 3 * S
UNCOPIED_NS = 45 * S
"""A run whose state could lie on another node does so by then: a node that did not answer is
asked again after 30 s."""
STEPS_MIN = 40

PORT = "1"

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
        self.desks: dict[str, CopyHost] = {}
        self.shards = Shards(
            timeline, checkers, lambda: tuple(desk.node_id for desk in self.desks.values())
        )
        self._uncopied_since: dict[JobId, tuple[Generation, int]] = {}
        self._shown: dict[tuple[JobId, Generation], set[NodeId]] = {}
        self.is_wanted: Callable[[JobId], bool] = lambda job_id: True

    def reach(self, address: str, fingerprint: str) -> CopyHost | None:
        """Return who answers there, None if that is not whose certificate is looked for."""
        desk = self.desks[address]
        return desk if fingerprint == desk.endpoint.fingerprint else None

    def reached(self, assignment: Assignment) -> list[CopyHost]:
        """Return whom a member finds at the addresses that it was told."""
        prints = assignment.copies_fingerprints or ("",) * len(assignment.copies)
        found = [
            self.reach(address, fingerprint)
            for address, fingerprint in zip(assignment.copies, prints, strict=True)
        ]
        return [desk for desk in found if desk is not None]

    def fetch(self, assignment: Assignment) -> int:
        """Return the steps of the newest copy that a new group can be given, 0 for none."""
        found = [0]
        for desk in self.reached(assignment):
            held = desk.give(assignment.job_id, assignment.copies_key)
            found.append(held[1] if held is not None else 0)
        return max(found)

    def go_on(self, told: Mapping[int, Assignment], nodes: Sequence[NodeId], stored: int) -> int:
        """Return the steps that a group of a sharded model on these nodes goes on from.

        Args:
            told: what each member was told, by rank.
            nodes: of all.
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
        """A group was announced, when status has shown copies of the job on these nodes."""
        self._shown[job_id, generation] = {*shown}

    def forget_shown(self) -> None:
        """What is announced from here on may be told anew, by who knows of other copies."""
        self._shown.clear()

    def _check_asked(self, job_id: JobId, generation: Generation, asked: set[str]) -> None:
        """Each node that has rows, as anybody could see, was asked by one member of the group."""
        shown = self._shown.pop((job_id, generation), set())
        run = self.shards.runs.get(job_id)
        having = {holder for holder, _ in run.copies} if run is not None else set()
        for address, desk in self.desks.items():
            self.checkers.require(
                address in asked or desk.node_id not in shown & having or not desk.is_up(),
                "the group asks every node that has rows for them",
                f"job {job_id} generation {generation}: nobody asks {desk.node_id}",
            )

    def held(self, job_id: JobId) -> dict[NodeId, Age]:
        """Return who holds a copy of a job."""
        return {d.node_id: d.held[job_id] for d in self.desks.values() if job_id in d.held}

    def check_copied(self, job_ids: list[JobId]) -> None:
        """In the liveness phase: a run that could have a copy has one, after a while."""
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
        """Return whether its newest group has the copies that it could have."""
        up = [desk.node_id for desk in self.desks.values() if desk.is_up()]
        if job_id in self.shards.runs:
            return len(up) < 2 or self.shards.is_protected(job_id)
        generations = [age[0] for age in self.held(job_id).values()]
        return not set(up) - set(trained.nodes) or trained.age[0] in generations


class CopyHost:
    """One agent's side of it.

    Attributes:
        address: where others reach it.
        held: copies, by job.
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
        """Hold nothing, and be found at this host.

        Args:
            copying: of the run.
            node_id: whose.
            host: where others reach it.
            post: takes events for the agent's machine.
            is_up: whether the agent runs, and is reached.
            has_memory: whether workers of a job run here.
        """
        self.node_id, self.host, self.is_up = node_id, host, is_up
        self.life = 0
        self.held: dict[JobId, Age] = {}
        self._keys: dict[JobId, str] = {}
        self._orders: dict[JobId, Replicate] = {}
        self._copying, self._post, self._has_memory = copying, post, has_memory
        copying.desks[self.address] = self

    @property
    def address(self) -> str:
        """Return where it is found."""
        return f"{self.host}:{PORT}"

    @property
    def endpoint(self) -> CopyEndpoint:
        """Return what its agent tells in its hello: each life makes itself a certificate."""
        return CopyEndpoint(self.address, f"{self.node_id}-{self.life}")

    def died(self) -> None:
        """The agent is gone, and its memory."""
        self.held, self._keys, self._orders = {}, {}, {}
        self._copying.shards.died(self.node_id)

    def lose(self) -> None:
        """What it holds is gone, and nothing else."""
        self.held = {}
        self._copying.shards.lost(self.node_id)
        self._post(CopiesChanged(self._all()))

    def perform(self, order: CopyOrder) -> None:
        """Do what the agent's machine says."""
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
        """A copy comes; returns whether it is taken."""
        known = self.held.get(job_id, (0, 0))
        if not self.is_up() or self._keys.get(job_id) != key or known[0] > age[0]:
            return False
        self._copying.checkers.copy_taken(job_id, self.node_id, age, source)
        self.held[job_id] = age
        self._post(CopiesChanged(self._all()))
        return True

    def take_rows(self, job_id: JobId, key: str, one: Snapshot, source: NodeId) -> bool:
        """A copy of a node's rows comes; returns whether it is taken."""
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
        """Return whether this agent answers those who have the key."""
        return self._keys.get(job_id) == key and self.is_up()

    def give(self, job_id: JobId, key: str) -> Age | None:
        """A worker fetches; returns what it gets."""
        return self.held.get(job_id) if self.may_give(job_id, key) else None

    def jobs(self) -> set[JobId]:
        """Return whose copies it holds."""
        return {copy.job_id for copy in self._all()}

    def _all(self) -> tuple[HeldCopy, ...]:
        whole = tuple(HeldCopy(job_id, *age) for job_id, age in self.held.items())
        return (*whole, *self._copying.shards.held(self.node_id))

    def _show(self, job_id: JobId, bringing: CopyMode) -> None:
        """Let the workers see whether their rows are brought to another node."""
        run = self._copying.shards.runs.get(job_id)
        if run is not None:
            run.bringing[self.node_id] = bringing

    def _check_at_rows(self, order: Replicate, last: Snapshot | None, failing_ns: int) -> None:
        """Push this node's newest rows, and look again; ends with its order."""
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
        return self._copying.reach(order.address, order.fingerprint)

    def _check(self, order: Replicate, last: Age | None, failing_ns: int) -> None:
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
