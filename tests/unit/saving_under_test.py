"""Members of a group that take automatic checkpoints, all in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.core.config import JobSpec
from elastic.core.events.worker import CheckpointWritten, UserReported
from elastic.core.facts import JobId, RefusalCode, ReportKind
from elastic.core.policy.cursor import Cursor
from elastic.runtime.clock import SystemClock
from elastic.storage.run_directory import RunDirectory
from elastic.worker.base.mailboxes import ReportAnswer
from elastic.worker.checkpoint.checkpoint_writer import CheckpointWriter
from elastic.worker.checkpoint.committer import Committer
from elastic.worker.checkpoint.snapshot import RankInfo
from elastic.worker.checkpoint.snapshotter import Snapshotter
from elastic.worker.state.train_state import TrainState
from tests.patience import DEADLINE_S
from tests.strategies import SCRIPT

WRITERS: list[CheckpointWriter] = []
"""Those of the test that runs."""


class Coordinator:
    """Answers for the coordinator: consent, unless told otherwise."""

    def __init__(self) -> None:
        self.refuses = ""
        self.code = RefusalCode.GENERATION_OVER
        self.told: list[CheckpointWritten] = []
        self._answers: dict[tuple[int, int], ReportAnswer] = {}

    def expect_answer(self, generation: int, kind: ReportKind, index: int) -> ReportAnswer:
        return self._answers.setdefault((generation, index), ReportAnswer())

    def post(self, item: UserReported | CheckpointWritten) -> None:
        assert isinstance(item, CheckpointWritten)
        self.told.append(item)
        answer = self._answers.pop((item.generation, item.index))
        answer.accepted, answer.reason = not self.refuses, self.refuses
        answer.code = self.code if self.refuses else RefusalCode.NONE
        answer.ready.set()


def writer_of(
    directory: RunDirectory, coordinator: Coordinator, job: str = "j1", num_to_keep: int = -1
) -> CheckpointWriter:
    """Return a writer whose thread ends with the test."""
    spec = JobSpec(
        job_id=JobId(job),
        name="r",
        entry=SCRIPT,
        min_workers=1,
        max_workers=1,
        num_to_keep=num_to_keep,
    )
    committer = Committer(directory, spec, coordinator)
    writer = CheckpointWriter(directory, spec.job_id, committer=committer, clock=SystemClock())
    WRITERS.append(writer)
    return writer


class Table:
    """Where members tell each other rows, as they do over a process group."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=DEADLINE_S / 3)
        self._rows: list[tuple[float, ...]] = [()] * size

    def tell(self, group: int, values: Sequence[float]) -> list[tuple[float, ...]]:
        """Take the row of the member that this is the rank of."""
        self._rows[group] = tuple(values)
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows


class Tied(nn.Module):
    """A model with a shared parameter and a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3), persistent=False)


class Run:
    """The state of a run after a few steps, and the members that hold it."""

    def __init__(
        self,
        folder: Path | str,
        *,
        workers: int = 1,
        seed: int = 0,
        coordinator: Coordinator | None = None,
        job: str = "j1",
        num_to_keep: int = -1,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Tied()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.objects = TrainState()
        self.objects.models.append(self.model)
        self.objects.optimizers.append(self.optimizer)
        self.coordinator = coordinator or Coordinator()
        self.directory = RunDirectory(str(folder))
        self.savers = []
        for rank in range(workers):
            writer = writer_of(self.directory, self.coordinator, job, num_to_keep)
            snapshotter = Snapshotter((), writer)
            snapshotter.enter(RankInfo(1, rank, workers))
            self.savers.append(snapshotter)
        self.steps = 0

    def step(self) -> None:
        """Change the state."""
        x = self.model.norm(self.model.embed(torch.arange(6)))
        self.model.head(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.seen += 1
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"objects": self.objects.take(), "cursor": [0, self.steps], "steps": self.steps}

    def save(self, *, wait: bool = True) -> None:
        """Step, and have every member take the snapshot."""
        self.step()
        for one in self.savers:  # They exchange that before each.
            one.know_all_settled()
        done = [
            snapshotter.take(
                self.state, Cursor(0, self.steps), self.steps, aliases=self.objects.aliases()
            )
            for snapshotter in self.savers
        ]
        for one in done if wait else ():
            assert one.wait(DEADLINE_S)

    def committed(self) -> list[str]:
        """Return the names of checkpoints that count, oldest first."""
        found = sorted(self.directory.markers(), key=lambda pair: pair[1].index)
        return [name for name, _ in found]

    def folder(self, name: str) -> Path:
        """Return where a checkpoint lies."""
        return Path(self.directory.checkpoint_path(name))


def assert_same(one: Any, other: Any) -> None:
    """Compare nested states, bit by bit."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other
