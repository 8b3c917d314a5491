"""Basic data types: node, worker, group, job. Frozen, no behaviour beyond validation.

Rule: everything here is a value. Two objects with equal fields are equal, on every machine and in
every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NewType

from elastic.errors import ConfigError

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
WorkerId = NewType("WorkerId", str)
SessionId = NewType("SessionId", str)
"""One connection of one agent to one coordinator; late messages over an old one are ignored."""
Generation = int
"""Number of a group: grows by one with every change of membership, never reused; 0 means none."""

NO_GENERATION: Generation = 0
NO_JOB = JobId("")
ALL_ALIKE = NodeId("")
"""The source of unsharded state, which all members of a group have."""
MILLI = 1000


@dataclass(frozen=True)
class Resources:
    """Named amounts such as GPU, CPU or "memory_gb", kept in thousandths so that sums are exact.

    Attributes:
        milli: (name, thousandths) pairs, sorted by name, zero amounts left out.
    """

    milli: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, amounts: Mapping[str, float]) -> Resources:
        """Build from plain numbers; ConfigError if an amount is negative or not a number."""
        pairs = []
        for name in sorted(amounts):
            amount = amounts[name]
            if not amount >= 0 or amount == float("inf"):
                raise ConfigError(f"resource {name}={amount}: expected a finite number >= 0")
            if round(amount * MILLI):
                pairs.append((name, round(amount * MILLI)))
        return cls(tuple(pairs))

    def as_dict(self) -> dict[str, float]:
        return {name: amount / MILLI for name, amount in self.milli}

    def amount(self, name: str) -> float:
        """Return one amount, 0.0 if there is none."""
        return dict(self.milli).get(name, 0) / MILLI

    def minus(self, other: Resources) -> Resources:
        """Return the difference; amounts below zero become zero."""
        mine = dict(self.milli)
        for name, amount in other.milli:
            mine[name] = max(0, mine.get(name, 0) - amount)
        return Resources(tuple((name, mine[name]) for name in sorted(mine) if mine[name]))


@dataclass(frozen=True)
class Node:
    """A machine (or container) that runs one agent, as that agent describes it.

    Attributes:
        node_id: unique in the cluster; by default the host name.
        incarnation: identifies a run of the agent; a later one has a greater number.
        host: address under which workers of other nodes reach this node's workers.
        num_slots: how many workers may run here at once.
        resources: total of this node.
        labels: free (name, value) pairs for selectors, sorted.
        accelerator_type: such as "H100", "" for none.
        version: version of elastic-torch that the agent runs.
    """

    node_id: NodeId
    incarnation: int
    host: str
    num_slots: int
    resources: Resources = field(default_factory=Resources)
    labels: tuple[tuple[str, str], ...] = ()
    accelerator_type: str = ""
    version: str = ""


ZONE_LABELS = ("zone", "topology.kubernetes.io/zone")
"""Labels that name a node's failure domain: a rack, a room, a cloud's zone."""
NO_ZONE = ""


def zone_of(labels: Sequence[tuple[str, str]]) -> str:
    """Return the zone that a node's labels name, `NO_ZONE` for none."""
    known = dict(labels)
    return next((known[name] for name in ZONE_LABELS if known.get(name)), NO_ZONE)


class NodePhase(Enum):
    """The phase of a node, as the coordinator sees it."""

    READY = "ready"
    DISCONNECTED = "disconnected"
    """The stream broke; the node is lost if it does not reconnect in time."""
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"
    """Drained, and released by the coordinator."""


class WorkerPhase(Enum):
    """The phase of a worker; the legal transitions are in `transitions.WORKER`."""

    STARTING = "starting"
    READY = "ready"
    """Waits for a generation: new, or it left one at a boundary or by order."""
    FORMING = "forming"
    TRAINING = "training"
    BROKEN = "broken"
    """The train function was left because the group broke; waits for the next generation."""
    FINISHED = "finished"
    """The train function returned; the process waits for its end, or for another generation."""
    EXITED = "exited"


class ExitKind(Enum):
    """Why a worker process ended."""

    CODE = "code"
    """It ended with an exit code."""
    SIGNAL = "signal"
    STOPPED = "stopped"
    """Ended by order of the coordinator."""
    HUNG = "hung"
    """Killed because it stalled: stopped (SIGSTOP), no answer, or all others waited for it."""
    LOST = "lost"
    """Its node is gone."""
    SPAWN_FAILED = "spawn_failed"


