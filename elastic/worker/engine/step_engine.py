"""The step engine: a plain training loop goes through kills, joins and drains without leaving it.

One object per call of the train function. The loop asks it for micro-batches and reports its
optimizer steps; in between it reduces gradients, commits, and, whenever the group is over, joins
the next one, receives state if it is behind, and does the broken step again.

It has two APIs. A plain loop reads micro-batches, and asks in each iteration for everything that
happens once in a step (`micro_batches`). A loop over steps computes all micro-batches of one, and
asks once, when nothing of it needs another rank any more (`steps`).

What a call of the loop is worth is decided by the step machine (`elastic.core.machine.step`): here
its effects are performed.

Rule: state changes in one place, `_commit`, and groups change in one place, `_change_group`, which
is reached only while the loop asks for its next micro-batch. There the user's code for the last
one is through, and all state belongs to whole steps.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from elastic.core.events.step import (
    Abandon,
    CheckRates,
    CloseReceived,
    CloseStep,
    Commit,
    CommitRequested,
    EmptyStepRequested,
    GradientsRequested,
    GradientsSettled,
    GroupBroke,
    GroupLeft,
    HoldGradients,
    IterationClosed,
    KeepStep,
    LoopBegan,
    MicroBatchComputed,
    MicroBatchOpened,
    PassLeft,
    Refuse,
    SettleGradients,
    SettleStep,
    StepCommitted,
    StepEffect,
    StepEvent,
    StepReceived,
    StepRequested,
    StepSettled,
    StepSkipped,
    TakeGradients,
)
from elastic.core.events.worker import MicroBatchesDeclared
from elastic.core.facts import NO_GENERATION
from elastic.core.machine.step import AT_STEP, StepMachine
from elastic.core.machine.transitions import StepPhase
from elastic.core.policy.cursor import Cursor
from elastic.core.policy.microbatch import deal
from elastic.core.policy.program_points import CodePart, ProgramPoint
from elastic.core.policy.seeds import (
    epoch_seed,
    evaluation_seed,
    gradients_seed,
    micro_batch_seed,
    step_begin_seed,
)
from elastic.core.policy.streams import Data
from elastic.core.telemetry import (
    CHECKPOINT_STALL,
    DATA_WAIT,
    REFORM,
    RESTORE,
    UNSAVED_CHARS_MAX,
    USER,
    Telemetry,
)
from elastic.errors import GroupError, InvariantViolation, UsageError, check
from elastic.worker.base.interrupt import GroupChanged
from elastic.worker.base.spans import span
from elastic.worker.base.timing import COMPUTE
from elastic.worker.checkpoint.delivery import NO_PART
from elastic.worker.data.randomness import seed_everything
from elastic.worker.data.seeding import seed_step
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.data.streams import MicroBatches
from elastic.worker.engine import usage_errors
from elastic.worker.engine.checkpoint_schedule import CheckpointScheduler
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.divergence import Divergence, differ
from elastic.worker.engine.engine_parts import (
    EngineOptions,
    EpochLoop,
    Iteration,
    OptimizerCall,
    PassPhase,
    PresentGroup,
    RunningLoop,
)
from elastic.worker.engine.group_sync import (
    note_loop_begun,
    others_have_begun,
    share_book,
    share_latest,
)
from elastic.worker.engine.loop_guard import LoopGuard
from elastic.worker.engine.outcome import is_group_broken
from elastic.worker.engine.prepared_optimizers import (
    adopt_optimizer,
    adopt_scheduler,
    captures_wait,
    data_waits,
    modules_know,
    scalers_know,
    scalers_noted,
    unprepared_refused,
)
from elastic.worker.engine.recovery_modes import GroupProvider, ReenterRequested, ResumeState
from elastic.worker.engine.resume_point import ResumePoint
from elastic.worker.engine.run_state import RunState
from elastic.worker.engine.state_recovery import catch_up
from elastic.worker.engine.step_values import StepValues
from elastic.worker.engine.whole_step import WholeStep
from elastic.worker.group.abortable_wait import checked
from elastic.worker.group.c10d import default_group
from elastic.worker.reduce.reducer import Reducer
from elastic.worker.reduce.sharded_reduce import Padding, ShardedReducer, make_reducer, recovery_of
from elastic.worker.reduce.step_metadata import (
    StepMetadata,
    halves,
    rates_print,
    read_rows,
    send_metadata,
    whole,
)
from elastic.worker.reduce.step_share import StepShare, WeighedShare
from elastic.worker.reduce.tree_exchange import MicroBatchPartition
from elastic.worker.state.pending_steps import PendingOptimizerSteps, has_gradients
from elastic.worker.state.train_state import OptimizerUnit, State, Stateful, TrainState

log = logging.getLogger(__name__)

T = TypeVar("T")

ASK_EVERY_S = 1.0
"""How often a collective before the loop asks the group's store whether others are in it."""


