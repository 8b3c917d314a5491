"""What a train function can know of its place in the run, and report about it.

Rule: a call of the train function has one in each group, also in a process without an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from elastic.core.facts import EntryKind, Generation, HeldCopy, JobId, WorkerId
from elastic.core.telemetry import CHECKPOINT_STALL
from elastic.errors import check
from elastic.worker.base.activity import Activity
from elastic.worker.base.timing import Timing
from elastic.worker.checkpoint.delivery import DeliveredParts
from elastic.worker.checkpoint.reported_checkpoints import ReportLink
from elastic.worker.checkpoint.reporting import Reporter
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.checkpoint.validating import Validator
from elastic.worker.group.peer_sockets import PeerAddress


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """One worker in one generation.

    Attributes:
        run_path: the run directory as an fsspec path, "" if the job has none.
        worker_id: "node/serial".
        cause: why this group was formed: start, lost, join, drain, broken, resume.
        local_rank, local_world_size: among the group's workers on this node.
        node_rank, num_nodes: of this node among the group's nodes.
        devices: accelerators that are this worker's own, such as ("cuda:3",); () on CPU.
        min_workers, max_workers: the smallest and the largest group that the job may have.
        entry_kind: what the job runs: a function, or a script or module of a command line.
        reach: how the other members reach this one.
        config: what the user gave to the train function; None for scripts.
        is_local: there is no agent; the train function runs in the user's own process.
        saved: path of the newest automatic checkpoint that is recorded, "" for none.
        copied: the newest of the copies below of state that all members share, None for none.
        copies: "host:port" of agents of other nodes that hold a copy of the run's state; of those
            that have rows of a sharded model, only our share.
        copies_key: proves to them that it is ours.
        validator: has reported checkpoints validated, over all calls of the train function; None
            without a run directory.
        join: puts a worker that runs ahead of its group into it, and returns the context there;
            None for one that has its place. Until then rank and world size mean nothing.
        show_group: ends that torch hides the group from a script that has not asked for it.
        shielded: returns a context manager in which the train function is not interrupted.
    """

    job_id: JobId
    job_name: str
    run_path: str
    worker_id: WorkerId
    generation: Generation
    cause: str
    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    devices: tuple[str, ...] = ()
    min_workers: int = 1
    max_workers: int = 1
    entry_kind: EntryKind = EntryKind.FUNCTION
    reach: PeerAddress = field(default_factory=PeerAddress)
    config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_local: bool = False
    saved: str = ""
    copied: HeldCopy | None = None
    copies: tuple[str, ...] = ()
    copies_key: str = field(default="", repr=False)
    reporter: Reporter | None = field(repr=False)
    link: ReportLink = field(repr=False)
    activity: Activity = field(default_factory=Activity, repr=False)
    snapshotter: Snapshotter = field(repr=False)
    validator: Validator | None = field(default=None, repr=False)
    join: Callable[[], WorkerContext] | None = field(default=None, repr=False)
    show_group: Callable[[], None] = field(default=lambda: None, repr=False)
    shielded: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, repr=False)

    @property
    def device(self) -> str:
        """Return the first accelerator of this worker, "cpu" if it has none."""
        return self.devices[0] if self.devices else "cpu"

    def report(
        self,
        metrics: str,
        checkpoint: str | DeliveredParts | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """Keep metrics, and commit a checkpoint with the other members; see `Reporter.report`.

        Not for a loop of ours: see `StepEngine.report`.

        Args:
            metrics: JSON object.
            checkpoint: local directory with this member's files, or how they come to the run
                directory; None for none.
            name: of the checkpoint's directory, None for one that is never used twice.

        Raises:
            StorageError: the checkpoint or the metrics could not be stored.
            GroupChanged: all members leave the group here.
        """
        self.timing.sees_no_steps()
        with self.stalls(checkpoint):
            self.the_reporter().report(metrics, checkpoint, name)

    def stalls(self, checkpoint: Any) -> AbstractContextManager[None]:
        """Return a context in which a report with this checkpoint is made."""
        return self.timing.spending(CHECKPOINT_STALL) if checkpoint is not None else nullcontext()

    def the_reporter(self) -> Reporter:
        check(self.reporter is not None, "a worker without a place in a group reports")
        return cast("Reporter", self.reporter)

    def note_step(self) -> None:
        """Count one iteration of a training loop without steps of ours."""
        self.timing.note_step()
        self.activity.has_stepped = True

    @property
    def timing(self) -> Timing:
        return self.activity.timing

    def at_boundary(self) -> bool:
        """Return whether a planned change waits for a boundary.

        If so, a report with a checkpoint now lets it happen at once. Other members may learn of
        it a moment earlier or later: it is a hint, and what all do is agreed in `report`.
        """
        return self.link.leave_request(self.generation) is not None