@dataclass(frozen=True)
class ExitCause:
    """How a worker ended.

    Attributes:
        kind: the category, input of the failure policy.
        code: exit code for CODE, signal number for SIGNAL, else 0.
        detail: for people.
    """

    kind: ExitKind
    code: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Failure:
    """An exception that user code raised, as text.

    Attributes:
        error_type: qualified class name.
        message: `str(error)`, cut at 4,000 characters.
        traceback: formatted, cut at 32,000 characters from the front.
        position: where in the run it happened, such as "report 7", to recognise repetitions.
        damaged: path of the run's newest reported checkpoint if reading it led to this: its files
            differ from its marker.
    """

    error_type: str
    message: str
    traceback: str = ""
    position: str = ""
    damaged: str = ""


@dataclass(frozen=True)
class WorkerReport:
    """The complete state of a worker; a later report replaces an earlier one.

    Attributes:
        worker_id: "node/serial".
        generation: of the group it is, or was last, part of; 0 before the first.
        store_address: "host:port" of the rendezvous store it serves, "" before READY.
        pid: operating system's id, 0 before the process has started.
        exit: how it ended; set exactly when phase is EXITED.
        failure: the exception that user code raised, if it did.
        result: JSON of what the train function returned, set when FINISHED.
        left: how and where it left the train function, for people; set when FINISHED.
        in_place: its training loop continues when the group changes.
        copies_every: requested interval, in steps, of copies of the state on another node; 0 for
            none.
        copies_sharded: each node has only its own rows of that state, and each needs a copy.
        micro_batches: per step of its loop, and so the maximum number of workers of the group; 0
            while unknown.
        spent: its process has run the script or train function, outside of a loop that continues,
            and cannot run it again: another process replaces it in the next group.
    """

    worker_id: WorkerId
    job_id: JobId
    phase: WorkerPhase
    generation: Generation = NO_GENERATION
    store_address: str = ""
    pid: int = 0
    exit: ExitCause | None = None
    failure: Failure | None = None
    result: str = ""
    in_place: bool = False
    copies_every: int = 0
    copies_sharded: bool = False
    micro_batches: int = 0
    left: str = ""
    spent: bool = False


@dataclass(frozen=True)
class HeldCopy:
    """A snapshot of a job's state in the memory of a node that did not take it.

    Attributes:
        generation: of the group that took it.
        steps: of the run, committed when it was taken.
        source: the node that took it, if every node has its own rows; "" if all have the same.
    """

    job_id: JobId
    generation: Generation
    steps: int
    source: NodeId = ALL_ALIKE


@dataclass(frozen=True)
class Member:
    """A worker's place in a group; ranks count from 0 and are dense."""

    worker_id: WorkerId
    node_id: NodeId
    rank: int
    store_address: str


@dataclass(frozen=True)
class Group:
    """The workers that train together, by rank.

    Attributes:
        generation: >= 1.
        members: sorted by rank; rank 0 leads the rendezvous.
        reason: why this group was formed.
        key: with which its members authenticate to each other; a secret. Durable with the group,
            since another coordinator may continue to announce it.
    """

    generation: Generation
    members: tuple[Member, ...]
    reason: str = ""
    key: str = field(default="", repr=False)

    def worker_ids(self) -> tuple[WorkerId, ...]:
        return self._ids

    @cached_property
    def _ids(self) -> tuple[WorkerId, ...]:
        return tuple(member.worker_id for member in self.members)

    @cached_property
    def ranks(self) -> Mapping[WorkerId, int]:
        return {member.worker_id: member.rank for member in self.members}

    @cached_property
    def nodes(self) -> Mapping[WorkerId, NodeId]:
        return {member.worker_id: member.node_id for member in self.members}


@dataclass(frozen=True)
class LeavingNode:
    """A node that is about to leave, and the ranks of a group on it.

    Attributes:
        ranks: sorted; of the group whose members are notified.
    """

    node_id: NodeId
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """The data for one worker to join a group; its size does not grow with the group.

    Attributes:
        leader_address: "host:port" of rank 0's store.
        reported_checkpoint: path of the newest reported checkpoint that is recorded, or of the one
            that the job resumes from; "" for none.
        cause: one word for logs and counters: start, lost, join, drain, broken, resume.
        automatic_checkpoint: path of the newest automatic checkpoint that is recorded; "" for none.
        copies: "host:port" of the agents with a copy of the job's state, and of those with rows of
            a sharded model that this worker queries: other members query others.
        copies_key: authenticates the job to them; a secret.
        node_devices: accelerators that the job's workers of this node have, in the order of the
            workers; the agent adds them.
        group_key: with which the members authenticate to each other; a secret.
        holders: members that trained in a group before, and so have the state; 0 if unknown.
        copied: the newest copy with those agents of state that all members share, None for none.
    """

    job_id: JobId
    worker_id: WorkerId
    generation: Generation
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    leader_address: str
    reported_checkpoint: str = ""
    cause: str = "start"
    copies: tuple[str, ...] = ()
    copies_key: str = field(default="", repr=False)
    node_devices: tuple[str, ...] = ()
    group_key: str = field(default="", repr=False)
    automatic_checkpoint: str = ""
    holders: int = 0
    copied: HeldCopy | None = None


