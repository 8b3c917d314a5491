"""The main thread of a worker: takes one order at a time and answers it with one event.

Rule: user code runs only inside `_call`, and nothing of a call that ended early outlives it: its
frames are let go and its group is dropped before the answer is posted. The group of a call that
returned stays: other members may still be using it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from elastic.core.events.worker import (
    FormGroup,
    GroupFailed,
    GroupFormed,
    Setup,
    SetupFailed,
    StoreOpened,
    TrainLeft,
    TrainRaised,
    TrainReturned,
)
from elastic.core.messages import Assign
from elastic.core.world import Assignment
from elastic.errors import GroupError, InvariantViolation
from elastic.runtime.clock import Clock
from elastic.worker import entry, environment, outcome
from elastic.worker.agreement import Agreement
from elastic.worker.context import WorkerContext, set_current
from elastic.worker.control import flush_output
from elastic.worker.exchange import Exchange
from elastic.worker.group import GroupSpec, ProcessGroups, StoreServer
from elastic.worker.interrupt import GroupChanged, Interrupter
from elastic.worker.progress import StepCounter
from elastic.worker.pruning import Pruner
from elastic.worker.reporting import Place, Reporter
from elastic.worker.storage import RunDirectory

log = logging.getLogger(__name__)

LOOK_INTERVAL_NS = 50_000_000
"""How often a member that waits in a report looks whether its peers are still connected."""
BOTH_BACKENDS = "cpu:gloo,cuda:nccl"
"""With accelerators: tensors may be on either side, and gloo's connections show a lost peer."""

TrainEvent = TrainReturned | TrainLeft | TrainRaised


