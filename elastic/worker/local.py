"""A train function in the user's own process, without coordinator and agent.

Rule: the same code as in a worker does the reports, so what works here works there. Under
torchrun each process is a member of torchrun's group; alone, it is a group of one.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from elastic.core.events.worker import UserReported, WorkerEvent
from elastic.core.messages import Progress
from elastic.core.world import CheckpointRecord, Generation, JobId, WorkerId
from elastic.errors import UsageError
from elastic.runtime.clock import Clock, SystemClock
from elastic.worker.agreement import Agreement
from elastic.worker.context import WorkerContext, set_current
from elastic.worker.entry import call_with_config
from elastic.worker.exchange import Answer
from elastic.worker.outcome import result_json
from elastic.worker.progress import StepCounter
from elastic.worker.reporting import Place, Reporter
from elastic.worker.storage import RunDirectory

FACTS_KEY = "facts"


@dataclass(frozen=True)
class LocalOutcome:
    """What a train function left behind.

    Attributes:
        result: JSON of what it returned.
        checkpoints: committed ones, oldest first; on rank 0, as a rule.
    """

    result: str
    checkpoints: tuple[CheckpointRecord, ...]


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What to run here.

    Attributes:
        job_name: of the run.
        run_path: the run directory, "" for none.
        config: for the train function.
        use_gpu: train on this process's accelerator.
        backend: "gloo", "nccl" or "auto".
        timeout_s: of collectives.
    """

    job_name: str
    run_path: str = ""
    config: Any = None
    use_gpu: bool = False
    backend: str = "auto"
    timeout_s: float = 1800.0


def run_local(
    function: Callable[..., Any],
    config: Any,
    *,
    job_name: str,
    run_path: str,
    use_gpu: bool = False,
    backend: str = "auto",
    timeout_s: float = 1800.0,
) -> LocalOutcome:
    """Call a train function here; what it raises is raised.

    Args:
        function: takes the config, or nothing.
        config: its argument.
        job_name: of the run.
        run_path: the run directory, "" for none.
        use_gpu: train on this process's accelerator.
        backend: "gloo", "nccl" or "auto".
        timeout_s: of collectives.

    Raises:
        UsageError: an accelerator is asked for and there is none.
        StorageError: the run directory cannot be read or written.
    """
    run = LocalRun(
        job_name=job_name,
        run_path=run_path,
        config=config,
        use_gpu=use_gpu,
        backend=backend,
        timeout_s=timeout_s,
    )
    link = NoCoordinator()
    with local_context(run, link):
        result = call_with_config(function, config)
    return LocalOutcome(result_json(result), link.checkpoints())


class NoCoordinator:
    """Stands where a worker has its agent: nothing is planned here, every report is taken."""

    def __init__(self) -> None:
        """Begin before the first report."""
        self._num_reports = 0
        self._checkpoints: list[CheckpointRecord] = []

    def post(self, item: WorkerEvent | Progress) -> None:
        """Keep checkpoints; nobody is there for the rest."""
        if not isinstance(item, UserReported):
            return
        if item.checkpoint:
            record = CheckpointRecord(
                item.checkpoint, item.generation, self._num_reports, item.metrics
            )
            self._checkpoints.append(record)
        self._num_reports += 1

    def wish(self, generation: Generation) -> str:
        """Return "": nothing ever changes."""
        return ""

    def expect_answer(self, generation: Generation, index: int) -> Answer:
        """Return consent."""
        answer = Answer(accepted=True)
        answer.ready.set()
        return answer

    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """Return those that this process committed, oldest first."""
        return tuple(self._checkpoints)


@contextmanager
def local_context(run: LocalRun, link: NoCoordinator | None = None) -> Iterator[WorkerContext]:
    """Be the context of this process for the time of the `with` block.

    Forms a group of one if the process is in none, so that code with `torch.distributed` works,
    and takes it down again; under torchrun joins torchrun's group, and leaves it standing.

    Raises:
        UsageError: an accelerator is asked for and there is none.
        StorageError: the run directory cannot be read.
    """
    formed = _form(run)
    try:
        context = _context(run, link or NoCoordinator(), SystemClock())
        set_current(context)
        yield context
    finally:
        set_current(None)
        if formed and dist.is_initialized():
            dist.destroy_process_group()


def _form(run: LocalRun) -> bool:
    """Join or form the default group; return whether it is ours to take down."""
    if run.use_gpu and not torch.cuda.is_available():
        raise UsageError(
            f"run {run.job_name}: use_gpu=True, but torch finds no accelerator here; use "
            f"use_gpu=False, or look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if dist.is_initialized():
        return False
    backend = run.backend
    if backend == "auto":
        backend = "nccl" if run.use_gpu else "gloo"
    timeout = datetime.timedelta(seconds=run.timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return False
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def _context(run: LocalRun, link: NoCoordinator, clock: Clock) -> WorkerContext:
    environ = os.environ
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generation = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    directory = RunDirectory(run.run_path) if run.run_path else None
    store = _own_keys()
    job_id, newest = _shared_facts(store, rank, directory, clock)
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    device = "cpu"
    if run.use_gpu:
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    place = Place(JobId(job_id), generation, rank, world_size)
    worker_id = WorkerId(f"local/{rank}")
    return WorkerContext(
        job_id=place.job_id,
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
        device=device,
        num_devices=1 if run.use_gpu else 0,
        config=run.config,
        is_local=True,
        reporter=Reporter(
            place,
            directory,
            agreement=Agreement(store, rank, world_size=world_size),
            link=link,
            clock=clock,
            newest_checkpoint=newest,
        ),
        step_counter=StepCounter(worker_id, generation, tell=link.post, clock=clock),
        link=link,
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


def _shared_facts(
    store: Store, rank: int, directory: RunDirectory | None, clock: Clock
) -> tuple[str, str]:
    """Return a job id and the newest checkpoint, both as rank 0 sees them."""
    if rank == 0:
        newest = directory.newest_checkpoint() if directory else ""
        store.set(FACTS_KEY, json.dumps([f"local-{clock.unix_ns() // 1_000_000}", newest]))
    job_id, newest = json.loads(store.get(FACTS_KEY))
    return job_id, newest
