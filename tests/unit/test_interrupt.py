"""GroupChanged reaches user code wherever it is, and never anybody else."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from elastic.errors import UsageError
from elastic.worker.base import interrupt
from elastic.worker.base.interrupt import GroupChanged, Interrupter
from tests.patience import DEADLINE_S


@pytest.fixture
def interrupter() -> Interrupter:
    return Interrupter()


@pytest.fixture
def fast_switching() -> Iterator[None]:
    """Let threads take turns often, so that they meet at many more places."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def another_thread(call: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def interrupted(interrupter: Interrupter, code: Callable[[threading.Event], Any]) -> float:
    """Run code that says when it is inside; interrupt it there; return the ms that it took."""
    inside = threading.Event()
    told = 0.0

    def tell() -> None:
        nonlocal told
        assert inside.wait(DEADLINE_S)
        told = time.monotonic()
        interrupter.interrupt(1, "a member was lost")

    with another_thread(tell), pytest.raises(GroupChanged) as raised:
        interrupter.run(1, lambda: code(inside))
    ended = time.monotonic()
    assert (raised.value.reason, raised.value.generation) == ("a member was lost", 1)
    return (ended - told) * 1e3


def wait_busy(inside: threading.Event) -> None:
    inside.set()
    while True:
        pass


@dataclass
class Holder:
    """Something whose end takes so long that most interrupts find the main thread in it."""

    inside: threading.Event

    def __del__(self) -> None:
        self.inside.set()
        sum(number for number in range(20_000))


@pytest.mark.parametrize("patience_s", [0.0, 1.0])
def test_one_that_comes_in_a_destructor_is_neither_lost_nor_told(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(interrupt, "FRAGILE_S", patience_s)
    lost: list[Any] = []
    before = sys.unraisablehook
    sys.unraisablehook = lost.append

    def code(inside: threading.Event) -> None:
        while True:
            # One event for all would end with its lock held, when its `set` is left without
            # patience: what `test_locks_of_the_standard_library_are_given_back` is about.
            Holder(threading.Event())
            inside.set()
            sum(number for number in range(5_000))

    try:
        for _ in range(10):
            interrupted(Interrupter(), code)
    finally:
        sys.unraisablehook = before
    assert lost == []


def test_other_losses_are_still_told(interrupter: Interrupter) -> None:
    lost: list[Any] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: lost.append(unraisable.exc_type)

    class Fails:
        def __del__(self) -> None:
            raise ValueError("in a destructor")

    try:
        interrupter.run(1, lambda: Fails() and None)
        assert lost == [ValueError]
        assert sys.unraisablehook is not before
    finally:
        sys.unraisablehook = before


def test_a_shielded_section_is_not_torn(interrupter: Interrupter) -> None:
    written = []

    def code(inside: threading.Event) -> None:
        with interrupter.shielded():
            inside.set()
            with interrupter.shielded():
                threading.Event().wait(0.1)
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
            written.append("all of it")
        written.append("not this")

    interrupted(interrupter, code)
    assert written == ["all of it"]


def test_an_error_in_a_shielded_section_is_the_error_that_counts(
    interrupter: Interrupter,
) -> None:
    seen = []

    def code() -> None:
        try:
            with interrupter.shielded():
                interrupter.interrupt(1, "now")
                raise KeyError("disk full")
        except KeyError:
            seen.append("disk full")
        wait_busy(threading.Event())

    with pytest.raises(GroupChanged):
        interrupter.run(1, code)
    assert seen == ["disk full"]


def test_user_code_runs_on_the_main_thread_only(interrupter: Interrupter) -> None:
    refused = []

    def call() -> None:
        try:
            interrupter.run(1, lambda: None)
        except UsageError as error:
            refused.append(str(error))

    with another_thread(call):
        pass
    assert refused


def test_five_hundred_interrupts_leave_no_stray_one(
    interrupter: Interrupter, fast_switching: None
) -> None:
    """Each comes at another moment: before the call, in it, as it returns, after it."""
    changed, others = [], []
    go: queue.SimpleQueue[int] = queue.SimpleQueue()
    lasts_s = 0.0  # The work, when it was last done: more where others want the processor, too.

    def tell() -> None:
        while generation := go.get():
            end = time.monotonic() + (generation % 50) / 25 * lasts_s
            while time.monotonic() < end:
                pass
            interrupter.interrupt(generation, str(generation))

    def work() -> int:
        return sum(number * number for number in range(60_000))

    with another_thread(tell):
        for generation in range(1, 501):
            go.put(generation)
            try:
                interrupter.run(generation, work)
                others.append(generation)
            except GroupChanged as change:
                changed.append(change.generation)
            # Outside of `run` nothing may come, whatever was on its way.
            began_s = time.monotonic()
            work()
            lasts_s = time.monotonic() - began_s
        go.put(0)
    assert sorted(changed + others) == list(range(1, 501))
    # Both kinds of moment were met.
    assert min(len(changed), len(others)) > 10


# ---------------------------------------------------------------- loops that leave by themselves


def test_a_deferred_call_is_left_alone_and_finds_out_by_itself(interrupter: Interrupter) -> None:
    def loop() -> str:
        interrupter.defer(True)
        interrupter.interrupt(1, "a member was lost")
        while not interrupter.is_over(1):
            pass
        interrupter.move(2)
        return "went on"

    assert interrupter.run(1, loop) == "went on"


def test_what_was_deferred_is_raised_once_the_loop_is_over(interrupter: Interrupter) -> None:
    def loop() -> None:
        interrupter.defer(True)
        interrupter.interrupt(1, "a member was lost")
        interrupter.defer(False)
        wait_busy(threading.Event())

    with pytest.raises(GroupChanged):
        interrupter.run(1, loop)


def test_the_end_of_the_process_is_never_deferred(interrupter: Interrupter) -> None:
    def loop() -> None:
        interrupter.defer(True)
        interrupter.interrupt(1, "stop", final=True)
        wait_busy(threading.Event())

    with pytest.raises(GroupChanged, match="stop"):
        interrupter.run(1, loop)