class Strategy(Enum):
    """How workers spread over nodes (Ray's names)."""

    PACK = "PACK"
    SPREAD = "SPREAD"
    STRICT_PACK = "STRICT_PACK"
    STRICT_SPREAD = "STRICT_SPREAD"


class EntryKind(Enum):
    """The kind of code that a worker runs."""

    FUNCTION = "function"
    """`payload` is what `pack` returned: a train function, its config, and more."""
    SCRIPT = "script"
    MODULE = "module"


@dataclass(frozen=True)
class Entry:
    """The entry point of a job.

    Attributes:
        kind: what `target` and `payload` mean.
        target: path of the script, dotted name of the module, or the function's name for people.
        args: command line arguments for a script or a module.
        payload: the pickled arguments of a function's driver, then the function and its config.
        working_dir: directory to run in, "" for the agent's own.
        python_path: directories put before sys.path.
        env: (name, value) pairs for the worker's environment.
        imports: installed modules that a function imports or uses; a node's spares import them
            before they have a place.
    """

    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()
    payload: bytes = b""
    working_dir: str = ""
    python_path: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()


class CheckpointStatus(Enum):
    """The state of a reported checkpoint; automatic ones are never validated."""

    COMMITTED = "COMMITTED"
    """It counts, and no validation was requested."""
    PENDING_VALIDATION = "PENDING_VALIDATION"
    """It counts, and its validation is pending: until then it is not deleted."""
    VALIDATED = "VALIDATED"
    """Its metrics include the result of its validation."""
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


class ReportKind(Enum):
    """The kind of a worker's report; each kind is numbered separately."""

    SCRIPT = "script"
    """A call of `train.report`, with or without a checkpoint of the script."""
    AUTOMATIC = "automatic"
    """A checkpoint that the step engine took."""
    VALIDATION = "validation"
    """The result of the validation of a reported checkpoint."""


class RefusalCode(Enum):
    """Why the coordinator refuses a report, for programs."""

    NONE = "none"
    """It is accepted."""
    JOB_UNKNOWN = "job_unknown"
    JOB_ENDED = "job_ended"
    GENERATION_OVER = "generation_over"
    """The next group may report it again."""
    NO_MEMBER = "no_member"


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that the coordinator has recorded durably.

    Attributes:
        path: of its directory, as an fsspec path.
        generation: of the group that wrote it.
        index: of a reported one, the number of its report in its generation, from 0; of an
            automatic one, the number of the snapshot in the run.
        metrics: JSON object: reported with it, and by its validation.
        request: number of the newest checkpoint request that preceded it, 0 for none.
    """

    path: str
    generation: Generation
    index: int
    metrics: str = "{}"
    status: CheckpointStatus = CheckpointStatus.COMMITTED
    request: int = 0
    kind: ReportKind = ReportKind.SCRIPT

    @property
    def automatic(self) -> bool:
        """Return whether the step engine took it, rather than the script."""
        return self.kind is ReportKind.AUTOMATIC


SNAPSHOT_SLOTS = 2
"""Snapshots of a job in a node's memory: the newest one, and the one that is being written."""


class JobPhase(Enum):
    """The phase of a job; the legal transitions are in `transitions.JOB`."""

    PENDING = "pending"
    """No group yet, or none now: it waits for workers, see its reason."""
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    """Paused by a user; it continues from its checkpoint when a user resumes it."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


ENDED = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED)


@dataclass(frozen=True)
class CollectiveCount:
    """How many collectives a worker has begun in a group within its group.

    Of two of its members, the one that has begun more waits for the other, or soon will.

    Attributes:
        name: of the group, among those of the same ranks.
        ranks: of its members, ascending.
        count: of collectives, as torch counts them.
    """

    name: str
    ranks: tuple[int, ...]
    count: int


def host_of(address: str) -> str:
    """Return the host of "host:port"; an IPv6 host loses its brackets."""
    return address.rpartition(":")[0].strip("[]")


def sorted_pairs(
    pairs: Mapping[str, str] | Iterable[tuple[str, str]],
) -> tuple[tuple[str, str], ...]:
    """Return name-value pairs as the sorted tuple that facts carry."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return tuple(sorted((str(name), str(value)) for name, value in items))
