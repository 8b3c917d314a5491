"""A train function in the user's own process, without coordinator and agent.

Rule: the same code as in a worker does the reports, so what works here works there. Under
torchrun each process is a member of torchrun's group; alone, it is a group of one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from elastic.core.config import JobSpec
from elastic.core.events.worker import UserReported, WorkerEvent
from elastic.core.facts import (
    CheckpointRecord,
    Entry,
    EntryKind,
    Generation,
    JobId,
    ReportKind,
    WorkerId,
)
from elastic.core.messages import Progress
from elastic.core.telemetry import Goodput
from elastic.errors import ElasticError, GroupError, UsageError
from elastic.runtime.clock import Clock, SystemClock
from elastic.runtime.route import address_towards
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.mailboxes import ReportAnswer
from elastic.worker.checkpoint.checkpoint_writer import CheckpointWriter
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.report_votes import ReportVotes
from elastic.worker.checkpoint.reported_checkpoints import ReportOrigin
from elastic.worker.checkpoint.reporting import Reporter
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.checkpoint.validating import Validator
from elastic.worker.data.randomness import seed_everything
from elastic.worker.data.seeding import FIRST_SEED
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.outcome import NO_RESULT, exit_code_of, result_json
from elastic.worker.engine.step_engine import StepEngine
from elastic.worker.engine.train_call import current_engine, set_current
from elastic.worker.group.group import BOTH_BACKENDS
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.process.entry import call_with_config

FACTS_KEY = "facts"
CHOICE_KEY = "choice"


@dataclass(frozen=True)
class LocalOutcome:
    """What a train function left behind.

    Attributes:
        result: JSON of what it returned.
        checkpoints: committed ones, oldest first; on rank 0, as a rule.
        goodput: where this process's time went.
    """

    result: str
    checkpoints: tuple[CheckpointRecord, ...]
    goodput: Goodput


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What to run here.

    Attributes:
        run_path: the run directory, "" for none.
        options: what the user chose of the step engine.
        use_gpu: train on this process's accelerator.
        backend: "gloo", "nccl" or "auto".
        timeout_s: of collectives.
        job_id: of this attempt, "" to draw one.
        resume_from: path of the reported checkpoint that it begins with, "" for none.
        num_to_keep, score_attribute, score_order: which checkpoints are kept, as in `JobSpec`.
        on_report: called with what rank 0 has reported, on rank 0.
    """

    job_name: str
    run_path: str = ""
    job_id: str = ""
    resume_from: str = ""
    config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    use_gpu: bool = False
    backend: str = "auto"
    timeout_s: float = 1800.0
    num_to_keep: int = -1
    score_attribute: str = ""
    score_order: str = "max"
    on_report: Callable[[dict[str, Any]], None] | None = None


def run_local(function: Callable[..., Any], run: LocalRun) -> LocalOutcome:
    """Call a train function here; what it raises is raised, except for `sys.exit(0)`.

    Raises:
        UsageError: an accelerator is asked for and there is none.
        StorageError: the run directory cannot be read or written.
    """
    with local_context(run) as context:
        try:
            result = result_json(call_with_config(function, run.config))
        except SystemExit as error:
            if exit_code_of(error):
                raise
            result = NO_RESULT
        if (engine := current_engine()) is not None:
            engine.check_left()
        context.the_reporter().finish()
        context.snapshotter.finish()
        if context.validator is not None:
            context.validator.finish(lambda: False)
        context.link.deliver()
    kept: tuple[CheckpointRecord, ...] = ()
    if run.run_path:
        kept = RunDirectory(run.run_path).records()
    return LocalOutcome(result, kept, context.timing.spent())