class StepEngine:
    """What the prepared objects of one call of the train function share.

    Attributes:
        run: the state of the run, as we have it.
        groups: where groups come from.
        options: what the user chose.
        at_close: what is to be done at the end of the call.
        at_boundary: called before each iteration and before the end of an epoch, and where a step
            is dealt out anew: all state is of whole steps, and this worker's place is known.
        is_checkpoint_read: the script has asked for a reported checkpoint.
    """

    def __init__(self, groups: GroupProvider, *, resume_state: ResumeState | None = None) -> None:
        """Begin; `enter` sets the group.

        Args:
            groups: where groups come from.
            resume_state: what an earlier call of the train function has reached in this process.
        """
        # Loaders that are asked for the steps of an epoch before the loop know of it from then on.
        streams = resume_state.streams if resume_state is not None else StreamBook()
        self.run = RunState(TrainState(), streams)
        self.groups = groups
        self.options = EngineOptions()
        self.at_close = ExitStack()
        self.at_boundary: Callable[[], None] = lambda: None
        self.is_checkpoint_read = False
        self._context: WorkerContext | None = None
        self._checkpoints = CheckpointScheduler(self.run)
        self._pending = PendingOptimizerSteps()
        self._divergence = Divergence(self.state)
        self._resume_point = ResumePoint(self.run, self._divergence, resume_state)
        self._loop: RunningLoop | None = None
        self._epochs = EpochLoop()
        self._group = PresentGroup()
        self._iteration = Iteration()
        self._machine = StepMachine()
        self.at_close.enter_context(checked(self._check_others_come, while_waiting=True))
        self.at_close.enter_context(scalers_noted(self.state.note_scaler))

    def configure(self, options: Mapping[str, Any]) -> None:
        """Take what the user chose, from what is known of this call."""
        kept = self.state_survives_here
        self.options = self.options.with_those_of(options)
        self._checkpoints.configure(options)
        if self.state_survives_here and not kept:
            self.groups.declare(in_place=False)

    def enter(self, context: WorkerContext) -> None:
        self._context = context
        self._checkpoints.enter(context)
        if context.reporter is not None:
            context.reporter.add_metadata(dict(self.options.metadata))

    def close(self) -> None:
        """The call of the train function is over, however it ended; again is no harm."""
        self._end()
        self.at_close.close()

    @property
    def state(self) -> TrainState:
        """Return the prepared and registered objects."""
        return self.run.objects

    @property
    def cursor(self) -> Cursor:
        return self.run.cursor

    @property
    def data(self) -> Data | None:
        """Return how the data is cut, None while no loader was read."""
        return self.run.data

    @property
    def has_begun(self) -> bool:
        """Return whether the loop over epochs runs, so that groups change in place."""
        return self._loop is not None

    @property
    def state_survives_here(self) -> bool:
        """Return whether what is reached stays in this process.

        The loop has begun, or the user has the train function called again here.
        """
        is_called_again = self._resume_point.given is not None
        has_begun = self.has_begun or self._epochs.is_over
        return has_begun or is_called_again or self.options.recovery == "reenter"

    def bytes_sent(self) -> int:
        """Return the bytes of gradients that this rank has sent in its group."""
        return self._the_reducer().bytes_sent

    # ------------------------------------------------------------------- objects, before the loop

    def add_model(self, model: nn.Module) -> None:
        """Let a model's parameters and buffers be part of the run's state."""
        usage_errors.check_early("prepare_model", self.has_begun)
        self.state.models.append(model)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step once for each step; UsageError if it is prepared already."""
        usage_errors.check_early("prepare_optimizer", self.has_begun)
        adopt_optimizer(optimizer, self)
        self.state.optimizers.append(optimizer)

    def add_scheduler(self, scheduler: Any) -> None:
        """Let a scheduler step once for each step or epoch; UsageError if it is none."""
        usage_errors.check_early("prepare_scheduler", self.has_begun)
        adopt_scheduler(scheduler, self)
        self.state.schedulers.append(scheduler)

    def add_scaler(self, scaler: Stateful) -> None:
        """Let a scaler's state be part of the run's."""
        self.state.add_scaler(scaler)

    def register(self, name: str, thing: Stateful, *, is_own: bool = False) -> None:
        """Let an object of the user's own be part of the run's state; see `TrainState.register`."""
        usage_errors.check_early("train.register", self.has_begun)
        self.state.register(name, thing, is_own=is_own)

    # ------------------------------------------------------------------- epochs

    def epochs(
        self, total: int, start: int = 0, step: int = 0, *, is_users: bool = False
    ) -> Iterator[int]:
        """Yield the numbers of the epochs that are left to do; see `train.epochs`.

        Args:
            total: epochs of the whole run.
            start: first epoch if no worker has the run's state.
            step: steps of that epoch that are done already.
            is_users: the loop is the script's own, and no framework's, which keeps more.
        """
        self.run.cursor = max(self.cursor, Cursor(start, step))
        if not self.state.optimizers:
            raise usage_errors.no_optimizer()
        self._epochs.total = total
        self._begin(is_users=is_users)
        try:
            while self.cursor.epoch < total:
                epoch = self._epochs.epoch = self.cursor.epoch
                self._epochs.pass_phase = PassPhase.AHEAD
                # A member that joins later runs this code, too, and with the same random numbers.
                seed_everything(epoch_seed(self.options.seed, epoch, is_over=False))
                self._epochs.has_head = self.run.begun == epoch
                self._keep_for_code()
                yield epoch
                self._epochs.close_pass()
                self.check_left()
                self._the_loop().guard.close_epoch()
                if self.cursor.epoch == epoch:
                    self.run.cursor = Cursor(epoch + 1, 0)
                self._set_whole()
            with self.context.timing.spending(CHECKPOINT_STALL):
                holds = not (self._resume_point.is_small or self.context.is_local)
                asks = self._checkpoints.end(holds=holds)
                if asks and self._together(self._share_at_boundary) is None:
                    self._checkpoints.know_broken()
                self._checkpoints.at_end(self._is_broken)
            self._keep_for_code()
        finally:
            self._end()

    def _begin(self, *, is_users: bool) -> None:
        """Meet the group: everyone's objects are prepared, and get the same state."""
        if self.has_begun:
            raise UsageError("train.epochs: a loop over it is running already")
        if self._epochs.is_over:
            raise usage_errors.second_loop()
        guard = LoopGuard(self.state, looks=is_users and self._resume_point.given is None)
        recovery = recovery_of(self.state, self.options.recovery)
        self._loop = self._make_loop(guard)
        self.options = replace(self.options, recovery=recovery)
        self.groups.declare(in_place=self.options.is_in_place)
        self.groups.defer(self.options.is_in_place)
        if self.context.join is not None:
            self.context.join()  # Everything is built: from here on the others may wait for us.
        resume_state = self._resume_point.given
        if resume_state is not None:
            # An interrupt between two tensors would leave a state of no step.
            with self.context.shielded():
                self.run.go_on(resume_state)
                self._resume_point.given = None
            if resume_state.generation == self.context.generation:
                self._group.program_points = resume_state.program_points
                self._attach()
                return
        self._change_group(is_first=True)

    def _make_loop(self, guard: LoopGuard) -> RunningLoop:
        units = self.state.begin()
        reducer, padding = self._make_reducer(units)
        with ExitStack() as patches:
            patches.enter_context(scalers_know(self))
            patches.enter_context(
                modules_know(lambda zeroed: self._the_reducer().parameters_zeroed(zeroed))
            )
            names = self._divergence.begin()
            patches.enter_context(unprepared_refused(names, self._is_committing))
            patches.enter_context(data_waits(self._checkpoints.settle, guard.still))
            patches.enter_context(captures_wait(self._checkpoints.settle))
            patches.enter_context(checked(self._check_collective))
            self._take(LoopBegan(len(units)))
            return RunningLoop(reducer, padding, units, guard, patches.pop_all())

    def _make_reducer(
        self, units: Mapping[int, OptimizerUnit]
    ) -> tuple[Reducer | ShardedReducer, Padding]:
        return make_reducer(
            self.state,
            list(units.values()),
            consistency=self.options.consistency,
            activity=self.context.activity,
            is_over=lambda: self.groups.is_group_over(self.context.generation),
        )

    def _follow_units(self) -> bool:
        """Reduce the gradients of the present units; return whether they have changed.

        A script has unfrozen parameters, or those that have sent their state did so before.
        """
        loop = self._the_loop()
        units = self.state.changed_units(loop.units)
        if units is None:
            return False
        loop.reducer.close()
        reducer, padding = self._make_reducer(units)
        self._loop = replace(loop, reducer=reducer, padding=padding, units=units)
        return True

    def _end(self) -> None:
        """The loop is left: from here on the train function is like any other."""
        if self._loop is None:
            return  # Also when a generator of a call that is long over is finalized.
        self._take(PassLeft())
        self._epochs.epoch = None
        self._epochs.is_over, self._epochs.has_head = True, False
        self._settle_snapshot()
        self._loop.close()
        self._loop = None
        self.groups.declare(in_place=False)
        self.groups.defer(False)

    # ------------------------------------------------------------------- micro-batches

    def micro_batches(self, loader: MicroBatches) -> Iterator[Any]:
        """Yield this rank's micro-batches until the epoch is over for the whole group.

        Raises:
            UsageError: not inside the loop over epochs, or while another loader is read.
        """
        self._epochs.by_steps = False
        return self._iterations(loader, lambda: self._open_iteration(loader))

    def steps(self, loader: MicroBatches, moved: Callable[[Any], Any]) -> Iterator[WholeStep]:
        """Yield the steps of an epoch, each to be computed by its receiver; see `train.steps`.

        Raises:
            UsageError: as `micro_batches`, or a step was not computed or not stepped.
        """
        self._epochs.by_steps = True

        def give() -> WholeStep:
            # Who has received the state has drawn other numbers before.
            seed_everything(step_begin_seed(loader.plan.seed, self.cursor))
            if self._has_step_head():
                self._resume_point.keep(self._group.program_points, self._the_reducer().before_step)
                self._resume_point.begin_code(follows_commit=False)
            self.groups.defer(True)  # Half of what the script does here would be done again.
            return WholeStep(self, loader, moved)

        return self._iterations(loader, give)

    def _iterations(self, loader: MicroBatches, give: Callable[[], T]) -> Iterator[T]:
        """Yield what an iteration of the loop is given, until the epoch is over for all."""
        opened = self._pass(loader, give)
        self._epochs.open_pass = weakref.ref(opened)
        return opened

    def _pass(self, loader: MicroBatches, give: Callable[[], T]) -> Generator[T, None, None]:
        epoch, is_first, is_over = self._open_pass(loader), True, False
        try:
            while True:
                self._close_iteration(is_first)
                is_first = False
                if self._epochs.ends:
                    self._go_to_end(loader)
                is_void = self._machine.phase is StepPhase.VOID
                if self._group.is_leaving or is_void or self._is_broken():
                    self._change_group()
                if self.cursor.epoch != epoch:
                    # The others are in a later epoch: their code after this one has run, ours not.
                    raise ReenterRequested(
                        "the others are in a later epoch", self.context.generation
                    )
                self.at_boundary()
                if loader.has_step(self.cursor):
                    yield give()
                    continue
                self._settle_snapshot()
                if self._pass_gate():
                    self._epochs.pass_phase, is_over = PassPhase.PASSED, True
                    break
        except GeneratorExit:
            is_over = self.has_begun  # By a `break`, or by what the loop's body raises.
            if self._loop is not None:
                self._epochs.cut = self._loop.guard.cut_at(
                    self._machine.phase, self.cursor, counts_iterations=self._counts_iterations()
                )
            raise
        finally:
            self._settle_snapshot()
            if self._machine.phase is StepPhase.COMMITTED:
                self._pending.end()
                self.run.logbook.commit_step()  # The loop was left after a step.
            self._put_late()
            self._take(PassLeft())
            self._iteration = Iteration()
            self._epochs.ends = False
            if self._epochs.pass_phase is PassPhase.OPEN:
                self._epochs.pass_phase = PassPhase.LEFT
            self._forget_step()
            if self._loop is not None:
                self._loop.guard.leave_pass()
                self._loop.padding.forget()
                self._loop.reducer.release_gradients()
            if is_over:
                # Who has received the last step from others has drawn other numbers in it.
                seed_everything(epoch_seed(self.options.seed, epoch, is_over=True))
            if is_over and self._resume_point.is_whole:
                self._keep_for_code()
            # User code between epochs may take as long as it likes.
            self.context.activity.reset()
            self.context.timing.switch(USER)

    def _leave_pass(self, error: ReenterRequested) -> NoReturn:
        """Leave the loop over steps by an error that comes from within its body.

        Through the pass, which would be closed as by a `break` otherwise, and keep a state that the
        present group has not agreed on.
        """
        opened = self._epochs.open_pass() if self._epochs.open_pass is not None else None
        if opened is not None:
            opened.throw(error)
        raise error

    def _counts_iterations(self) -> bool:
        """Return whether how many iterations a step has depends on the number of workers."""
        data = self.data
        num = data.num_micro_batches if data is not None else 1
        return not self._epochs.by_steps and self.context.min_workers < num

    def check_left(self) -> None:
        """Refuse to go on behind a pass, or to end, where it was left at a place of this rank's.

        Raises:
            UsageError: ranks, or groups of other sizes, would leave it at others.
        """
        if self._epochs.cut is not None:
            raise self._epochs.cut

    def compute(self, loader: MicroBatches) -> Iterator[Any]:
        """Yield our micro-batches of one step, until all of it that needs others is done.

        A group that breaks meanwhile is left for the next, where the step is dealt out anew. If
        its members have committed the step already, it is over for us, too:
            `StepPhase.RECEIVED`.
        """
        if self._has_step_head():
            self._resume_point.undo_code(self.context.shielded)
            self._set_whole()
        here = self._epochs.begun = self.run.begun_step = self.cursor
        self.groups.defer(self.options.is_in_place)
        while self._machine.phase is not StepPhase.SETTLED:
            yield self._open_iteration(loader, of_whole_step=True)
            self.context.activity.beats += 1
            batch = self._iteration.batch
            if batch is not None and not self._the_loop().padding.is_under_way:
                self.run.logbook.end_micro_batch(batch.number)
            self._iteration.batch = None
            self._take(MicroBatchComputed(self._is_broken()))
            if self._machine.phase is not StepPhase.VOID:
                continue
            with self.state.registered_later():
                self._change_group()
            if self.cursor != here:
                self._take(StepReceived())
                self._the_loop().show_zeros()
                return
            # The step goes on: what the script counts in it comes after what was received.
            self._put_late()
            if self._group.program_points[self.context.world_rank].cursor <= here:
                self._leave_pass(
                    ReenterRequested(
                        "the others are before the code that begins this step",
                        self.context.generation,
                    )
                )
            self.at_boundary()

    def _has_step_head(self) -> bool:
        """Return whether our state has what the code before a whole step's micro-batches does.

        It was received from a member that was within that step: what that code does here is undone.
        """
        return self.run.begun_step == self.cursor

    def add_up(self, values: Mapping[str, Any]) -> None:
        if self._iteration.batch is not None:
            self.run.logbook.add_up(values, counts=self._iteration.batch.count > 0)

    def num_samples(self) -> int:
        share = self._iteration.share
        return share.samples if share is not None else 0

    def end_epoch(self) -> None:
        # Without a step at hand it is over already.
        self._epochs.ends = self._machine.phase is not StepPhase.OUTSIDE

    def skip(self) -> None:
        self._take(EmptyStepRequested())

    def takes_closures(self) -> bool:
        return self._epochs.by_steps and self._machine.phase is StepPhase.OUTSIDE

    def has_computed(self) -> bool:
        phase = self._machine.phase
        return phase in (StepPhase.SETTLED, StepPhase.COMMITTING, StepPhase.COMMITTED)

    def is_computed(self) -> bool:
        return self.has_computed() or self._machine.phase is StepPhase.RECEIVED

    def _go_to_end(self, loader: MicroBatches) -> None:
        """Leave the rest of the epoch out; who joins here finds nothing left in it."""
        self._epochs.ends, epoch = False, self.cursor.epoch
        if not loader.steps_of(epoch):
            self.run.streams.end(epoch, self.cursor.step)
        self.run.cursor = Cursor(epoch, loader.steps_of(epoch))

    def _open_pass(self, loader: MicroBatches) -> int:
        if self._epochs.epoch is None:
            raise usage_errors.outside_epochs()
        if self._machine.phase is not StepPhase.OUTSIDE:
            raise usage_errors.two_at_once()
        if self._epochs.is_behind:
            raise usage_errors.read_again(self._epochs.epoch)
        self.state.check_known()
        if self._epochs.has_head:
            self._epochs.has_head = False
            self._resume_point.undo_code(self.context.shielded)
        elif not self.state.is_sharded:
            # Each rank by itself: others may be in this pass already, since the group before.
            self.state.reduce(self.state.wanted())
            if self._follow_units():
                self._the_reducer().attach(default_group())
        self._set_whole()
        self.run.begun = self._epochs.epoch
        self._epochs.pass_phase = PassPhase.OPEN
        self.context.link.post(MicroBatchesDeclared(loader.plan.num_micro_batches))
        self.run.read(loader)
        self._deal()
        return self._epochs.epoch

    def _deal(self) -> None:
        """Ask the loader for our micro-batches in this group."""
        loader = self.run.loader
        if loader is None or not loader.has_step(self.cursor):
            return
        context = self.context
        held = deal(context.world_rank, context.world_size, loader.plan.num_micro_batches)
        loader.take_span(self.cursor, held)

    def _open_iteration(self, loader: MicroBatches, *, of_whole_step: bool = False) -> Any:
        """Return the next micro-batch, with everything set for it."""
        loop = self._the_loop()
        loop.guard.open_iteration()
        timing, context = self.context.timing, self.context
        timing.switch(DATA_WAIT)
        is_again, batch = loop.padding.is_under_way, loop.padding.take(loader.next)
        timing.switch(COMPUTE)
        check(batch.cursor == self.cursor, f"micro-batch of {batch.cursor}, not of {self.cursor}")
        share = loader.share(batch, context.world_rank, context.world_size)
        first, last = share.held
        begins_step = batch.number == first and not is_again
        if begins_step:
            self._begin_step(loader, share)
        is_last, padded = batch.number == last - 1, loop.padding.pad(batch)
        if padded is None:
            loop.reducer.begin_micro_batch(batch.number)
        self._iteration = Iteration(
            padded or batch, share if begins_step else self._iteration.share
        )
        self._take(MicroBatchOpened(is_last and padded is None, of_whole_step))
        seed_everything(micro_batch_seed(loader.plan.seed, self.cursor, batch.number))
        return (padded or batch).value

    def _begin_step(self, loader: MicroBatches, share: StepShare | WeighedShare) -> None:
        """Send the others what they are to know of us with this step, and get ready to reduce."""
        loop, context = self._the_loop(), self.context
        context.activity.at(self.cursor.epoch, self.cursor.step)
        request = context.link.leave_request(context.generation)  # Once: it may change.
        flags = tuple(self.run.logbook.row()), *self._checkpoints.flags(request)
        row = StepMetadata(
            request is not None,
            self.cursor,
            self._group.stepped,
            *flags,
            rates=self._group.rates,
            busy_ns=float(context.timing.busy_ns),
            checksum=self._divergence.step_checksum(
                self.run.steps, context.world_size, loader.order_print(self.cursor.epoch)
            ),
        )
        loop.reducer.begin_step(share, row.numbers())
        loop.padding.begin_step(share)
        loop.guard.begin_step()

    def _check_collective(self) -> None:
        """Refuse one that the loop calls for each micro-batch, if ranks have unequally many.

        Some would wait in it for others that are in the exchange of gradients, and wait for them.
        """
        of_step = self._iteration
        if of_step.batch is None or of_step.share is None or not self._machine.is_computing:
            return
        partition = of_step.share.partition
        if partition.num_micro_batches % partition.world_size and not self.state.is_sharded:
            raise usage_errors.collective_inside(
                self.cursor, partition.num_micro_batches, partition.world_size
            )

    def _check_others_come(self) -> None:
        """Refuse a collective that others are past: they are in the loop, and wait for us.

        That is one before the loop, or at the head of an epoch in whose pass they are.
        """
        epochs, context, now_s = self._epochs, self._context, time.monotonic()
        is_before = not (self.has_begun or epochs.is_over)
        if context is None or not (is_before or epochs.has_head) or context.world_size == 1:
            return
        if now_s - epochs.others_asked_s >= ASK_EVERY_S:
            epochs.others_asked_s = now_s
            if others_have_begun(is_inside=epochs.has_head):
                raise usage_errors.collective_before(context.world_rank)

    def _close_iteration(self, is_first: bool) -> None:
        """The loop asks for more: the user's code for the last micro-batch, or step, is through."""
        self._iteration.batch = self._epochs.begun = None
        self.context.activity.beats += 1
        self._take(CommitRequested())  # Of several optimizers not all were asked to step.
        self._take(IterationClosed(is_first, self._is_broken()))
        if is_first and self._group.is_leaving:
            # All have left the loop by a `break` behind that step.
            self._together(self._share_at_boundary)

    def _close_step(self) -> None:
        """The user's code for a committed step is through: we are at a boundary."""
        run = self.run
        self._the_loop().guard.step_closed()
        self._note_step()
        self._pending.end()
        run.logbook.commit_step()  # Only now: plain loops log after `optimizer.step()`.
        self._set_whole()
        is_shared = self._checkpoints.is_due or self._group.is_leaving
        if is_shared and self._together(self._share_at_boundary) is None:
            self._checkpoints.know_broken()
        shares_book = run.streams.is_due(run.cursor, self._checkpoints.is_due)
        if self._group.error is None and shares_book:
            self._together(lambda: share_book(default_group(), run.streams, run.cursor))
        with self.context.timing.spending(CHECKPOINT_STALL):
            self._checkpoints.at_boundary(self._is_broken, goes_on=True)

    def _close_received(self) -> None:
        """The user's code for a step that others have committed is through."""
        self._note_step()
        self._put_late()
        self._forget_step()

    def _settle_snapshot(self) -> None:
        """Wait for what is copied of the state, before it or the script's place changes."""
        with self.context.timing.spending(CHECKPOINT_STALL):
            self._checkpoints.settle()

    def _note_step(self) -> None:
        if self._group.noted != self.cursor:
            self.context.timing.note_step(self._telemetry)
        self.context.activity.has_stepped = True

    def _telemetry(self) -> Telemetry:
        """Return what we know of our steps; the rest of it is measured by `Timing`."""
        epoch, step = self.cursor.epoch, self.cursor.step
        loader, rank = self.run.loader, self.context.world_rank
        return Telemetry(
            bytes_sent=self._the_reducer().bytes_sent,
            epoch=epoch,
            step=step,
            num_epochs=self._epochs.total,
            num_steps=loader.steps_of(epoch) or 0 if loader is not None else 0,
            logged=self.run.logbook.latest_json() if rank == 0 else "",
            unsaved=self.context.snapshotter.refused[:UNSAVED_CHARS_MAX],
        )

    # ------------------------------------------------------------------- optimizer steps

    def optimizer_step(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> None:
        """Take a call of `optimizer.step()`; the last of a step's commits it.

        Raises:
            UsageError: it would change the weights of this rank alone, or not at all.
        """
        if self._machine.phase is not StepPhase.OUTSIDE:
            self._iteration.calls[id(optimizer)] = OptimizerCall(optimizer, real)
            self._take(StepRequested(id(optimizer), self._is_broken()))
            return
        if self._epochs.epoch is not None and has_gradients(optimizer):
            raise usage_errors.stepped_outside(optimizer, self.state.models)
        real()

    def optimizer_skipped(self, optimizer: Any) -> None:
        if self._machine.phase is not StepPhase.OUTSIDE:
            nothing = OptimizerCall(optimizer, lambda: None)
            self._iteration.calls.setdefault(id(optimizer), nothing)
            self._take(StepSkipped(id(optimizer), self._is_broken()))

    def optimizer_zeroed(self, optimizer: Any) -> None:
        if self._machine.phase is not StepPhase.OUTSIDE:
            self._the_reducer().unit_zeroed(self._the_loop().units[id(optimizer)])

    def _take(self, event: StepEvent) -> None:
        """Do what follows from an event in the present phase of the step."""
        for effect in self._machine.step(event):
            self._perform(effect)

    def _perform(self, effect: StepEffect) -> None:
        if isinstance(effect, SettleGradients):
            unit = self._the_loop().units[effect.request.optimizer]
            self._take(GradientsSettled(effect.request, self._the_reducer().settle(unit)))
        elif isinstance(effect, SettleStep):
            self._settle()
        elif isinstance(effect, Commit):
            self._commit(is_settled=effect.is_settled)
        elif isinstance(effect, TakeGradients):
            self._the_reducer().unit_stepped(self._the_loop().units[effect.optimizer])
        elif isinstance(effect, CheckRates):
            optimizer = self._iteration.calls[effect.optimizer].optimizer
            loop = self._the_loop()
            loop.guard.check_rates(optimizer, self.cursor)
        elif isinstance(effect, KeepStep):
            call = self._iteration.calls[effect.optimizer]
            self._pending.add(call.optimizer, call.real)
        elif isinstance(effect, HoldGradients):
            units = self._the_loop().units.values()
            optimizer = self._iteration.calls[effect.optimizer].optimizer
            self._pending.hold_back(optimizer, (p for unit in units for p in unit.shared))
        elif isinstance(effect, Abandon):
            self._group.error = self._group.error or self._the_reducer().broken
            self._the_reducer().abandon()
        elif isinstance(effect, CloseStep):
            self._close_step()
        elif isinstance(effect, CloseReceived):
            self._close_received()
        elif isinstance(effect, Refuse):
            raise self._refusal(effect)

    def _refusal(self, effect: Refuse) -> UsageError:
        """Return what is raised for a call that cannot work."""
        if effect.reason in usage_errors.OF_STEPS:
            return usage_errors.OF_STEPS[effect.reason](self.cursor)
        optimizer = self._iteration.calls[effect.optimizer].optimizer
        return usage_errors.OF_OPTIMIZERS[effect.reason](optimizer)

    def _settle(self) -> None:
        """Have all of a step that needs other ranks: after that, to commit it is a local matter."""
        reducer, units = self._the_reducer(), self._the_loop().units.values()
        if not all(reducer.settle(unit) for unit in units) or self._ranks_differ(
            read_rows(reducer.rows)
        ):
            self._take(StepSettled(False))
            return
        for unit in units:
            reducer.unit_stepped(unit)  # What backward gives from here on is of no step.
        logged, context = self.run.logbook.take_micro_batches(), self.context
        partition = MicroBatchPartition(
            context.world_rank, context.world_size, self.run.the_loader().plan.num_micro_batches
        )
        totals = self._together(lambda: self._group.values.totals(partition, logged))
        if totals is None:
            self._take(StepSettled(False))
            return
        with context.shielded():
            is_whole = self._settle_buffers()
            if is_whole:
                self.run.logbook.take_totals(totals)
                # Nobody else is needed any more, and what the script does before its optimizer
                # steps, such as setting rates, would be done twice.
                self.groups.defer(True)
                plan, shard = self.run.the_loader().plan, self.state.shard_number
                # Each rank has drawn for other micro-batches; noise is to be the same on all.
                seed_everything(gradients_seed(plan.seed, self.cursor, shard))
                self._resume_point.step_settled(self._keep)
            self._take(StepSettled(is_whole))

    def _settle_buffers(self) -> bool:
        """Do the last of a step that needs other ranks; leaving it puts the buffers back."""
        # Refused from the first, and not once the job has grown.
        is_shared = self.options.is_in_place and self.context.max_workers > 1
        repeats = is_shared or self._counts_iterations()
        self._the_loop().guard.check_computed(repeats=repeats)
        # An aborted NCCL collective ends without an error, so that order counts.
        return self._the_reducer().settle_buffers(
            # The script may have gone on after an error of a collective of its own.
            lambda: not (self._is_broken() or self.groups.has_failed(self.context.generation))
        )

    def _commit(self, *, is_settled: bool) -> None:
        """Apply the step. Members that could not are sent the state of those that could.

        Args:
            is_settled: all of it that needs other ranks is done.

        Raises:
            GroupChanged: a collective has failed that the script has called since then.
        """
        if is_settled:
            self._resume_point.check_settled(
                self.groups, self.context, self._the_loop().parameters()
            )
        self.state.check_still_known()
        rows, share = read_rows(self._the_reducer().rows), self._iteration.share
        busy, samples = [row.busy_ns for row in rows], share.samples if share is not None else 0
        self.context.timing.exchanged(busy, samples, share.tokens if share is not None else 0)
        if not is_settled and self._ranks_differ(rows):
            self._take(StepCommitted(False))
            return
        # No interrupt in the middle of a step. If it raises, `run.is_held` stays False, and
        # this member receives the state from another one.
        with self.context.shielded(), span("commit"):
            if not is_settled and not self._settle_buffers():
                self._take(StepCommitted(False))
                return
            self._settle_snapshot()
            # From here until the end the state is of no step: half of it is the next one's.
            if self._resume_point.calls_late and self._resume_point.is_small:
                self._keep()
            self._resume_point.begin_code(follows_commit=True)
            self.run.is_held = False
            self._the_reducer().keep_buffers()
            self._group.stepped = self._pending.bits(self.state.optimizers)
            self._group.rates = rates_print(self.state.optimizers)
            seed_step(self.data, self.cursor, self.state.shard_number)
            self._pending.do()
            self.run.count_step(self.context.generation)
            self.run.is_held = True
            self._take(StepCommitted(True))
            if self._counts_iterations():
                self._the_loop().guard.step_committed()
            self._group.is_leaving = any(row.requests for row in rows)
            self._checkpoints.committed(rows)
            self.run.logbook.take_rows([row.values for row in rows])
            # Only the script's own collectives count, not those of its optimizers.
            self._resume_point.begin_code(follows_commit=True)
            self.groups.defer(True)
        if not self.context.timing.steps:
            # Reported at once: from now on this group's members have the newest state.
            self._group.noted = self.cursor
            self.context.timing.note_step(self._telemetry)

    def _ranks_differ(self, rows: Sequence[StepMetadata]) -> bool:
        """Return whether the rows of a step show that ranks differ; then it is void."""
        if not differ([row.checksum for row in rows]):
            return False
        self.run.logbook.share([row.values for row in rows])
        self._together(self._heal)
        return True

    def _heal(self) -> None:
        """Ranks differ, as all of them know: let the odd ones receive what most have, or raise.

        Raises:
            RuntimeError: the group broke.
            UsageError: most ranks have not the same.
        """
        self._the_reducer().abandon()  # Buffers are what they were before the step.
        self._iteration.batch = None
        differing = self._divergence.settle(default_group(), self.cursor)
        self.run.is_held = self.context.world_rank not in differing
        self._group.reagrees_in_place = True  # All of us, in this group.
        self._take(GroupBroke())

    def _forget_step(self) -> None:
        """Whatever the broken step has left behind is not to be seen by the next attempt."""
        self.run.logbook.forget_step()
        self._pending.forget()
        self.state.forget_step()

    # ------------------------------------------------------------------- what prepared objects ask

    def is_due(self, optimizer: Any) -> bool:
        self._take(GradientsRequested(id(optimizer), self._is_broken()))
        return self._machine.has_gradients

    def runs_after_step(self) -> bool:
        """Return whether what follows an optimizer step happens now."""
        return self._machine.runs_after_step

    def is_of_step(self) -> bool:
        """Return whether what this iteration does is done once in a step: its last, or outside."""
        return self.runs_after_step() or self._machine.phase in AT_STEP

    def step_is_done(self) -> bool:
        """Return whether a step has been done in this iteration; see `train.stepped`.

        Of several optimizers those that were not asked to step until then do not in this one.
        """
        self._take(CommitRequested())
        return self.runs_after_step()

    def iteration(self) -> object:
        """Return what differs once the loop has gone on, or has stepped."""
        return self.cursor, self._machine.phase, id(self._iteration.batch)

    def note_asked(self) -> None:
        """The loop asks whether a step is done, or how many are: it does not count iterations."""
        if self._loop is not None:
            self._loop.guard.note_asked(follows_commit=self._machine.phase is StepPhase.COMMITTED)

    def once(self, call: Callable[[], Any], *, thing: object = None) -> Any:
        is_now, is_with_step = self.runs_after_step(), self._machine.phase in AT_STEP
        if thing is not None:
            self._pending.at_end(thing, call if is_with_step else None)
        elif is_with_step:
            self._pending.add_call(call)
        return call() if is_now else None

    def _is_committing(self) -> bool:
        return self._machine.phase is StepPhase.COMMITTING

    def is_prepared(self, optimizer: Any) -> bool:
        return self._loop is not None and id(optimizer) in self._loop.units

    def log(self, values: Mapping[str, Any]) -> None:
        if self._iteration.batch is not None:
            self.run.logbook.add(values, self._iteration.batch.weight)
        elif self.has_computed():
            self.run.logbook.add(values, 1.0)  # Of a whole step, once.

    def report(self, metrics: str, checkpoint: Any = None, *, name: str | None = None) -> None:
        """Report once per step, or once between epochs; see `train.report`."""
        if not self.runs_after_step():
            return  # The report of a step is made once, where its gradients are complete.
        where, voters = self._group.next_report(self._program_point())
        if 0 < voters < len(self._group.program_points):
            if checkpoint is not None and checkpoint is not NO_PART:
                log.warning(
                    "checkpoint_given_up at=%s: it would lack the parts of members that have made "
                    "this report before the group changed",
                    where,
                )
            checkpoint = None
        reporter = self.context.the_reporter()
        with self.context.stalls(checkpoint):
            reporter.report_in_place(metrics, checkpoint, name, where=where, voters=voters)

    def evaluation_seed(self, seed: int) -> int:
        """Return the seed of an evaluation pass that begins here, the same on all ranks."""
        here = self._program_point()
        return evaluation_seed(seed, here.cursor, self._group.evaluations.next(here))

    def _program_point(self) -> ProgramPoint:
        in_step = self._machine.phase is not StepPhase.OUTSIDE
        return self._epochs.program_point(self.cursor, in_step=in_step)

    # ------------------------------------------------------------------- groups

    def _is_broken(self) -> bool:
        return self._the_reducer().broken is not None or self.must_leave()

    def must_leave(self) -> bool:
        return self.groups.must_leave(self.context.generation)

    def _change_group(self, *, is_first: bool = False) -> None:
        """Join the newest group, until one is formed in which all have the same state.

        The first group is formed already, and has only to meet; so has one of which some differ.
        """
        began = time.monotonic()
        reducer = self._the_reducer()
        error = self._group.error or reducer.broken
        if error is not None and not (self.must_leave() or is_group_broken(error)):
            raise error  # Not the others' fault: again it would be no better.
        at_boundary = self._group.is_leaving and error is None
        timing = self.context.timing
        if not is_first:
            timing.void()
        self._forget_step()
        self._take(GroupLeft())
        stays = is_first or self._group.reagrees_in_place
        while True:
            reducer.attach(None)
            if not stays:
                if at_boundary:
                    with timing.spending(CHECKPOINT_STALL):
                        self._checkpoints.before_leaving(self.must_leave)
                if self.options.recovery in ("reenter", "restart"):
                    raise GroupChanged("the group changes", self.context.generation) from error
                self.groups.rejoin(self.context.generation, error, at_boundary)
            comes_again, stays, at_boundary = not stays, False, False
            self._group = PresentGroup()
            timing.switch(REFORM if self.run.is_held else RESTORE)
            try:
                if comes_again:
                    note_loop_begun(is_inside=self._epochs.epoch is not None)
                num_bytes = self._agree()
                break
            except (RuntimeError, GroupError) as failure:
                if not (self.must_leave() or is_group_broken(failure)):
                    raise
                error = None if self.must_leave() else failure
        self._attach()
        timing.switch(USER)
        context = self.context
        if is_first and not self.run.steps:
            self._warn_of_unread_checkpoint()
        log.info(
            "%s generation=%d world_size=%d epoch=%d step=%d bytes=%d ms=%.1f",
            "met" if is_first else "recovered recovery=in_place", context.generation,
            context.world_size, self.cursor.epoch, self.cursor.step, num_bytes,
            (time.monotonic() - began) * 1e3,
        )  # fmt: skip

    def _warn_of_unread_checkpoint(self) -> None:
        """The run begins anew: say so if it was given a checkpoint that nothing was taken from."""
        reporter = self.context.reporter
        if self.context.world_rank or reporter is None or self.is_checkpoint_read:
            return
        if path := reporter.newest_checkpoint:
            log.warning(
                "checkpoint_unread path=%s: the loop begins at its first step; by itself it goes "
                "on only under the run's own name. Call train.get_checkpoint() before it, and "
                "load what you need of that",
                path,
            )

    def _attach(self) -> None:
        group = default_group()
        if not self.state.is_sharded:
            self._follow_units()
        self._the_reducer().attach(group)
        self._group.values = StepValues(group if group.size() > 1 else None)
        self._divergence.begin()
        self._deal()

    def _agree(self) -> int:
        """Find out who is how far, and send state to those who need it; return the bytes."""
        with self.context.activity.waiting():
            synced = catch_up(
                self.run,
                self._checkpoints,
                self._epochs.in_pass,
                self.context.reach,
                put=self._put,
            )
        self.run.is_held = True
        self._group.program_points = synced.program_points
        self.run.agreed_in = self.context.generation
        share_latest(default_group(), synced.cursors, self.run.logbook)
        return synced.num_bytes

    def _put(self, state: State) -> None:
        """Make this our state; what an error leaves of it is not offered."""
        with self.context.shielded():
            self._checkpoints.put(state)
            self._set_whole()

    def _put_late(self) -> None:
        """Repeat what was received within the iteration; all of it, or it is offered to nobody."""
        with self.context.shielded():
            self.state.put_late()

    def _pass_gate(self) -> bool:
        """Wait until everyone has committed the epoch's last step; False if the group broke.

        A member that reaches the code after the loop can then be followed by all others, which
        have the same state.
        """
        behind = ProgramPoint(self.cursor, CodePart.END)
        if max(self._group.program_points, default=behind) > behind:
            return True  # Others of this group have passed it in the one before.
        all_of_it = halves(self._divergence.of_all(self.context.world_size))
        logbook, lacks = self.run.logbook, self._checkpoints.lacks_newest()
        row = [float(lacks), *map(float, all_of_it), *logbook.row()]
        rows = self._together(lambda: send_metadata(default_group(), row))
        if rows is not None:
            self._checkpoints.know_all_settled(row[0] for row in rows)
        if rows is not None and differ([whole(*row[1:3]) for row in rows]):
            logbook.share([row[3:] for row in rows])
            self._together(self._heal)
            return False
        logbook.take_rows([row[3:] for row in rows or ()])
        return rows is not None

    def _share_at_boundary(self) -> bool:
        """Share what a snapshot needs to be taken, and who stays to go on; returns True.

        That is what all have logged of this step, and whether some lack the snapshot before.
        """
        logbook = self.run.logbook
        row = [float(self._checkpoints.lacks_newest()), *logbook.row()]
        rows = send_metadata(default_group(), row)
        self._checkpoints.know_all_settled(row[0] for row in rows)
        logbook.share([row[1:] for row in rows])
        return True

    def _together(self, exchange: Callable[[], Any]) -> Any:
        """Do what all members do here; None if the group broke."""
        try:
            with self.context.activity.waiting():
                return exchange()
        except RuntimeError as error:
            if not (self.must_leave() or is_group_broken(error)):
                raise
            self._group.error = error
            self._take(GroupBroke())
            return None

    def resume_state(
        self, *, in_this_group: bool = False, has_raised: bool = False
    ) -> ResumeState | None:
        """Return what the next call of the train function continues from, None if nothing.

        Args:
            in_this_group: it is called in the group that has agreed on this state.
            has_raised: this call was left by an error. If not, it is behind the loop that it has
                left after a commit.
        """
        if self._loop is not None:
            self._loop.reducer.release_gradients()  # Buffers are those of the last commit again.
        agreed = self.context.generation if in_this_group else NO_GENERATION
        points = self._group.program_points
        return self._resume_point.take(points, agreed, has_raised=has_raised)

    def _set_whole(self) -> None:
        """User code for the last step, or for the last pass, is through.

        Raises:
            GroupChanged: one of its collectives has failed, and it has gone on all the same. It
                runs again.
        """
        self._resume_point.end_code(self.groups, self.context, self._the_loop().parameters())
        self.groups.defer(self.options.is_in_place)

    def _keep_for_code(self) -> None:
        """Code of the script's follows, before a pass or behind it."""
        self.groups.defer(self.options.is_in_place)
        self._keep()
        self._resume_point.begin_code(follows_commit=False)

    def _keep(self) -> None:
        is_called_again = not (self.context.is_local or self.state.is_sharded)
        if is_called_again or self._epochs.has_head:
            self._resume_point.keep(self._group.program_points, self._the_reducer().before_step)

    @property
    def context(self) -> WorkerContext:
        if self._context is None:
            raise InvariantViolation("the step engine is asked before a group is formed")
        return self._context

    def _the_loop(self) -> RunningLoop:
        if self._loop is None:
            raise UsageError("the loop over train.epochs() is over")
        return self._loop

    def _the_reducer(self) -> Reducer | ShardedReducer:
        return self._the_loop().reducer
