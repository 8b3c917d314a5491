"""Things that take their time to take apart hold up nobody, and nothing behind them."""

from __future__ import annotations

import threading

from elastic.worker.life import Undertaker

PATIENCE_S = 60.0


class Stubborn:
    """Ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)


def wait_gone(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_what_is_buried_behind_a_stubborn_one_is_let_go_of() -> None:
    undertaker, stubborn = Undertaker(), Stubborn()
    second, third = threading.Event(), threading.Event()
    undertaker.bury([object()], stubborn)
    digger = undertaker._digger
    assert digger is not None
    assert stubborn.begun.wait(PATIENCE_S)
    undertaker.bury([object()], second.set)
    undertaker.bury([object()], third.set)
    assert second.wait(PATIENCE_S)
    assert third.wait(PATIENCE_S)
    assert digger.thread.is_alive()
    stubborn.may_end.set()
    wait_gone(digger.thread)
    last = undertaker._digger
    assert last is not None
    undertaker.close()
    wait_gone(last.thread)


def test_nothing_to_bury_starts_nothing() -> None:
    undertaker = Undertaker()
    undertaker.bury([])
    undertaker.close()
    assert undertaker._digger is None
