"""Mailboxes between the control thread and the main thread of a worker.

Rule: the control thread never waits here. The main thread waits for orders only while it has
nothing to do, and for the answer to a report in slices, so that `GroupChanged` can be raised in
between.
"""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, field

from elastic.core.events.worker import (
    CloseGroup,
    EnterTrain,
    FormGroup,
    NotifyPreemption,
    RequestCheckpoint,
    RequestLeave,
    ResolveReport,
    Setup,
    WorkerEvent,
)
from elastic.core.facts import NO_GENERATION, Generation, RefusalCode, ReportKind
from elastic.core.messages import Progress
from elastic.worker.base.activity import Activity

Order = Setup | FormGroup | EnterTrain | CloseGroup
"""What the main thread can be ordered to do; it does one at a time."""

WAIT_SLICE_S = 0.02
"""An exception that another thread raises in this one arrives between two slices."""
REPORTED_S = 1.0
"""How long the main thread waits at most until its work was reported to the agent."""


@dataclass(frozen=True)
class SilenceNotice:
    """To be sent now to the agent: for how long the control thread may be kept silent.

    Attributes:
        sent: set once it was sent.
    """

    sent: threading.Event = field(default_factory=threading.Event)


@dataclass
class ReportAnswer:
    """The coordinator's answer to one report.

    Attributes:
        accepted, reason, code: valid once `ready` is set.
    """

    ready: threading.Event = field(default_factory=threading.Event)
    accepted: bool = False
    reason: str = ""
    code: RefusalCode = RefusalCode.NONE

    def wait(self, timeout_s: float) -> bool:
        slices = max(1, round(timeout_s / WAIT_SLICE_S))
        return any(self.ready.wait(WAIT_SLICE_S) for _ in range(slices))


class Mailboxes:
    """Mailboxes in both directions; every method may be called by any thread."""

    def __init__(self) -> None:
        """Open the descriptor that wakes the control thread."""
        self.activity = Activity()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._posted: queue.SimpleQueue[WorkerEvent | Progress | SilenceNotice] = (
            queue.SimpleQueue()
        )
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._request: RequestLeave | None = None
        self._saves_in: Generation = NO_GENERATION
        self._save_request: RequestCheckpoint | None = None
        self._preemption: NotifyPreemption | None = None
        self._is_preemption_seen = False
        self._aborted: Generation = NO_GENERATION
        self._answers: dict[tuple[Generation, ReportKind, int], ReportAnswer] = {}

    # ------------------------------------------------------------ main thread -> control thread

    def post(self, item: WorkerEvent | Progress) -> None:
        """Report what happened to the machine, or our progress to the agent; returns at once."""
        self._posted.put(item)
        os.eventfd_write(self._wake_fd, 1)

    def deliver(self) -> None:
        """Do nothing: each post wakes the control thread by itself."""

    def report_work(self) -> None:
        """Report to the agent, before this returns, whether the main thread works."""
        item = SilenceNotice()
        self._posted.put(item)
        os.eventfd_write(self._wake_fd, 1)
        item.sent.wait(REPORTED_S)

    def fileno(self) -> int:
        """Return a descriptor that is readable while something is posted."""
        return self._wake_fd

    def take_posted(self) -> list[WorkerEvent | Progress | SilenceNotice]:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        items: list[WorkerEvent | Progress | SilenceNotice] = []
        while True:
            try:
                items.append(self._posted.get_nowait())
            except queue.Empty:
                return items

    def expect_answer(self, generation: Generation, kind: ReportKind, index: int) -> ReportAnswer:
        """Register for the answer to a report; call this before the report is posted."""
        with self._lock:
            return self._answers.setdefault((generation, kind, index), ReportAnswer())

    # ------------------------------------------------------------ control thread -> main thread

    def give_order(self, order: Order) -> None:
        """Put an order into the main thread's box."""
        self._orders.put(order)

    def wait_for_order(self) -> Order:
        """Wait, for as long as it takes, for the next order."""
        return self._orders.get()

    def set_request(self, request: RequestLeave) -> None:
        """Let the next boundary of the request's generation be the last."""
        self._saves_in = request.generation if request.saves else self._saves_in
        self._request = request

    def leave_request(self, generation: Generation) -> RequestLeave | None:
        """Return how and why this generation is to be left at its next boundary, None if not.

        A caller that needs several of these facts calls once: they may change between two calls.
        """
        request = self._request
        return request if request is not None and request.generation == generation else None

    def is_called_off(self, generation: Generation) -> bool:
        request = self.leave_request(generation)
        return request is not None and not request.saves and self._saves_in == generation

    def set_save_request(self, request: RequestCheckpoint) -> None:
        self._save_request = request

    def save_request(self, generation: Generation) -> int:
        request = self._save_request
        return request.request if request is not None and request.generation == generation else 0

    def set_preemption(self, notice: NotifyPreemption) -> None:
        """Let user code know of nodes that leave the group."""
        with self._lock:
            self._preemption, self._is_preemption_seen = notice, False

    def preemption(self, generation: Generation, now_ns: int) -> NotifyPreemption | None:
        """Return what is known of nodes that leave this generation's group, None if none do.

        A group that can do without them has often left them behind before user code asks: what
        was not read yet is returned once in the next group too, unless its time is over.
        """
        with self._lock:
            notice = self._preemption
            if notice is None or generation < notice.generation:
                return None
            is_old = self._is_preemption_seen or now_ns >= notice.deadline_ns
            if generation > notice.generation and is_old:
                self._preemption = None
                return None
            self._is_preemption_seen = True
            return notice

    def set_aborted(self, generation: Generation) -> None:
        """Remember that this group is over, before it is aborted."""
        self._aborted = max(self._aborted, generation)

    def was_aborted(self, generation: Generation) -> bool:
        return generation <= self._aborted

    def resolve(self, effect: ResolveReport) -> None:
        """Answer a report; one that is not waited for is dropped."""
        with self._lock:
            answer = self._answers.pop((effect.generation, effect.kind, effect.index), None)
        if answer is not None:
            answer.accepted, answer.reason = effect.accepted, effect.reason
            answer.code = effect.code
            answer.ready.set()
