"""The main thread of a worker: takes one order at a time and answers it with one event.

Rule: user code runs only inside `_call`. Of a call that ended early nothing is left: its frames are
released and its group is dropped before the answer is posted. The group of a call that returned is
kept until the order to close it, because the other members usually return within moments. Code
outside a loop over `train.epochs()` is called once in a process: for the next group the agent gives
the worker's place to a new process.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch

from elastic.core.config import TRACKERS_VARIABLE, JobSpec
from elastic.core.events.worker import (
    CloseGroup,
    EnterTrain,
    FormGroup,
    GroupFailed,
    GroupFormed,
    LoopStateChanged,
    Setup,
    SetupFailed,
    StoreOpened,
    TrainLeft,
    TrainRaised,
    TrainReturned,
    WorkerEvent,
)
from elastic.core.facts import NO_GENERATION, Assignment, EntryKind, Generation
from elastic.core.messages import Assign
from elastic.errors import ConfigError, GroupError, InvariantViolation, ProgramFailed, UsageError
from elastic.runtime import worker_ports
from elastic.runtime.clock import Clock
from elastic.runtime.worker_ports import PortRange
from elastic.storage import options as storage_options
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.interrupt import GroupChanged, Interrupter
from elastic.worker.base.mailboxes import Mailboxes
from elastic.worker.checkpoint.checkpoint_writer import CheckpointWriter
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.report_votes import ReportVotes, peers_watch
from elastic.worker.checkpoint.reported_checkpoints import ReportOrigin
from elastic.worker.checkpoint.reporting import Reporter, place_of_failure
from elastic.worker.checkpoint.shared_storage import SharedStorage
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.checkpoint.validating import Validator
from elastic.worker.data.randomness import seed_everything
from elastic.worker.data.seeding import FIRST_SEED, seed_like_a_process
from elastic.worker.engine import outcome
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.recovery_modes import ReenterRequested, ResumeState
from elastic.worker.engine.run_state import state_of
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.engine.train_call import current, set_current
from elastic.worker.group import c10d
from elastic.worker.group.group import BOTH_BACKENDS, GroupSpec, ProcessGroups
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.group.store_server import StoreServer
from elastic.worker.process import entry, environment
from elastic.worker.process.broken_group_hold import held_back
from elastic.worker.process.control import flush_output
from elastic.worker.process.devices import VisibleDevices
from elastic.worker.process.early_run import joining_on_demand, set_printing_rank
from elastic.worker.process.tracking import Trackers

log = logging.getLogger(__name__)

TrainEvent = TrainReturned | TrainLeft | TrainRaised


@dataclass(frozen=True)
class _Storage:
    """What a worker has of a run directory, for all its groups."""

    directory: RunDirectory
    committer: Committer
    validator: Validator
    trackers: Trackers


@dataclass(frozen=True)
class _WorkerSetup:
    """What a worker is set up with, for all its groups.

    Attributes:
        server: of rank 0's rendezvous store.
        storage: None for a job without a run directory.
        shared: checks that all nodes have the same run directory.
        prepare: makes the next call of user code.
    """

    assign: Assign
    devices: VisibleDevices
    ports: PortRange
    server: StoreServer
    storage: _Storage | None
    shared: SharedStorage
    snapshotter: Snapshotter
    prepare: Callable[[], entry.EntryCall]


@dataclass
class _UserCall:
    """A call of the train function that runs, or has just ended; `rejoin` moves it between groups.

    Attributes:
        assignment: of its group, None before it joins one.
        exited: where it has ended itself without an error, "" if it has not.
        is_through: user code has returned; what it has begun may be waited for still.
        is_ahead: it runs while its group-to-be trains, and has not asked for it.
        put_back: undoes what has it join a group when it needs one.
    """

    assignment: Assignment | None
    origin: ReportOrigin
    reporter: Reporter | None = None
    function: entry.EntryCall = field(default_factory=lambda: entry.EntryCall(lambda: None))
    engine: StepEngine | None = None
    exited: str = ""
    is_through: bool = False
    is_ahead: bool = False
    put_back: Callable[[], None] = lambda: None

    @property
    def generation(self) -> Generation:
        return self.origin.generation


class Runner:
    """Sets up once, then forms and trains, generation after generation."""

    def __init__(
        self,
        mailboxes: Mailboxes,
        *,
        groups: ProcessGroups,
        interrupter: Interrupter,
        started_with: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self._mailboxes = mailboxes
        self._groups = groups
        self._interrupter = interrupter
        self._started_with = started_with
        self._clock = clock
        self._setup: _WorkerSetup | None = None
        self._user_call: _UserCall | None = None
        # What the last call has left to the next one.
        self._resume_state: ResumeState | None = None
        # In which a collective of the script's has failed.
        self._failed_generation = NO_GENERATION

    def run(self) -> NoReturn:
        """Do what is ordered until the control thread ends the process."""
        with held_back(self._met):
            self._run_orders()

    def _run_orders(self) -> NoReturn:
        while True:
            order = self._mailboxes.wait_for_order()
            if isinstance(order, Setup):
                event: WorkerEvent = self._set_up(order.assign)
                if order.assign.ahead and isinstance(event, StoreOpened):
                    event = self._run_ahead(order.assign)
                self._mailboxes.post(event)
            elif isinstance(order, FormGroup):
                self._mailboxes.post(self._form(order.assignment))
            elif isinstance(order, CloseGroup):
                self._drop()
            else:
                self._mailboxes.post(self._train(order.assignment))

    # ------------------------------------------------------------ set up and form

    def _set_up(self, assign: Assign) -> StoreOpened | SetupFailed:
        spec = assign.spec
        try:
            if "nccl" in _backend_of(assign):
                c10d.check_own_nccl()
            devices = VisibleDevices(assign)
            os.environ.update(environment.for_job(assign, self._started_with) | devices.env())
            storage_options.take(dict(spec.entry.env))
            ports = PortRange.of(self._started_with.get(worker_ports.VARIABLE, ""))
            server = StoreServer(assign.host, ports)
            storage = self._open_storage(spec)
            setup = self._setup = _WorkerSetup(
                assign=assign,
                devices=devices,
                ports=ports,
                server=server,
                storage=storage,
                shared=SharedStorage(storage.directory if storage is not None else None),
                snapshotter=Snapshotter(assign.snapshots, self._writer(spec, storage)),
                prepare=entry.load(spec.entry, imports_ahead=not spec.own_steps),
            )
        except BaseException as error:
            # Also what a module of the user's does while it is imported, such as sys.exit.
            failure = outcome.failure_of(error, "set-up")
            print(failure.traceback, file=sys.stderr)
            return SetupFailed(failure)
        # What was imported stays: collections between two groups need not visit it (20 ms).
        gc.collect()
        gc.freeze()
        log.info("worker_set_up worker=%s store=%s", assign.worker_id, setup.server.address)
        return StoreOpened(setup.server.address)

    def _open_storage(self, spec: JobSpec) -> _Storage | None:
        if not spec.run_path:
            return None
        directory = RunDirectory(spec.run_path)
        wanted = dict(spec.entry.env).get(TRACKERS_VARIABLE, "")
        return _Storage(
            directory,
            Committer(directory, spec, self._mailboxes),
            Validator(directory, spec, self._mailboxes),
            Trackers(directory.path, wanted),
        )

    def _writer(self, spec: JobSpec, storage: _Storage | None) -> CheckpointWriter | None:
        if storage is None:
            return None
        return CheckpointWriter(
            storage.directory, spec.job_id, committer=storage.committer, clock=self._clock
        )

    def _run_ahead(self, assign: Assign) -> SetupFailed | TrainEvent:
        """Call the train function while its group-to-be trains; it joins when it needs the group.

        Until then it counts as set-up, and what it raises is a failure of set-up.
        """
        call = _UserCall(None, _origin_of(assign, None), is_ahead=True)
        event = self._call(call)
        if not call.is_ahead:
            return self._after_call(event)
        if isinstance(event, TrainRaised):
            return SetupFailed(event.failure)
        self.join()  # It returned without ever asking; that counts in the group.
        if isinstance(event, TrainReturned):
            return replace(event, generation=call.generation)
        return TrainLeft(call.generation, at_boundary=False)

    def join(self) -> WorkerContext:
        """Be in a group from here on; does nothing for a train function that is in one."""
        context, call = current(), self._user_call
        if call is not None and call.is_ahead:
            call.is_ahead = False
            call.put_back()
            self._mailboxes.post(StoreOpened(self._the_setup().server.address))
            context = self._await_group()
        if context is None:
            raise InvariantViolation("no train function runs")
        return context

    def _form(self, assignment: Assignment) -> GroupFormed | GroupFailed:
        setup = self._the_setup()
        assign, devices = setup.assign, setup.devices
        os.environ.update(devices.enter(assignment))
        backend = _backend_of(assign)
        self._drop()
        try:
            spec = GroupSpec(
                generation=assignment.generation,
                rank=assignment.rank,
                world_size=assignment.world_size,
                leader_address=assignment.leader_address,
                backend=backend,
                host=assign.host,
                timeout_s=assign.spec.collective_timeout_s,
                job_id=assign.spec.job_id,
                key=assignment.group_key,
                ports=setup.ports,
            )
            if assignment.rank == 0:
                setup.server.admit(assignment.generation, assignment.group_key)
            self._groups.form(spec)
            if "nccl" in backend:
                devices.started()
        except (ConfigError, GroupError) as error:
            return GroupFailed(assignment.generation, str(error))
        return GroupFormed(assignment.generation)

    # ------------------------------------------------------------ train

    def _train(self, assignment: Assignment) -> TrainEvent:
        """Call the train function in this group, and clean up after it."""
        origin = _origin_of(self._the_setup().assign, assignment)
        return self._after_call(self._call(_UserCall(assignment, origin)))

    def _after_call(self, event: TrainEvent) -> TrainEvent:
        flush_output()
        if not isinstance(event, TrainReturned):
            self._drop()
        gc.collect()
        return event

    def _call(self, call: _UserCall) -> TrainEvent:
        """Call user code and return how it ended."""
        self._user_call = call
        try:
            result = self._call_again(call)
            left = _how_it_left(call)
            event: TrainEvent = TrainReturned(call.generation, outcome.result_json(result), left)
        except BaseException as error:
            event = self._recovered_by(call, self._ended_early(call, error))
            self._leave_engine(call, has_raised=not isinstance(error, GroupChanged))
            outcome.forget_frames(error)
        finally:
            self._mailboxes.activity.timing.stop()
            if call.reporter is not None:
                call.reporter.close()
            self._leave_engine(call)
            set_current(None)
        if call.reporter is not None:
            call.reporter.flush(
                has_returned=isinstance(event, TrainReturned), group_over=_is_group_over(event)
            )
        return event

    def _call_again(self, call: _UserCall) -> Any:
        """Call user code until it needs no other place in its own code to continue from."""
        setup = self._the_setup()
        while True:
            call.function = setup.prepare()
            if call.assignment is not None:
                self._set_threads(setup.assign, call.assignment)
            engine = call.engine = StepEngine(self, resume_state=self._resume_state)
            self._resume_state = None
            engine.configure(call.function.options)
            if setup.storage is not None:
                setup.storage.validator.configure(call.function.options.get("validation"))
            self._mailboxes.activity.timing.call_begins()
            context = self._enter(call, call.assignment)
            # Weights that a train function draws are then the same in every run of it.
            seed_everything(FIRST_SEED)
            if call.function.is_foreign:
                seed_like_a_process(context.world_rank)
                self._groups.hide()
            self._mailboxes.activity.reset()
            try:
                with ExitStack() as stack:
                    if call.assignment is None:
                        call.put_back = stack.enter_context(joining_on_demand(self.join))
                    return self._interrupter.run(context.generation, partial(self._run, call))
            except ReenterRequested as again:
                log.info("recovers recovery=reenter reason=%r", again.reason)
                self._leave_engine(call, in_this_group=True)
                outcome.forget_frames(again)

    def _set_threads(self, assign: Assign, assignment: Assignment) -> None:
        entry_env = dict(assign.spec.entry.env)
        threads = environment.num_threads(assignment, entry_env, self._started_with)
        if threads is not None:
            torch.set_num_threads(threads)

    def _run(self, call: _UserCall) -> Any:
        """Call user code, and wait for all that it has begun; that ends when the group is over."""
        setup = self._the_setup()
        storage = setup.storage
        try:
            result = call.function.run()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
            result, call.exited = None, outcome.where_raised(end) or "its end"
        if call.engine is not None:
            call.engine.check_left()
        call.is_through = True
        if storage is not None:
            storage.committer.finish(lambda: self._is_over(call.generation))
        setup.snapshotter.finish()
        if storage is not None:
            storage.validator.finish(lambda: self._is_over(call.generation))
        if call.reporter is not None:
            call.reporter.finish()
        if storage is not None:
            storage.trackers.finish()
        is_script = setup.assign.spec.entry.kind is not EntryKind.FUNCTION
        if is_script and (call.engine is None or not call.engine.state_survives_here):
            entry.end_script()
        return result

    def _enter(self, call: _UserCall, assignment: Assignment | None) -> WorkerContext:
        """Give user code its context in its group, or before it is in one."""
        setup = self._the_setup()
        assign, storage = setup.assign, setup.storage
        call.assignment, call.origin = assignment, _origin_of(assign, assignment)
        if assignment is None:
            set_printing_rank({})
        else:
            timing = self._mailboxes.activity.timing
            timing.enter(assign.worker_id, assignment.generation, self._mailboxes.post)
            timing.resume()
            place = environment.for_generation(assign, assignment, self._started_with)
            place |= setup.devices.place(assignment)
            os.environ.update(place)
            set_printing_rank(place)
            if call.reporter is not None:
                call.reporter.close()
            if storage is not None:
                recorded = (assignment.reported_checkpoint, assignment.automatic_checkpoint)
                leads = assignment.rank == 0
                storage.committer.enter(assignment.generation, recorded, leads=leads)
            call.reporter = self._make_reporter(setup, assignment, call.origin)
            self._check_storage(setup, assignment)
            if storage is not None:
                storage.validator.enter(assignment.generation, assignment.rank)
                storage.trackers.enter(assignment.rank)
        setup.devices.choose()
        context = self._context(setup, call)
        if call.engine is not None:
            call.engine.enter(context)
        set_current(context, call.engine)
        return context

    def _check_storage(self, setup: _WorkerSetup, assignment: Assignment) -> None:
        """Refuse a run directory that is not the one of the other nodes."""
        setup.shared.check(
            assignment,
            self._groups.store,
            is_over=lambda: self._mailboxes.was_aborted(assignment.generation),
        )

    def _leave_engine(
        self, call: _UserCall, *, in_this_group: bool = False, has_raised: bool = False
    ) -> None:
        """The call is over; what its loop has reached is kept for the next one."""
        engine, call.engine = call.engine, None
        if engine is not None:
            self._resume_state = engine.resume_state(
                in_this_group=in_this_group, has_raised=has_raised
            )
            engine.close()

    def _ended_early(self, call: _UserCall, error: BaseException) -> TrainEvent:
        """Classify an exception out of user code, and print it if user code caused it."""
        generation, reporter = call.generation, call.reporter
        if isinstance(error, GroupChanged):
            at_boundary = reporter is not None and reporter.has_left
            log.info("train_left generation=%d at_boundary=%s", generation, at_boundary)
            return TrainLeft(generation, at_boundary)
        exit_code = outcome.exit_code_of(error) if isinstance(error, SystemExit) else None
        where = place_of_failure(reporter, self._the_setup().assign.spec.entry.kind, generation)
        failure = outcome.failure_of(error, where)
        is_broken = (
            outcome.is_group_broken(error)
            or self._mailboxes.was_aborted(generation)
            # Peers may have finished. Who has met no failed collective has an error of its own.
            or (not call.is_through and self.has_failed(generation))
        )
        if is_broken:
            log.info("group_broken generation=%d error=%s", generation, failure.error_type)
        if isinstance(error, SystemExit):
            # As under Python itself, which prints no traceback for it.
            log.info("script_ended code=%s", exit_code)
        elif not isinstance(error, ProgramFailed):  # Which has printed its own error.
            # After a broken group it goes to the log only, not to users who follow the job.
            # Not by `print`, which scripts replace on all ranks but one.
            sys.stderr.write(failure.traceback.rstrip("\n") + "\n")
        if not is_broken and reporter is not None and outcome.is_of_damage(error):
            with self._mailboxes.activity.working("checks a checkpoint that is damaged"):
                failure = replace(failure, damaged=reporter.damaged_checkpoint())
        return TrainRaised(generation, failure, group_broken=is_broken, exit_code=exit_code)

    def _recovered_by(self, call: _UserCall, event: TrainEvent) -> TrainEvent:
        """Return by which recovery mode this worker continues, if it may."""
        engine = call.engine
        if engine is None or not _is_group_over(event):
            return event
        recovery = engine.options.recovery
        is_broken = isinstance(event, TrainRaised)
        why = "the train function was left" + (": its group broke" if is_broken else "")
        if recovery == "in_place":
            text = (
                f"FailureConfig(recovery='in_place'), but {why} outside of what train.epochs() "
                f"and prepared objects can repair; use recovery='auto'"
            )
            failure = outcome.failure_of(UsageError(text))
            return TrainRaised(event.generation, failure, group_broken=False)
        if recovery != "restart":
            recovery = "reenter" if engine.state_survives_here else "fresh_process"
        log.info("recovers recovery=%s generation=%d reason=%r", recovery, event.generation, why)
        if recovery == "restart":
            flush_output()
            os.kill(os.getpid(), signal.SIGKILL)  # A spare takes the place.
        return event

    def _met(self, error: BaseException) -> None:
        """Keep user code from an error of a group that is over; it is called nowhere else again."""
        call, context = self._user_call, current()
        engine = call.engine if call is not None else None
        if context is not None and outcome.is_group_broken(error):
            self._failed_generation = context.generation
        if (
            engine is None
            or context is None
            or engine.state_survives_here
            or engine.options.recovery == "in_place"
        ):
            return  # A loop continues by itself; who asked for nothing else is to get the error.
        generation = context.generation
        is_over = self._mailboxes.was_aborted(generation) or self._groups.peer_hung_up()
        if not (is_over and outcome.is_group_broken(error)):
            return
        failure = outcome.failure_of(error)
        log.info("held_back generation=%d error=%s", generation, failure.error_type)
        flush_output()
        self._mailboxes.post(TrainRaised(generation, failure, group_broken=True))
        while True:
            threading.Event().wait()

    # ------------------------------------------------------------ groups that change under a loop

    def rejoin(
        self, generation: int, error: BaseException | None, at_boundary: bool
    ) -> WorkerContext:
        """Leave a group for a loop that continues, and return where it is in the next one.

        Called on the main thread, deep inside user code, which stays where it is meanwhile.
        """
        if error is None:
            self._mailboxes.post(TrainLeft(generation, at_boundary))
        else:
            failure = outcome.failure_of(error)
            self._mailboxes.post(TrainRaised(generation, failure, group_broken=True))
        return self._await_group()

    def _await_group(self) -> WorkerContext:
        """Form announced groups until one succeeds; the main loop of a busy worker."""
        self._mailboxes.activity.timing.stop()
        while True:
            order = self._mailboxes.wait_for_order()
            if isinstance(order, FormGroup):
                self._mailboxes.post(self._form(order.assignment))
            elif isinstance(order, EnterTrain):
                self._interrupter.move(order.assignment.generation)
                return self._enter(self._the_call(), order.assignment)
            else:
                raise InvariantViolation("asked to set up in the middle of a loop")

    def must_leave(self, generation: int) -> bool:
        return self._interrupter.is_over(generation) or self._mailboxes.was_aborted(generation)

    def is_group_over(self, generation: int) -> bool:
        return self.must_leave(generation) or self._groups.peer_hung_up()

    def has_failed(self, generation: int) -> bool:
        """Return whether a collective of this group may have failed in the script's code.

        NCCL's end without an error when they are aborted.
        """
        is_seen = self._failed_generation == generation
        return is_seen or (not c10d.all_by_gloo() and self.is_group_over(generation))

    def defer(self, on: bool) -> None:
        self._interrupter.defer(on)

    def declare(self, *, in_place: bool) -> None:
        self._mailboxes.post(LoopStateChanged(in_place))

    def _drop(self) -> None:
        """Cut our connections, so that members that still wait for us in the group continue too."""
        try:
            self._groups.drop()
        except GroupError as error:
            # Reported as a lost process, because user code is not at fault.
            log.critical("group_undroppable error=%r", str(error))
            self._leave_state()
            flush_output()
            os.kill(os.getpid(), signal.SIGKILL)

    def _leave_state(self) -> None:
        """Let the next process go on from where this one ends: no other may have come so far."""
        setup, call = self._setup, self._user_call
        engine = call.engine if call is not None else None
        left = engine.resume_state() if engine is not None else self._resume_state
        if setup is None or left is None:
            return
        snapshotter = setup.snapshotter
        try:
            snapshotter.leave(
                lambda: state_of(left, left.state, snapshotter.newest), left.cursor, left.steps
            )
        except Exception as error:  # Of memory, or of what the user has registered.
            log.warning("state_not_left steps=%d reason=%r", left.steps, str(error))

    # ------------------------------------------------------------ what user code finds

    def _make_reporter(
        self, setup: _WorkerSetup, assignment: Assignment, origin: ReportOrigin
    ) -> Reporter:
        storage = setup.storage
        return Reporter(
            origin,
            storage.directory if storage is not None else None,
            votes=ReportVotes(
                self._groups.store,
                assignment.rank,
                world_size=assignment.world_size,
                watch=peers_watch(self._groups.peer_hung_up),
            ),
            is_over=lambda: self._is_over(origin.generation),
            link=self._mailboxes,
            clock=self._clock,
            newest_checkpoint=assignment.reported_checkpoint,
            committer=storage.committer if storage is not None else None,
            spec=setup.assign.spec,
            on_commit=storage.validator.notify if storage is not None else lambda: None,
        )

    def _is_over(self, generation: int) -> bool:
        """Check whether a group is over. The caller waits for storage, and does not hang."""
        activity = self._mailboxes.activity
        if activity.beats:  # At 0 it is not judged.
            activity.beats += 1
        return self.must_leave(generation)

    def _context(self, setup: _WorkerSetup, call: _UserCall) -> WorkerContext:
        assign, spec = setup.assign, setup.assign.spec
        place = call.assignment or Assignment(
            spec.job_id, assign.worker_id, NO_GENERATION, 0, 0, 0, 0, 0, 0, leader_address=""
        )
        return WorkerContext(
            job_id=spec.job_id,
            job_name=spec.name,
            run_path=spec.run_path,
            worker_id=assign.worker_id,
            generation=place.generation,
            cause=place.cause,
            world_rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
            num_nodes=place.num_nodes,
            devices=setup.devices.names(),
            min_workers=spec.min_workers,
            max_workers=spec.max_workers,
            entry_kind=spec.entry.kind,
            reach=PeerAddress(
                assign.host,
                spec.collective_timeout_s,
                assign.worker_id.rpartition("/")[0],
                setup.ports,
            ),
            config=call.function.config,
            options=call.function.options,
            saved=place.automatic_checkpoint,
            copied=place.copied,
            copies=place.copies,
            copies_key=place.copies_key,
            reporter=call.reporter,
            link=self._mailboxes,
            activity=self._mailboxes.activity,
            snapshotter=setup.snapshotter,
            validator=setup.storage.validator if setup.storage is not None else None,
            join=self.join if call.assignment is None else None,
            show_group=self._groups.show,
            shielded=self._interrupter.shielded,
        )

    def _the_setup(self) -> _WorkerSetup:
        if self._setup is None:
            raise InvariantViolation("asked to form a group, or to train, before set-up")
        return self._setup

    def _the_call(self) -> _UserCall:
        if self._user_call is None:
            raise InvariantViolation("asked to enter a group while no train function runs")
        return self._user_call


def _is_group_over(event: TrainEvent) -> bool:
    """Return whether the train function was left because of its group."""
    return isinstance(event, TrainLeft) or (isinstance(event, TrainRaised) and event.group_broken)


def _how_it_left(call: _UserCall) -> str:
    """Return where user code has returned, for the members that still train."""
    engine, where = call.engine, ""
    if engine is not None and engine.data is not None:
        where = f" in epoch {engine.cursor.epoch}, step {engine.cursor.step}"
    if call.exited:
        return f"left{where} at {call.exited} (exit 0)"
    return f"left{where} (returned)"


def _backend_of(assign: Assign) -> str:
    backend = assign.spec.backend
    if backend == "auto":
        return BOTH_BACKENDS if assign.devices else "gloo"
    return backend


def _origin_of(assign: Assign, assignment: Assignment | None) -> ReportOrigin:
    if assignment is None:
        return ReportOrigin(assign.spec.job_id, NO_GENERATION, 0, 0)
    return ReportOrigin(
        assignment.job_id, assignment.generation, assignment.rank, assignment.world_size
    )
