"""Whose process ends because gloo has forgotten it, and whose does not."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from elastic.worker import forgotten
from elastic.worker.forgotten import Forgotten
from elastic.worker.gloo_threads import (
    NAME,
    Quiet,
    numbers_of_gloo,
    sleeps_for_ever,
    wait_for_peers,
)

PATIENCE_S = 60.0


@dataclass
class PlayedGroups:
    """Groups of which the last one is over."""

    generation: int = 1
    is_over: bool = True

    def over(self) -> PlayedGroups | None:
        return self if self.is_over else None


@dataclass
class Clock:
    """Time, and the processor's time of a process that is busy or not."""

    now: float = 100.0
    share: float = 0.0
    spent: float = 0.0

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.spent += self.share * seconds

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.spent


@dataclass
class Scene:
    """A main thread that stands somewhere, and who looks at it."""

    groups: PlayedGroups = field(default_factory=PlayedGroups)
    clock: Clock = field(default_factory=Clock)
    place: tuple[int, int] | None = (1, 1)
    waits_in_gloo: bool = True
    ended: int = 0
    watch: Forgotten | None = None

    def look_for_s(self, seconds: float, then: Callable[[], None] = lambda: None) -> int:
        """Look some times a second; return how often the process was ended."""
        watch = self.watch or Forgotten(self.groups, end=self._end)  # type: ignore[arg-type]
        self.watch = watch
        until = self.clock.now + seconds
        while self.clock.now < until and not self.ended:
            watch.look()
            self.clock.pass_s(0.1)
            then()
        return self.ended

    def where(self, generation: int) -> tuple[int, int, int] | None:
        return (generation, *self.place) if self.place is not None else None

    def _end(self) -> None:
        self.ended += 1


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    monkeypatch.setattr(forgotten, "time", scene.clock)
    monkeypatch.setattr(forgotten, "_place_of_main", scene.where)
    monkeypatch.setattr(forgotten, "is_forgotten", lambda life: scene.waits_in_gloo)
    monkeypatch.setattr(forgotten.faulthandler, "dump_traceback", lambda *_: None)
    return scene


def test_who_stands_where_gloo_has_forgotten_him_ends(scene: Scene) -> None:
    scene.clock.share = 0.02  # Our own threads.
    assert scene.look_for_s(10.0) == 1
    assert 2.0 <= scene.clock.now - 100.0 < 2.5


def test_who_moves_computes_or_stands_elsewhere_goes_on(scene: Scene) -> None:
    def move() -> None:
        scene.place = (1, int(scene.clock.now))

    assert scene.look_for_s(10.0, then=move) == 0
    scene.place = (1, 1)
    scene.clock.share = 0.5
    assert scene.look_for_s(10.0) == 0
    scene.clock.share = 0.0
    scene.place = None
    assert scene.look_for_s(10.0) == 0
    scene.place, scene.groups.is_over = (1, 1), False
    assert scene.look_for_s(10.0) == 0
    scene.groups.is_over, scene.waits_in_gloo = True, False
    assert scene.look_for_s(10.0) == 0


def test_what_was_seen_long_ago_or_of_another_group_says_nothing(scene: Scene) -> None:
    assert scene.look_for_s(1.5) == 0
    scene.clock.pass_s(60.0)  # It trained meanwhile, or the machine stood still.
    assert scene.look_for_s(1.5) == 0
    scene.groups.generation = 2
    assert scene.look_for_s(1.5) == 0
    assert scene.look_for_s(1.5) == 1


def test_a_main_thread_in_code_of_its_own_stands_nowhere() -> None:
    assert forgotten._place_of_main(1) is None


@contextmanager
def waiting_thread(wait_s: float) -> Iterator[int]:
    """Have a thread of gloo's name wait, with or without a timeout; yields its number."""
    lock, numbers = threading.Lock(), queue.SimpleQueue[int]()
    lock.acquire()

    def wait() -> None:
        with open("/proc/thread-self/comm", "w", encoding="ascii") as name:
            name.write(NAME)
        numbers.put(threading.get_native_id())
        lock.acquire(timeout=wait_s)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield numbers.get(timeout=PATIENCE_S)
    finally:
        lock.release()
        thread.join(PATIENCE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_thread_of_gloos_that_waits_for_a_peer_is_told_from_an_idle_one() -> None:
    assert not wait_for_peers(frozenset())
    with waiting_thread(-1) as idle:
        assert idle in numbers_of_gloo()
        wait_until(lambda: sleeps_for_ever(idle))
        assert not wait_for_peers({idle})
        with waiting_thread(PATIENCE_S) as busy:
            wait_until(lambda: wait_for_peers({busy, idle}))
            assert not sleeps_for_ever(busy)
    wait_until(lambda: idle not in numbers_of_gloo())  # The kernel's thread outlives Python's.


def test_threads_are_quiet_that_sleep_on() -> None:
    assert Quiet(frozenset()).lasts(1.0)
    with waiting_thread(-1) as number:
        wait_until(lambda: sleeps_for_ever(number))
        quiet = Quiet({number})
        assert not quiet.lasts(0.02)
        wait_until(lambda: quiet.lasts(0.02))
    # One that uses the processor never is.
    quiet = Quiet({threading.get_native_id()})
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        assert not quiet.lasts(0.02)
