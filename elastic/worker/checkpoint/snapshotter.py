"""Automatic checkpoints: the state is copied between two steps, and written as training goes on.

This worker's share is copied into the agent's memory (`snapshot_slots`), mostly by a thread during
the next forward and backward (`snapshot_copier`). A thread of its own then writes this rank's part
to storage (`checkpoint_writer`); the thread of rank 0 waits for all parts, and has the checkpoint
committed (`committer`).

Until a snapshot is settled a member reports that it is busy, so that none overwrites the other slot
before all have marked this one; all mark it at the same commit.

Rule: no storage error or delay reaches the training loop. A snapshot that cannot be written is
reported and given up, and the last good checkpoint stays.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.saving import SavingPlan, is_due
from elastic.errors import StorageError
from elastic.runtime.snapshot_memory import SnapshotMark
from elastic.worker.base.mailboxes import WAIT_SLICE_S
from elastic.worker.base.spans import span
from elastic.worker.checkpoint.checkpoint_writer import CheckpointWriter, PartFailure
from elastic.worker.checkpoint.replication_progress import ReplicationProgress
from elastic.worker.checkpoint.snapshot import RankInfo, SnapshotId, StateSnapshot
from elastic.worker.checkpoint.snapshot_copier import BegunSnapshot, CopiedSnapshot, SnapshotCopier
from elastic.worker.checkpoint.snapshot_slots import SnapshotSlots
from elastic.worker.state.arena import SnapshotSlot
from elastic.worker.state.replica_checksums import NOTHING_OWN, PerRankState

log = logging.getLogger(__name__)

FINISH_S = 600.0
"""How long the end of a train function waits for what is still being written."""
FINISH_REPORTED_S = 10.0
"""How long it does so without a log line."""

LEAVING_S = 30.0
"""How long members of a sharded model that leave by plan wait for its checkpoint."""


@dataclass
class _Copying:
    """A snapshot that is copied beside the training loop.

    Attributes:
        begun: what is copied.
        pid, taker: the process and its training thread.
        copied: by the copying thread.
        end: has it marked and written, or reports why not.
        is_left: it was not waited for until the end: the state may have changed.
    """

    begun: BegunSnapshot
    pid: int
    taker: int
    copied: Future[CopiedSnapshot]
    end: Callable[[_Copying], None]
    is_left: bool = False

    def result(self) -> CopiedSnapshot:
        """Return what was copied; raises if that failed, or is not the state of the boundary."""
        if self.begun.has_changed():
            raise RuntimeError(
                "weights or optimizer state were changed before the next optimizer.step(): from "
                "here on snapshots are copied before the loop continues"
            )
        if self.is_left:
            raise RuntimeError("an interrupt ended the wait for its copy")
        return self.copied.result()


class Snapshotter:
    """The automatic checkpoints of one process, over all its groups.

    Attributes:
        plan: how often to storage.
        copies: how often to memory alone, from where the agent sends it to another node.
        arrival: whether the newest has come there, if that matters.
        newest: snapshot that this worker knows of; part of the run's state.
        lacks_newest: that one has come to nothing here.
        must_end_stored: this group's loop is over, and its last state is for storage.
        is_settled_by_all: all members are known to have settled what their group took last.
        slots: where they lie in memory.
    """

    def __init__(self, paths: Sequence[str], writer: CheckpointWriter | None) -> None:
        """Take nothing yet.

        Args:
            paths: of the agent's memory for the job, one for each slot; empty for our own.
            writer: writes to storage; None keeps snapshots in memory only.
        """
        self.plan, self.copies = SavingPlan(), SavingPlan()
        self.arrival = ReplicationProgress()
        self.newest = SnapshotId()
        self.lacks_newest = self.must_end_stored = False
        self.is_settled_by_all = True
        self.slots = SnapshotSlots(paths)
        self._writer, self._copier = writer, SnapshotCopier()
        self._rank_info = RankInfo()
        self._last_s = time.monotonic()
        self._served = 0
        self._is_warm = self._is_stored = False
        self._copying: _Copying | None = None
        # One has come to nothing because the script has changed weights.
        self._is_again = False

    def configure(self, options: Mapping[str, Any]) -> None:
        every_n, every_s = options.get("every_n_steps"), options.get("every_s")
        self.plan = SavingPlan(int(every_n or 0), float(every_s or 0.0))
        self.copies = SavingPlan(int(options.get("copies_every") or 0))

    def enter(self, rank_info: RankInfo) -> None:
        self.settle()
        # Our private memory holds all of the state: no other rank can write to it.
        self._rank_info = (
            rank_info
            if self.slots.are_shared
            else replace(rank_info, local_rank=0, local_world_size=1)
        )
        self._served = 0  # An unserved request is sent again to the next group.
        self.lacks_newest = self.must_end_stored = False
        self.is_settled_by_all = True
        self.slots.enter()
        self.arrival.forget()  # What this group continues from stays until it has taken two.
        if self._writer is not None:
            self._writer.generation = rank_info.generation

    def memory(self) -> int:
        """Return what identifies this node's shared memory, 0 if we have none."""
        identity = self.slots.identity()
        if not identity and self.slots.are_shared:
            self._use_own_memory()
        return identity

    def agree_on_memory(self, memories: Sequence[int]) -> None:
        """Do without the agent's memory for good, if not all workers of this node have it.

        Each would wait for the others' share of every snapshot otherwise.

        Args:
            memories: what `memory` returned, by rank.
        """
        rank_info = self._rank_info
        if not self.slots.are_shared or len(memories) != rank_info.world_size:
            return
        first = rank_info.rank - rank_info.local_rank
        here = set(memories[first : first + rank_info.local_world_size])
        if 0 in here or len(here) != 1:
            log.warning(
                "shared_memory_left: not all workers of this node have it; each keeps its "
                "snapshots in memory of its own, which ends with it"
            )
            self._use_own_memory()

    def _use_own_memory(self) -> None:
        self.slots.use_own()
        self._copier.forget_layout()
        self.arrival.is_awaited = False
        self._rank_info = replace(self._rank_info, local_rank=0, local_world_size=1)

    # ------------------------------------------------------------------- when

    def wants(self, steps: int, request: int) -> bool:
        """Return whether this worker asks for a snapshot after a step.

        Args:
            steps: committed in the run, with that step.
            request: number of the newest user request in this generation, 0 for none.
        """
        if request > self._served or self._is_again:
            return True
        waited_s = time.monotonic() - self._last_s if self._rank_info.rank == 0 else 0.0
        last_steps = self.newest.steps
        return is_due(self.plan, steps=steps, last_steps=last_steps, waited_s=waited_s).value

    def wants_copy(self, steps: int) -> bool:
        """Return whether a snapshot for another node is due after a step: alike on all members."""
        return is_due(self.copies, steps=steps, last_steps=self.newest.steps, waited_s=0.0).value

    def is_busy(self) -> bool:
        """Return whether no other one is begun now: storage, or another node, is slow.

        A snapshot that a user requested is not given up for a newer one, requested or not.
        """
        return self._is_full() or (self._writer is not None and self._writer.is_requested_for())

    def _is_full(self) -> bool:
        if not self.slots.are_open:
            return False
        if self._copying is not None:
            return True
        try:
            held = [s for s in self.slots.all() if self._is_being_written(s) or s.is_sent()]
            if held and self._next_place() in held:
                return True
            return self.arrival.is_missing()
        except OSError:
            return False  # The one that is taken then fails, and says why.

    def _next_place(self) -> SnapshotSlot | None:
        """Return where the next snapshot goes: what came to nothing here is taken again there."""
        return self.slots.last if self.lacks_newest else self.slots.next(self.newest.number + 1)

    def await_copies(self) -> None:
        """From here on no snapshot is begun before the one before has come to other nodes."""
        self.arrival.is_awaited = (
            self.slots.are_shared
        )  # The agent does not know memory of our own.

    def wait_for_room(self, is_over: Callable[[], bool], timeout_s: float = FINISH_S) -> None:
        """Wait until there is room for another one; not in a group that is over, nor for ever."""
        self.settle()
        deadline, writer = time.monotonic() + timeout_s, self._writer
        try:
            while self._is_full() and not is_over() and time.monotonic() < deadline:
                if writer is not None:
                    writer.is_awaited = True
                time.sleep(WAIT_SLICE_S)
        finally:
            if writer is not None:
                writer.is_awaited = False

    def wait_durable(
        self, is_over: Callable[[], bool], beat: Callable[[], None], timeout_s: float
    ) -> None:
        """Wait until what was taken is durable or given up; for a while, and in a living group."""
        self.settle()
        deadline = time.monotonic() + timeout_s
        while self._writer is not None and not self._writer.finish(WAIT_SLICE_S):
            if is_over() or time.monotonic() > deadline:
                return
            beat()

    def has_taken(self, steps: int) -> bool:
        """Return whether this group has taken one for storage after so many steps."""
        newest, group = self.newest, self._rank_info.generation
        return self._is_stored and (newest.steps, newest.generation) == (steps, group)

    def know_all_settled(self, *, is_lost: bool = False, gives_up: bool = False) -> None:
        """Know that all members have settled the newest snapshot.

        Args:
            is_lost: it has come to nothing on some, and counts as not taken.
            gives_up: it has come to nothing on some, and its rows of a sharded model are of use
                only together. So the next one gets the same number: it goes to the place of this
                one, also where that is whole, here and where it was copied to, and the one before
                it stays on all nodes. It has the same name in storage, too, if no step is between.
        """
        self.lacks_newest = False
        self.is_settled_by_all = True
        self.slots.know_all_settled()
        self._is_stored = self._is_stored and not is_lost
        if gives_up:
            self.newest = self.newest._replace(number=self.newest.number - 1)

    @property
    def refused(self) -> str:
        """Return why storage has refused this group's last one, "" if it has not."""
        return self._writer.refused if self._writer is not None else ""

    # ------------------------------------------------------------------- taking

    def warm_up(self, state: Callable[[], Any]) -> None:
        """Have memory found for snapshots, beside the training loop; once."""
        if self._is_warm or not (self.plan.is_on or self.copies.is_on):
            return
        self._is_warm = True
        self._copier.warm_up(state(), self._rank_info, self.slots.all)

    def take(
        self,
        state: Callable[[], Any],
        cursor: Cursor,
        steps: int,
        *,
        request: int = 0,
        about: Mapping[str, Any] | None = None,
        aliases: Sequence[Mapping[str, str]] = (),
        own: PerRankState = NOTHING_OWN,
        durable: bool = True,
        still: Iterable[torch.Tensor] | None = None,
    ) -> threading.Event:
        """Copy our share of the state, and have it written.

        All members of the group take the same snapshot.

        Args:
            state: returns the state; it must know what `newest` is then.
            cursor: where in the run this is.
            steps: committed in the run.
            request: the number of the request that this serves.
            about: values that people want to see beside it.
            aliases: see `checkpoint_files.write_shared_files`.
            own: see `replica_checksums.state_prints`.
            durable: False to leave it in memory only.
            still: what does not change before the caller has called `settle`, and may be copied
                until then; None to copy all of it now.

        Returns:
            Set once it is durable, or given up.

        Raises:
            UsageError: the state holds what cannot be saved.
            OSError: there is not enough memory, or the one before the last is still being written.
            RuntimeError: there is no thread to be had.
        """
        self.settle()
        # First of all: members agree on the number even if one of them cannot take it.
        rank_info = self._rank_info
        taken = self.newest = SnapshotId(self.newest.number + 1, steps, rank_info.generation)
        began, self._is_stored = time.monotonic(), durable
        self.is_settled_by_all = False
        if durable:
            self._last_s, self._served = began, max(request, self._served)
            self._is_again = False
        done = threading.Event()
        noted, others = dict(about or {}), tuple(aliases)

        def end(copied: CopiedSnapshot) -> None:
            mark, arrangement = copied.mark, begun.arrangement
            self.arrival.begin(mark, begun.slot)
            self._copier.mark(begun, mark)
            self.lacks_newest = False
            log.info(
                "snapshot number=%d epoch=%d step=%d bytes=%d ms=%.1f", mark.number, cursor.epoch,
                cursor.step, mark.data_bytes, (time.monotonic() - began) * 1e3,
            )  # fmt: skip
            if self._writer is None or not durable:
                done.set()
                return
            self._writer.put(
                StateSnapshot(
                    generation=rank_info.generation,
                    rank=rank_info.rank,
                    world_size=rank_info.world_size,
                    mark=mark,
                    slot=begun.slot,
                    layout=arrangement.layout,
                    pieces=arrangement.written,
                    skeleton=copied.skeleton,
                    cursor=cursor,
                    about=noted,
                    aliases=others,
                    done=done,
                    request=request,
                    prints=copied.prints,
                )
            )

        def end_later(copying: _Copying) -> None:
            try:
                end(copying.result())
            except Exception as error:
                log.warning("snapshot_failed steps=%d reason=%r", steps, str(error))
                if begun.has_changed():
                    self._copier.may_overlap, self._is_again = False, durable
                self._report_failed(taken.name, rank_info.rank, error, durable=durable)
                done.set()

        try:
            begun = self._begin(self.slots.take(taken.number), state(), own, still)
            if begun.versions is None:
                end(self._copier.copy(begun))
            else:
                copy = self._copier.copy_later(begun)
                taker = threading.get_ident()
                self._copying = _Copying(begun, os.getpid(), taker, copy, end_later)
        except Exception as error:
            self._report_failed(taken.name, rank_info.rank, error, durable=durable)
            raise
        return done

    def leave(self, state: Callable[[], Any], cursor: Cursor, steps: int) -> None:
        """Leave all of a state in the agent's memory, as this process is about to end.

        Arguments and errors are those of `take`. Other workers of the node may end like this at the
        same time, and one that lives may still copy its part of the snapshot before: that place is
        left alone.
        """
        if not self.slots.are_shared:
            return
        self.settle()
        self._rank_info = replace(self._rank_info, local_rank=0, local_world_size=1)
        self.slots.enter()
        with self.slots.all()[0].locked():
            place = self.slots.next(self.newest.number + 1)
            if steps > self.held() and not place.is_being_copied():
                self.take(state, cursor, steps, durable=False)

    def _report_failed(self, name: str, rank: int, error: Exception, *, durable: bool) -> None:
        """Let the others not wait for our part of a snapshot that we could not take."""
        self.lacks_newest = True
        if self._writer is not None and durable:
            with suppress(RuntimeError):  # There is no thread to be had.
                self._writer.fail_part(PartFailure(rank, name, str(error)))

    def settle(self) -> None:
        """Have what is copied beside the loop marked and written; then the state may change.

        Raises nothing but an interrupt. On other threads than the one that took it this waits for
        the copy alone.
        """
        copying = self._copying
        if copying is None or copying.pid != os.getpid():
            return  # A forked process has neither the thread nor the slot.
        try:
            with span("snapshot_wait"):
                wait([copying.copied])
        except BaseException:
            copying.is_left = True
            raise
        if copying.taker == threading.get_ident():
            self._copying = None
            copying.end(copying)

    def _begin(
        self,
        slot: SnapshotSlot,
        state: Any,
        own: PerRankState,
        still: Iterable[torch.Tensor] | None,
    ) -> BegunSnapshot:
        number, steps, _ = self.newest
        if self._is_being_written(slot):
            raise OSError(f"snapshot {number}: one in the same place is still being written")
        if 1 in (self.plan.every_n_steps, self.copies.every_n_steps):
            still = None  # Each would be waited for.
        return self._copier.begin(number, steps, state, self._rank_info, slot, own, still)

    def _is_being_written(self, slot: SnapshotSlot) -> bool:
        return self._writer is not None and self._writer.reads(slot)

    # ------------------------------------------------------------------- what is held

    def held(self) -> int:
        """Return the steps of the newest snapshot in this node's memory, -1 if there is none."""
        return max((mark.steps for _, mark in self.held_snapshots()), default=-1)

    def read_held(self, steps: int) -> tuple[str, Any]:
        """Return the state in this node's memory; see `SnapshotSlots.read`."""
        return self.slots.read(steps)

    def held_snapshots(self) -> list[tuple[SnapshotSlot, SnapshotMark]]:
        """Return the snapshots in this node's memory, newest first; none if it cannot be read."""
        self.settle()
        try:
            return self.slots.whole()
        except OSError as error:
            log.warning("snapshot_unreadable error=%r", str(error))
            return []

    # ------------------------------------------------------------------- the end

    def finish(self) -> None:
        """Wait until what was taken is durable, or given up.

        Raises:
            StorageError: storage has not taken the last one, which is of the end of the run.
        """
        self.settle()
        writer = self._writer
        if writer is None:
            return
        hangs = ""
        if not writer.finish(FINISH_REPORTED_S):
            log.warning(
                "checkpoint_awaited: the train function has returned, and its last checkpoint is "
                "still being written; waits for %.0f s at most",
                FINISH_S,
            )
            if not writer.finish(FINISH_S):
                log.warning("checkpoint_left: storage has not taken it in %.0f s", FINISH_S)
                hangs = f"storage has not taken it in {FINISH_S:.0f} s"
        if self.must_end_stored and (why := self.refused or hangs):
            raise StorageError(
                f"the state at the end of the run could not be stored ({why}): make room, or mend "
                f"the storage, and run it again under its name; it goes on from its newest "
                f"checkpoint"
            )

    def close(self) -> None:
        """Take nothing any more; memory and thread end with what is still being written."""
        self.slots.close()
        self._copier.close()
        if self._writer is not None:
            self._writer.close()