class NoCoordinator:
    """Replaces the agent of a worker: nothing is planned here, every report is accepted."""

    def __init__(self, on_report: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Pass rank 0's reports to this function, in the thread that we are in now."""
        self._on_report = on_report
        self._thread = threading.get_ident()
        self._unreported: queue.SimpleQueue[str] = queue.SimpleQueue()

    def post(self, item: WorkerEvent | Progress) -> None:
        """Pass reports on; all else has no receiver here.

        One whose checkpoint was uploaded in the background comes from another thread, where the
        user's callback does not expect to be: it is passed on with the next one.
        """
        if isinstance(item, UserReported) and item.rank == 0:
            self._unreported.put(item.metrics)
            self.deliver()

    def report_work(self) -> None:
        """Do nothing: there is no agent."""

    def deliver(self) -> None:
        """Pass on what was posted by other threads."""
        if threading.get_ident() != self._thread:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                metrics = self._unreported.get_nowait()
                if self._on_report is not None:
                    self._on_report(json.loads(metrics))

    def leave_request(self, generation: Generation) -> None:
        del generation

    def is_called_off(self, generation: Generation) -> bool:
        del generation
        return False

    def save_request(self, generation: Generation) -> int:
        return 0

    def preemption(self, generation: Generation, now_ns: int) -> None:
        del generation, now_ns

    def expect_answer(self, generation: Generation, kind: ReportKind, index: int) -> ReportAnswer:
        answer = ReportAnswer(accepted=True)
        answer.ready.set()
        return answer


class NoNextGroup:
    """Replaces the source of a worker's groups: here there is exactly one."""

    def rejoin(self, generation: int, error: BaseException | None, at_boundary: bool) -> Any:
        """Raise what broke the group; torchrun, if it started us, starts all processes again."""
        del at_boundary
        raise GroupError(f"generation {generation} is over: {error}") from error

    def must_leave(self, generation: int) -> bool:
        del generation
        return False

    def is_group_over(self, generation: int) -> bool:
        """Return False: what breaks the group raises."""
        del generation
        return False

    def has_failed(self, generation: int) -> bool:
        del generation
        return False

    def defer(self, on: bool) -> None:
        """Nothing interrupts the train function here."""
        del on

    def declare(self, *, in_place: bool) -> None:
        del in_place


@contextmanager
def local_context(run: LocalRun) -> Iterator[WorkerContext]:
    """Be the context of this process for the time of the `with` block.

    Raises:
        UsageError: an accelerator is asked for and there is none.
        StorageError: the run directory cannot be read.
    """
    with local_group(run):
        engine = StepEngine(NoNextGroup())
        engine.configure(run.options)
        try:
            context = _context(run, NoCoordinator(run.on_report), SystemClock())
            engine.enter(context)
            set_current(context, engine)
            seed_everything(FIRST_SEED)
            context.timing.call_begins()
            context.timing.enter(context.worker_id, context.generation, context.link.post)
            context.timing.resume()
            try:
                yield context
            finally:
                context.timing.stop()
                context.the_reporter().close()
                context.the_reporter().flush()
                context.snapshotter.close()
                if context.validator is not None:
                    context.validator.close()
        finally:
            engine.close()
            set_current(None)


@contextmanager
def local_group(run: LocalRun) -> Iterator[None]:
    """Have a default group for the time of the `with` block.

    Forms a group of one if the process is in none, so that code with `torch.distributed` works,
    and takes it down again; under torchrun joins torchrun's group, and leaves it standing.
    UsageError if an accelerator is asked for and there is none.
    """
    formed = _form(run)
    try:
        yield
    finally:
        if formed and dist.is_initialized():
            dist.destroy_process_group()


def torchrun_rank() -> int | None:
    """Return this process's rank if torchrun started it, otherwise None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"])
    return None


def is_restart() -> bool:
    """Return whether torchrun has started this process in place of an earlier one."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def from_rank_zero(choose: Callable[[], str]) -> str:
    """Return what `choose` returns on rank 0; every member of the group must call this.

    What it raises is raised there, and a `UsageError` with its text on the other ranks.
    """
    store = _own_keys()
    if dist.get_rank() != 0:
        value, problem = json.loads(store.get(CHOICE_KEY))
        if problem:
            raise UsageError(f"rank 0: {problem}")
        return str(value)
    try:
        chosen = choose()
    except ElasticError as error:
        store.set(CHOICE_KEY, json.dumps(["", str(error)]))
        raise
    store.set(CHOICE_KEY, json.dumps([chosen, ""]))
    return chosen


def _form(run: LocalRun) -> bool:
    """Join or form the default group; return whether it is ours to take down."""
    if run.use_gpu and not torch.cuda.is_available():
        raise UsageError(
            f"run {run.job_name}: use_gpu=True, but torch finds no accelerator here; use "
            f"use_gpu=False, or check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if dist.is_initialized():
        return False
    backend = run.backend
    if backend == "auto":
        backend = BOTH_BACKENDS if run.use_gpu else "gloo"
    timeout = datetime.timedelta(seconds=run.timeout_s)
    if torchrun_rank() is not None:
        dist.init_process_group(backend, timeout=timeout)
        return False
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def _context(run: LocalRun, link: NoCoordinator, clock: Clock) -> WorkerContext:
    environ = os.environ
    rank, world_size = dist.get_rank(), dist.get_world_size()
    directory = RunDirectory(run.run_path) if run.run_path else None
    store = _own_keys()
    job_id, generation, newest = _shared_facts(store, rank, run, clock)
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    devices: tuple[str, ...] = ()
    if run.use_gpu:
        devices = (f"cuda:{local_rank % torch.cuda.device_count()}",)
        torch.cuda.set_device(devices[0])
    origin = ReportOrigin(JobId(job_id), generation, rank, world_size)
    spec = _retention(run, origin.job_id)
    committer = writer = None
    if directory is not None:
        committer = Committer(directory, spec, link)
        committer.enter(generation, [newest], leads=rank == 0)
        writer = CheckpointWriter(directory, origin.job_id, committer=committer, clock=clock)
    snapshotter = Snapshotter((), writer)
    validator = Validator(directory, spec, link) if directory is not None else None
    if validator is not None:
        validator.configure(run.options.get("validation"))
        validator.enter(generation, rank)
    worker_id = WorkerId(f"local/{rank}")
    return WorkerContext(
        job_id=origin.job_id,
        job_name=run.job_name,
        run_path=run.run_path,
        worker_id=worker_id,
        generation=generation,
        cause="start",
        world_rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        node_rank=int(environ.get("GROUP_RANK", "0")),
        num_nodes=int(environ.get("GROUP_WORLD_SIZE", "1")),
        devices=devices,
        min_workers=world_size,
        max_workers=world_size,
        reach=PeerAddress(_own_address(), run.timeout_s),
        config=run.config,
        is_local=True,
        reporter=Reporter(
            origin,
            directory,
            votes=ReportVotes(store, rank, world_size=world_size),
            link=link,
            clock=clock,
            newest_checkpoint=newest,
            committer=committer,
            spec=spec,
            on_commit=validator.notify if validator is not None else lambda: None,
        ),
        link=link,
        snapshotter=snapshotter,
        validator=validator,
    )


def _own_address() -> str:
    """Return the address of this machine on the way to torchrun's first node."""
    try:
        return address_towards(os.environ.get("MASTER_ADDR", "localhost"))
    except OSError:
        return "127.0.0.1"


def _retention(run: LocalRun, job_id: JobId) -> JobSpec:
    """Return the run as the pruner knows it."""
    return JobSpec(
        job_id=job_id,
        name=run.job_name,
        entry=Entry(EntryKind.FUNCTION, "local"),
        min_workers=1,
        max_workers=1,
        num_to_keep=run.num_to_keep,
        score_attribute=run.score_attribute,
        score_order=run.score_order,
    )


_contexts_opened = 0


def _own_keys() -> Store:
    """Return a part of the group's store that no other run in this process has used.

    Every member opens its runs in the same order, so counting them names the same part.
    """
    global _contexts_opened
    _contexts_opened += 1
    default: Store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"elastic/{_contexts_opened}", default)


def new_job_id() -> JobId:
    """Return an id for a run in this process, never the same in two runs."""
    return JobId(f"local-{SystemClock().unix_ns() // 1_000_000}")


def _shared_facts(store: Store, rank: int, run: LocalRun, clock: Clock) -> tuple[str, int, str]:
    """Return job id, generation and the newest checkpoint, all as rank 0 sees them."""
    if rank == 0:
        # The same after a restart by torchrun, where the run directory's creator knows it.
        launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        unique = launch if launch.isalnum() and launch != "none" else clock.unix_ns() // 1_000_000
        job_id = run.job_id or f"local-{unique}"
        generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
        newest = run.resume_from
        if run.run_path:
            directory = RunDirectory(run.run_path)
            # Torchrun counts its restarts after failures, and not those for nodes that come or go.
            generation = max(generation, 1 + directory.newest_generation(job_id))
            newest = newest or directory.newest_checkpoint()
        store.set(FACTS_KEY, json.dumps([job_id, generation, newest]))
    job_id, generation, newest = json.loads(store.get(FACTS_KEY))
    return job_id, generation, newest
