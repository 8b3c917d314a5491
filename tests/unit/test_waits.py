"""Waits in torch's place: what they let through, what they give up, and what they leave behind."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.errors import UsageError
from elastic.worker.group import c10d
from elastic.worker.group.abortable_wait import MESSAGES, AbortableWait, checked
from elastic.worker.group.collective_watch import seen_stack
from elastic.worker.process.broken_group_hold import _checked_at, held_back
from tests.patience import DEADLINE_S


@dataclass
class PlayedLife:
    """A life whose end the test says."""

    spec: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(generation=1))
    aborted: bool = False
    timeout: timedelta = timedelta(seconds=DEADLINE_S)


@dataclass
class PlayedWork:
    """A work that ends when the test says so."""

    kind: int = 1
    done: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    began: threading.Event = field(default_factory=threading.Event)

    def _get_op_type(self) -> int:
        return self.kind

    def is_completed(self) -> bool:
        return self.done.is_set()


def real(work: PlayedWork, timeout: Any = None) -> bool:
    """Wait as torch does."""
    work.began.set()
    if not work.done.wait(timeout.total_seconds() if timeout is not None else DEADLINE_S):
        raise RuntimeError("Operation timed out!")
    if work.error:
        raise RuntimeError(work.error)
    return True


@pytest.fixture
def life() -> PlayedLife:
    return PlayedLife()


@pytest.fixture
def waits(life: PlayedLife, monkeypatch: pytest.MonkeyPatch) -> AbortableWait:
    monkeypatch.setattr(c10d, "all_by_gloo", lambda: True)
    return AbortableWait(lambda: life)  # type: ignore[arg-type, return-value]


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    """Make a call in another thread; what it raises comes into the list."""
    errors: list[str] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


KINDS = [1, *sorted(MESSAGES)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_work_that_ends_gives_what_torch_gives(waits: AbortableWait, kind: int) -> None:
    work = PlayedWork(kind)
    threading.Timer(0.12, work.done.set).start()
    assert waits.wait(real, work) is True
    work.error = "Connection closed by peer"
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        waits.wait(real, work)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_is_given_up_once_its_group_was_aborted(
    waits: AbortableWait, life: PlayedLife, kind: int
) -> None:
    work = PlayedWork(kind)
    thread, errors = in_thread(lambda: waits.wait(real, work))
    assert work.began.wait(DEADLINE_S)
    assert thread.is_alive()
    life.aborted = True
    thread.join(DEADLINE_S)
    assert "the group is over" in errors[0]
    work.done.set()


def test_a_wait_that_lasts_may_be_found_to_be_in_vain(waits: AbortableWait) -> None:
    def check() -> None:
        raise UsageError("the others do not come")

    over, lasting = PlayedWork(), PlayedWork()
    over.done.set()
    with checked(check, while_waiting=True):
        assert waits.wait(real, over) is True
        with pytest.raises(UsageError, match="the others do not come"):
            waits.wait(real, lasting)


def test_a_timeout_of_the_callers_is_torchs(waits: AbortableWait) -> None:
    asked: list[Any] = []
    waits.wait(lambda work, *args, **named: asked.append((args, named)), PlayedWork(), timeout=3)
    waits.wait(lambda work, *args, **named: asked.append((args, named)), PlayedWork(), 4)
    assert asked == [((), {"timeout": 3}), ((4,), {})]


def test_messages_have_the_groups_time_and_not_that_of_forming(
    waits: AbortableWait, life: PlayedLife
) -> None:
    asked: list[Any] = []
    waits.wait(lambda _, *args: asked.append(args), PlayedWork(13))
    assert asked == [(life.timeout,)]


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_stands_where_it_has_begun_to_wait(waits: AbortableWait, kind: int) -> None:
    """Waits go round in slices, which would look like movement, and stand in torch's place."""
    work = PlayedWork(kind)
    in_torchs_place = _checked_at(functools.partial(waits.wait, real, work), lambda error: None)

    def of_torchs() -> None:
        in_torchs_place()

    thread, _ = in_thread(of_torchs)
    assert work.began.wait(DEADLINE_S)
    assert seen_stack(thread)[0][0] == id(of_torchs.__code__)
    work.done.set()
    thread.join(DEADLINE_S)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_error_of_a_barrier_that_waits_in_torch_is_met_before_the_script_has_it(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **named: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    met: list[BaseException] = []
    monkeypatch.setattr(dist.ProcessGroup, "monitored_barrier", closed)
    with held_back(met.append), pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier()
    assert met == [caught.value]


def test_a_collective_is_none_of_what_torch_numbers_as_messages(alone: None) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    assert work._get_op_type() not in MESSAGES
    assert c10d.all_by_gloo()
    work.wait()
