"""Waits for gloo that end with their group, because gloo itself never wakes some of them.

When a connection breaks, gloo completes the operations that are queued on it, but not the one in
progress: a receive of which a part has arrived, or a send that the kernel accepted in part, is
never woken and blocks until the group's timeout of half an hour (gloo/transport/tcp/pair.cc:
signalException walks through what is pending; prepareRead and write have taken these out). After
the kill of a peer in the middle of a 20 MB message nearly all members block like that.

Rule: no thread blocks inside gloo on something that only a peer can complete. Collectives are
polled in slices. A send or receive, which gloo would cancel at the end of a slice, is waited for by
a thread that can be abandoned. A wait is given up once its group was aborted. gloo may still write
into the buffers then, until `ProcessGroups.drop` returns: it waits for the end of that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from elastic.worker.group import c10d
from elastic.worker.group.group_resources import GroupResources

SLICE_S = 0.05
SLICE = timedelta(seconds=SLICE_S)
MESSAGES = frozenset((12, 13, 14))
"""Numbers of torch's OpType: SEND, RECV, RECVANYSOURCE."""

Wait = Callable[..., Any]
_Call = tuple[Callable[[], Any], futures.Future[Any]]
_checks: list[Callable[[], None]] = []
_checks_while_waiting: list[Callable[[], None]] = []


@contextmanager
def checked(check: Callable[[], None], *, while_waiting: bool = False) -> Iterator[None]:
    """Call this before the main thread waits for a collective, or while it does; it may raise."""
    checks = _checks_while_waiting if while_waiting else _checks
    checks.append(check)
    try:
        yield
    finally:
        checks.remove(check)


class AbortableWait:
    """Stands where `Work.wait` is called; for any thread."""

    def __init__(self, resources: Callable[[], GroupResources | None]) -> None:
        self._resources = resources
        self._waiters = threading.local()

    def wait(self, real: Wait, work: Any, *args: Any, **named: Any) -> Any:
        """Wait for a work, as `Work.wait` does; RuntimeError if it failed, or its group is over.

        A caller's own timeout is handled by torch's wait.
        """
        resources = self._resources()
        if resources is None or args or named or not c10d.all_by_gloo():
            # NCCL works have the same methods, but complete on the device.
            return real(work, *args, **named)
        if work._get_op_type() in MESSAGES:
            # Without a timeout gloo uses the one that the group was formed with.
            return self._in_another_thread(resources, lambda: real(work, resources.timeout))
        is_main = threading.current_thread() is threading.main_thread()
        for check in _checks if is_main else ():
            check()
        return _in_slices(resources, real, work, _checks_while_waiting if is_main else ())

    def _in_another_thread(self, resources: GroupResources, call: Callable[[], Any]) -> Any:
        waiter = getattr(self._waiters, "mine", None) or WaitThread()
        # A thread left behind, by an exception of a signal handler's too, gets no further call.
        self._waiters.mine = None
        answer = waiter.submit(call)
        while not futures.wait((answer,), SLICE_S).done:
            if resources.aborted:
                waiter.leave()
                raise _given_up(resources)
        self._waiters.mine = waiter
        return answer.result()


def _in_slices(
    resources: GroupResources, real: Wait, work: Any, checks: Sequence[Callable[[], None]]
) -> Any:
    while True:
        began = time.monotonic()
        try:
            return real(work, SLICE)
        except RuntimeError:
            if work.is_completed():
                return real(work)  # Its own error, or it completed just now.
            if time.monotonic() - began < SLICE_S / 2:
                raise  # An error, not the end of the slice.
            if resources.aborted:
                raise _given_up(resources) from None
        for check in checks:
            check()


def _given_up(resources: GroupResources) -> RuntimeError:
    return RuntimeError(
        f"{resources.spec}: Connection closed: the group is over, and gloo has not reported it"
    )


class WaitThread:
    """A thread that makes blocking calls for another thread, which may abandon it in one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(
            target=_serve, args=(self._calls,), name="elastic-wait", daemon=True
        ).start()

    def submit(self, call: Callable[[], Any]) -> futures.Future[Any]:
        answer: futures.Future[Any] = futures.Future()
        self._calls.put((call, answer))
        return answer

    def leave(self) -> None:
        """Let the thread end once its current call returns."""
        self._calls.put(None)

    def __del__(self) -> None:
        """Let the thread end: the thread that used it is gone."""
        self._calls.put(None)


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    # No method of the waiter's: it would keep itself alive.
    while (item := calls.get()) is not None:
        call, answer = item
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)
        del item, call, answer
