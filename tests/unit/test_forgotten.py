"""Whose process ends because gloo has forgotten it, and whose does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from elastic.worker import forgotten
from elastic.worker.forgotten import Forgotten, is_forgotten_by_gloo
from elastic.worker.gloo_threads import NAME

PATIENCE_S = 20.0


@dataclass
class PlayedGroups:
    """Groups of which the last one is over."""

    is_left: bool = True

    def has_been_left(self) -> bool:
        return self.is_left


@dataclass
class Clock:
    """Time, and the processor's time of a main thread that is busy or not."""

    now: float = 100.0
    share: float = 0.0
    spent: float = 0.0

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.spent += self.share * seconds

    def monotonic(self) -> float:
        return self.now


@dataclass
class Scene:
    """A main thread that stands somewhere, and who looks at it."""

    groups: PlayedGroups = field(default_factory=PlayedGroups)
    clock: Clock = field(default_factory=Clock)
    place: tuple[int, int] | None = (1, 1)
    waits_in_gloo: bool = True
    ended: int = 0

    def look_for_s(self, seconds: float, then: Callable[[], None] = lambda: None) -> int:
        """Look some times a second; return how often the process was ended."""
        watch = Forgotten(self.groups, end=self._end)  # type: ignore[arg-type]
        until = self.clock.now + seconds
        while self.clock.now < until and not self.ended:
            watch.look()
            self.clock.pass_s(0.1)
            then()
        return self.ended

    def _end(self) -> None:
        self.ended += 1


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    monkeypatch.setattr(forgotten, "time", scene.clock)
    monkeypatch.setattr(forgotten, "_spent_by_main", lambda: scene.clock.spent)
    monkeypatch.setattr(forgotten, "_place_of_main", lambda: scene.place)
    monkeypatch.setattr(forgotten, "is_forgotten_by_gloo", lambda: scene.waits_in_gloo)
    monkeypatch.setattr(forgotten.faulthandler, "dump_traceback", lambda *_: None)
    return scene


def test_who_stands_where_gloo_has_forgotten_him_ends(scene: Scene) -> None:
    scene.clock.share = 0.005  # Our own signals.
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
    scene.place, scene.groups.is_left = (1, 1), False
    assert scene.look_for_s(10.0) == 0
    scene.groups.is_left, scene.waits_in_gloo = True, False
    assert scene.look_for_s(10.0) == 0


def test_a_main_thread_in_code_of_its_own_stands_nowhere() -> None:
    assert forgotten._place_of_main() is None


@contextmanager
def gloo_thread(wait_s: float) -> Iterator[None]:
    """Have a thread of gloo's name wait, with or without a timeout."""
    lock, is_named = threading.Lock(), threading.Event()
    lock.acquire()

    def wait() -> None:
        with open("/proc/thread-self/comm", "w", encoding="ascii") as name:
            name.write(NAME)
        is_named.set()
        lock.acquire(timeout=wait_s)

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_named.wait(PATIENCE_S)
    yield
    lock.release()
    thread.join(PATIENCE_S)


def test_a_thread_of_gloos_that_waits_for_a_peer_is_told_from_an_idle_one() -> None:
    assert not is_forgotten_by_gloo()
    with gloo_thread(-1):
        assert not is_forgotten_by_gloo()
    with gloo_thread(PATIENCE_S):
        end = time.monotonic() + PATIENCE_S
        while not is_forgotten_by_gloo():  # It may just be on its way into the wait.
            assert time.monotonic() < end
