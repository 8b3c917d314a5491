"""The step engine's side of automatic checkpoints: when one is taken.

Rule: whether a snapshot is taken is the same for all members: it follows from rows that everyone
has sent to everyone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elastic.core.events.worker import CopiesRequested, RequestLeave
from elastic.core.facts import NO_GENERATION
from elastic.core.policy.recovery import SavedPosition
from elastic.errors import InvariantViolation, UsageError
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.base.spans import span
from elastic.worker.checkpoint.snapshot import RankInfo, SnapshotId, position_of
from elastic.worker.checkpoint.snapshotter import FINISH_S, LEAVING_S, Snapshotter
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.run_state import RunState
from elastic.worker.engine.state_restore import StateRestorer
from elastic.worker.reduce.step_metadata import StepMetadata, send_metadata
from elastic.worker.state.replica_checksums import PerRankState
from elastic.worker.state.train_state import State

log = logging.getLogger(__name__)

WARM_UP_AT = 2
"""Steps of this process after which memory for snapshots is found: a recovery is over by then."""
FIRST_COPY_AT = WARM_UP_AT + 1
"""Steps of a group after which the rows of a sharded model, dealt anew, are copied at first."""


class CheckpointScheduler:
    """Automatic checkpoints of one call of the train function.

    Attributes:
        is_due: a snapshot is to be taken at this boundary.
        releases: all members leave at this boundary, and none continues soon.
    """

    def __init__(self, run: RunState) -> None:
        self.is_due = False
        self._is_stored = False
        self.releases = False
        # Of this process, for memory.
        self._boundaries = 0
        self._steps_here = 0
        # The generation in which copies were asked for, and whether of rows.
        self._requested_in, self._is_sharded = NO_GENERATION, False
        self._run = run
        self._entered: WorkerContext | None = None
        self._restorer = StateRestorer(run.objects)
        self._options: Mapping[str, Any] = {}

    @property
    def is_sharded(self) -> bool:
        """Return whether every member has rows of the model, and none all of it."""
        return self._run.objects.is_sharded

    def configure(self, options: Mapping[str, Any]) -> None:
        self._options = options
        if self._entered is not None:
            self._snapshotter.configure(options)

    def enter(self, context: WorkerContext) -> None:
        self._entered = context
        self._steps_here = 0
        self._snapshotter.configure(self._options)
        self._snapshotter.enter(
            RankInfo(
                context.generation,
                context.world_rank,
                context.world_size,
                context.local_rank,
                context.local_world_size,
            )
        )

    @property
    def _context(self) -> WorkerContext:
        if self._entered is None:
            raise InvariantViolation("checkpoints of a call that has entered no group")
        return self._entered

    @property
    def _snapshotter(self) -> Snapshotter:
        return self._context.snapshotter

    # ------------------------------------------------------------------- saving

    def flags(self, leave_request: RequestLeave | None) -> tuple[bool, bool, bool]:
        """Return what we send with a step, after which we know of this request to leave.

        These are `saves`, `busy` and `releases` of its row.
        """
        releases = leave_request is not None and leave_request.saves
        saves = self._snapshotter.wants(self._run.steps + 1, self._request())
        return saves, self._snapshotter.is_busy(), releases

    def committed(self, rows: Sequence[StepMetadata]) -> None:
        """Decide from everyone's rows whether the step that was just committed is saved."""
        self._steps_here += 1
        self._restorer.forget()
        self.releases = any(row.releases for row in rows)
        # Where a sharded group leaves, it is saved at once, see `before_leaving`: a second snapshot
        # of one boundary would take the place of the one before, while some still copy the first.
        leaves = any(row.requests for row in rows) and self.is_sharded
        self._is_stored = self.releases or leaves or any(row.saves for row in rows)
        has_room = self.releases or not any(row.busy for row in rows)  # A pause waits for room.
        self.is_due = (self._is_stored or self._is_copied()) and has_room

    def _is_copied(self) -> bool:
        """Decide whether the state is for another node; notify the coordinator that we want it."""
        snapshotter, context = self._snapshotter, self._context
        if not snapshotter.copies.is_on:
            return False
        if self._requested_in != context.generation:
            self._requested_in, self._is_sharded = context.generation, self.is_sharded
            if self._is_sharded:
                snapshotter.await_copies()
            context.link.post(CopiesRequested(snapshotter.copies.every_n_steps, self._is_sharded))
        is_first = snapshotter.newest.generation != context.generation
        if self._is_sharded and is_first and self._steps_here >= FIRST_COPY_AT:
            # Not only at the next multiple: until this group has a copy of its own, it depends on
            # the copy that it began from, which has lost a node already.
            return True
        return snapshotter.wants_copy(self._run.steps)

    def at_boundary(self, is_over: Callable[[], bool], *, goes_on: bool = False) -> None:
        """Take a snapshot if one is due: the user's code for the step is through.

        Storage is not waited for once the group `is_over`. If it `goes_on`, the caller calls
        `settle` before the state changes, or the script continues elsewhere than with the next
        step.
        """
        snapshotter = self._snapshotter
        if not self.is_due:
            self._boundaries += 1
            if self._boundaries == WARM_UP_AT:
                self._try(lambda: snapshotter.warm_up(self.take))
            return
        self.is_due, request = False, self._request()
        run, is_async = self._run, bool(self._options.get("async_save", True))
        goes_on = goes_on and is_async and not self.releases
        if self.releases:
            snapshotter.wait_for_room(lambda: self._goes_on(is_over), LEAVING_S)

        def take() -> None:
            with span("snapshot"):
                done = snapshotter.take(
                    self.take,
                    run.cursor,
                    run.steps,
                    request=request,
                    # Not by our own plan or request: it may reach some later.
                    durable=self._is_stored,
                    about=run.logbook.latest,
                    aliases=run.objects.aliases(),
                    own=PerRankState(run.objects.caches(), run.objects.own),
                    still=run.objects.still_between_steps() if goes_on else None,
                )
            while not is_async and not done.wait(WAIT_SLICE_S) and not is_over():
                self._show_progress()

        self._try(take)

    def _show_progress(self) -> None:
        """Count a wait for storage as progress, while the others wait for it in the next step."""
        activity = self._context.activity
        if activity.beats:  # At 0 it is not judged.
            activity.beats += 1

    def end(self, *, holds: bool) -> bool:
        """The last epoch is over: it is to be saved, unless this group has done that.

        What an earlier one began may have come to nothing, and nothing comes after this. If it
        `holds`, it is in memory also if nothing is saved: code that follows may change it.

        Returns:
            Whether members are to share before who lacks the newest snapshot: where they have left
            the pass early, they have not.
        """
        snapshotter = self._snapshotter
        self._is_stored = snapshotter.must_end_stored = snapshotter.plan.is_on
        self.is_due = (self._is_stored or holds) and not snapshotter.has_taken(self._run.steps)
        return self.is_due and not snapshotter.is_settled_by_all

    def at_end(self, is_over: Callable[[], bool]) -> None:
        """Save the last epoch where that is due."""
        if self.is_due:
            self._snapshotter.wait_for_room(is_over)
            self.at_boundary(is_over)

    def settle(self) -> None:
        self._snapshotter.settle()

    def lacks_newest(self) -> bool:
        """Return whether the newest snapshot of this group has come to nothing here."""
        self.settle()
        return self._snapshotter.lacks_newest

    def know_all_settled(self, lack: Iterable[float]) -> None:
        """All members have settled the newest snapshot, or `lack` it: it came to nothing there."""
        is_lost = any(lack)
        gives_up = is_lost and self.is_sharded
        self._snapshotter.know_all_settled(is_lost=is_lost and not gives_up, gives_up=gives_up)

    def know_broken(self) -> None:
        """The group broke at this boundary: what some lack is not known."""
        if self.is_sharded:  # Rows of which not all are taken might replace the newest whole ones.
            self.is_due = False

    def before_leaving(self, is_over: Callable[[], bool]) -> None:
        """Save the state that only the members have, because all of them leave here by plan.

        Those of a paused job end. Of a sharded model none could continue with its rows alone, and
        some may not come back. So they wait until it is durable.
        """
        snapshotter = self._snapshotter
        if not (self.releases or self.is_sharded):
            return
        if not snapshotter.has_taken(self._run.steps):
            snapshotter.wait_for_room(is_over, LEAVING_S)
            self.is_due = self._is_stored = True
            self.at_boundary(is_over)
        if self.releases:  # It has time, until the coordinator calls it off.
            snapshotter.wait_durable(lambda: self._goes_on(is_over), self._show_progress, FINISH_S)
        if self.is_sharded:  # Those that continue wait for it, too.
            snapshotter.wait_durable(is_over, self._show_progress, LEAVING_S)

    def _goes_on(self, is_over: Callable[[], bool]) -> bool:
        """Return whether a job that was to pause need not: its group is over, or it was called off.

        Others may have reported the pause to us before the coordinator does. Waiting is no hang.
        """
        self._show_progress()
        return is_over() or self._context.link.is_called_off(self._context.generation)

    def take(self) -> State:
        """Return the state of the run, with the newest snapshot; its tensors are the live ones."""
        return self._run.take(self._snapshotter.newest)

    def put(self, state: State) -> None:
        """Make this the state of the run, as far as this member is concerned.

        UsageError, and nothing was changed, if it is the state of other objects.
        """
        self.settle()
        with self._context.activity.working("moves the state that it received to its device"):
            self._run.put(state)
        self._snapshotter.newest = SnapshotId(*state["saved"])

    def agree_on_number(self, group: Any) -> None:
        """Know the newest snapshot that any member knows of; all members call this.

        One that is behind the last epoch may have taken one, and others that are before its
        gate have the same state without having received it. RuntimeError if the group
        broke.
        """
        rows = send_metadata(group, [float(one) for one in self._snapshotter.newest])
        self._snapshotter.newest = SnapshotId(*(int(one) for one in max(rows)[:3]))

    def newest_saved(self) -> SavedPosition:
        """Return the newest state of this job that is recorded, or copied to another node."""
        context = self._context
        copied, recorded = context.copied, position_of(context.saved, context.job_id)
        if copied is None:
            return recorded
        found = recorded, SavedPosition(copied.generation, copied.steps)
        return max(found, key=lambda one: one.steps)

    def held(self) -> int:
        return self._snapshotter.held()

    def memory(self) -> int:
        return self._snapshotter.memory()

    def agree_on_memory(self, memories: Sequence[int]) -> None:
        self._snapshotter.agree_on_memory(memories)

    def _request(self) -> int:
        return self._context.link.save_request(self._context.generation)

    def _try(self, take: Callable[[], None]) -> None:
        """Continue training without a checkpoint that cannot be taken."""
        try:
            take()
        except (UsageError, OSError, MemoryError, RuntimeError) as error:
            log.warning("snapshot_failed steps=%d reason=%r", self._run.steps, str(error))
        except Exception:
            # State_dict is the user's own, and may raise anything.
            log.exception("snapshot_failed steps=%d", self._run.steps)

    # ------------------------------------------------------------------- reading

    def restore(self, group: Any) -> State | None:
        """Return the newest saved state, None if there is none for us; see `StateRestorer`."""
        return self._restorer.restore(group, self._run.cursor, self._context, self._snapshotter)