class Runner:
    """Sets up once, then forms and trains, generation after generation."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        groups: ProcessGroups,
        interrupter: Interrupter,
        started_with: Mapping[str, str],
        clock: Clock,
    ) -> None:
        """Begin as a spare.

        Args:
            exchange: where orders come from and answers go.
            groups: the process's default group.
            interrupter: lets the control thread end a call.
            started_with: the environment of this process.
            clock: for telemetry and files.
        """
        self._exchange = exchange
        self._groups = groups
        self._interrupter = interrupter
        self._started_with = started_with
        self._clock = clock
        self._assign: Assign | None = None
        self._server: StoreServer | None = None
        self._prepare: Callable[[], entry.Call] | None = None
        self._run_directory: RunDirectory | None = None

    def run(self) -> NoReturn:
        """Do what is ordered until the control thread ends the process."""
        while True:
            order = self._exchange.wait_for_order()
            if isinstance(order, Setup):
                self._exchange.post(self._set_up(order.assign))
            elif isinstance(order, FormGroup):
                self._exchange.post(self._form(order.assignment))
            else:
                self._exchange.post(self._train(order.assignment))

    # ------------------------------------------------------------ set up and form

    def _set_up(self, assign: Assign) -> StoreOpened | SetupFailed:
        spec = assign.spec
        try:
            os.environ.update(environment.for_job(assign, self._started_with))
            self._assign = assign
            self._server = StoreServer(assign.host)
            self._run_directory = RunDirectory(spec.run_path) if spec.run_path else None
            self._prepare = entry.load(spec.entry)
        except BaseException as error:
            # Also what a module of the user's does while it is imported, such as sys.exit.
            failure = outcome.failure_of(error, "set-up")
            print(failure.traceback, file=sys.stderr)
            return SetupFailed(failure)
        # What was imported stays: collections between two groups need not visit it (20 ms).
        gc.collect()
        gc.freeze()
        log.info("worker_set_up worker=%s store=%s", assign.worker_id, self._server.address)
        return StoreOpened(self._server.address)

    def _form(self, assignment: Assignment) -> GroupFormed | GroupFailed:
        assign = self._assigned()
        backend = assign.spec.backend
        if backend == "auto":
            backend = BOTH_BACKENDS if assign.devices else "gloo"
        spec = GroupSpec(
            generation=assignment.generation,
            rank=assignment.rank,
            world_size=assignment.world_size,
            leader_address=assignment.leader_address,
            backend=backend,
            host=assign.host,
            timeout_s=assign.spec.collective_timeout_s,
            job_id=assign.spec.job_id,
        )
        try:
            self._groups.form(spec)
        except GroupError as error:
            return GroupFailed(assignment.generation, str(error))
        return GroupFormed(assignment.generation)

    # ------------------------------------------------------------ train

    def _train(self, assignment: Assignment) -> TrainEvent:
        """Call the train function in the group that stands, and leave nothing of it behind."""
        assign = self._assigned()
        os.environ.update(environment.for_generation(assign, assignment, self._started_with))
        threads = environment.num_threads(
            assignment, dict(assign.spec.entry.env), self._started_with
        )
        if threads is not None:
            torch.set_num_threads(threads)
        event = self._call(assign, assignment)
        flush_output()
        if not isinstance(event, TrainReturned):
            self._drop()
        gc.collect()
        return event

    def _call(self, assign: Assign, assignment: Assignment) -> TrainEvent:
        """Call user code and say how it ended."""
        generation = assignment.generation
        reporter: Reporter | None = None
        try:
            prepare = self._prepare
            if prepare is None:
                raise InvariantViolation("told to train before set-up")
            reporter = self._reporter(assign, assignment)
            call = prepare()
            set_current(self._context(assign, assignment, call, reporter))
            result = self._interrupter.run(generation, call.run)
            reporter.finish()
            return TrainReturned(generation, outcome.result_json(result))
        except BaseException as error:
            event = self._ended_early(generation, error, reporter)
            outcome.forget_frames(error)
            return event
        finally:
            set_current(None)

    def _ended_early(
        self, generation: int, error: BaseException, reporter: Reporter | None
    ) -> TrainEvent:
        """Say what an exception out of user code means, and print it if it is user code's."""
        if isinstance(error, GroupChanged):
            at_boundary = reporter is not None and reporter.has_left
            log.info("train_left generation=%d at_boundary=%s", generation, at_boundary)
            return TrainLeft(generation, at_boundary)
        exit_code = outcome.exit_code_of(error) if isinstance(error, SystemExit) else None
        if exit_code == 0:
            return TrainReturned(generation, outcome.NO_RESULT)
        failure = outcome.failure_of(error, reporter.position() if reporter else "")
        is_broken = (
            outcome.is_group_broken(error)
            or self._exchange.was_aborted(generation)
            or self._groups.peer_hung_up()
        )
        if is_broken:
            log.warning("group_broken generation=%d error=%s", generation, failure.error_type)
        else:
            print(failure.traceback, file=sys.stderr)
        return TrainRaised(generation, failure, group_broken=is_broken, exit_code=exit_code)

    def _drop(self) -> None:
        """Cut our connections, so that members who still wait for us in the group go on too."""
        try:
            self._groups.drop()
        except GroupError as error:
            # Told as a lost process, because it is no fault of user code.
            log.critical("group_undroppable error=%r", str(error))
            flush_output()
            os.kill(os.getpid(), signal.SIGKILL)

    # ------------------------------------------------------------ what user code finds

    def _pruner(self, assign: Assign, assignment: Assignment) -> Pruner | None:
        run = self._run_directory
        return Pruner(run, assign.spec, assignment.checkpoint) if run is not None else None

    def _reporter(self, assign: Assign, assignment: Assignment) -> Reporter:
        place = Place(
            assignment.job_id, assignment.generation, assignment.rank, assignment.world_size
        )
        return Reporter(
            place,
            self._run_directory,
            agreement=Agreement(
                self._groups.store,
                assignment.rank,
                world_size=assignment.world_size,
                watch=self._peers_watch(),
            ),
            link=self._exchange,
            clock=self._clock,
            newest_checkpoint=assignment.checkpoint,
            pruner=self._pruner(assign, assignment),
        )

    def _peers_watch(self) -> Callable[[], None]:
        """Return what a member that waits in a report calls now and then."""
        look_at_ns = 0

        def look() -> None:
            nonlocal look_at_ns
            now_ns = time.monotonic_ns()
            if now_ns >= look_at_ns:
                look_at_ns = now_ns + LOOK_INTERVAL_NS
                if self._groups.peer_hung_up():
                    raise GroupError("a member left the group while others wait in train.report")

        return look

    def _context(
        self, assign: Assign, assignment: Assignment, call: entry.Call, reporter: Reporter
    ) -> WorkerContext:
        spec = assign.spec
        return WorkerContext(
            job_id=spec.job_id,
            job_name=spec.name,
            run_path=spec.run_path,
            worker_id=assign.worker_id,
            generation=assignment.generation,
            cause=assignment.cause,
            world_rank=assignment.rank,
            world_size=assignment.world_size,
            local_rank=assignment.local_rank,
            local_world_size=assignment.local_world_size,
            node_rank=assignment.node_rank,
            num_nodes=assignment.num_nodes,
            device="cuda:0" if assign.devices else "cpu",
            num_devices=len(assign.devices),
            config=call.config,
            options=call.options,
            reporter=reporter,
            step_counter=StepCounter(
                assign.worker_id,
                assignment.generation,
                tell=self._exchange.post,
                clock=self._clock,
            ),
            link=self._exchange,
        )

    def _assigned(self) -> Assign:
        if self._assign is None:
            raise InvariantViolation("told to form a group before set-up")
        return self._assign
