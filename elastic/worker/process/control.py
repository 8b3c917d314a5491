"""The control thread of a worker: owns its machine, reads the pipe, and acts at any moment.

Rule: nothing here waits for the main thread, which may be anywhere in user code. Orders and
answers go through the mailboxes; a group is aborted from here, through its sockets.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import traceback
from typing import NoReturn

from elastic.core.events.shared import Note
from elastic.core.events.worker import (
    AbortGroup,
    ActivitySampled,
    CloseGroup,
    EnterTrain,
    ExitWorker,
    FormGroup,
    InterruptTrain,
    NotifyPreemption,
    OrderReceived,
    PipeClosed,
    RequestCheckpoint,
    RequestLeave,
    ResolveReport,
    SendPipe,
    Setup,
    SignalScript,
    Started,
    WorkerEffect,
    WorkerEvent,
)
from elastic.core.facts import CollectiveCount
from elastic.core.machine.worker import EXIT_AGENT_GONE, WorkerMachine
from elastic.core.messages import Assign, PipeToAgent, Pong, Profile, Progress, RunEvents
from elastic.core.policy.hang import FIRST_TIMES
from elastic.errors import ElasticError, Unavailable
from elastic.runtime.clock import Clock
from elastic.runtime.eventlog import note_text
from elastic.wire.pipe import Pipe
from elastic.worker.base import signals
from elastic.worker.base.activity import PeerTraffic
from elastic.worker.base.interrupt import Interrupter
from elastic.worker.base.mailboxes import Mailboxes, SilenceNotice
from elastic.worker.group import c10d
from elastic.worker.group.collective_watch import CollectiveWatch
from elastic.worker.group.group import ProcessGroups
from elastic.worker.process.event_writer import EventWriter
from elastic.worker.process.profiling import start_profile

log = logging.getLogger(__name__)

EXIT_BUG = 70
"""EX_SOFTWARE: the control thread itself failed."""
FIRST_COLLECTIVES = 20
"""Libraries begin with some: DistributedDataParallel compares shapes and sends its weights."""
GOODBYE_S = 2.0
"""What user code registered with atexit may take at the end, in all."""


class ControlThread:
    """Events in, effects done, until the process ends."""

    def __init__(
        self,
        pipe: Pipe,
        mailboxes: Mailboxes,
        *,
        groups: ProcessGroups,
        interrupter: Interrupter,
        clock: Clock,
    ) -> None:
        """Begin as a spare; `start` runs it."""
        self._pipe = pipe
        self._mailboxes = mailboxes
        self._groups = groups
        self._interrupter = interrupter
        self._clock = clock
        self._machine = WorkerMachine()
        self._collectives = CollectiveWatch()
        self._flow = PeerTraffic(groups.received_bytes)
        self._events, self._run_path = EventWriter(), ""
        self._closed = False

    def start(self) -> None:
        """Run in a thread of its own, which ends with the process."""
        threading.Thread(target=self._run, name="elastic-control", daemon=True).start()

    def _run(self) -> None:
        try:
            self._step(Started(os.getpid()))
            while True:
                self._turn()
        except BaseException:
            # Without this thread the process can be neither reached nor stopped.
            traceback.print_exc()
            leave_process(EXIT_BUG, with_goodbye=False)

    def _turn(self) -> None:
        """Wait until something comes, and take all of it."""
        sources = [self._mailboxes.fileno()]
        if not self._closed:
            sources.append(self._pipe.fileno())
        deadline_ns = self._machine.next_deadline_ns()
        timeout_s = None
        if deadline_ns is not None:
            timeout_s = max(0.0, (deadline_ns - self._clock.monotonic_ns()) / 1e9)
        readable, _, _ = select.select(sources, [], [], timeout_s)
        # The main thread's messages come first: the agent's may depend on them.
        for item in self._mailboxes.take_posted():
            if isinstance(item, Progress):
                self._send(item)
            elif isinstance(item, SilenceNotice):
                self._send(Pong(0, self._silent_times()))
                item.sent.set()
            else:
                self._step(item)
        if self._pipe.fileno() in readable:
            self._receive()
        if deadline_ns is not None and self._clock.monotonic_ns() >= deadline_ns:
            self._step(self._check())
            if (progress := self._mailboxes.activity.timing.overdue()) is not None:
                self._send(progress)

    def _check(self) -> ActivitySampled:
        seen = self._mailboxes.activity
        # The beats last: a wait that ends meanwhile is then seen as a movement, not as standing.
        now_ns = self._clock.monotonic_ns()
        waiting_ns, beats = seen.waiting_ns(now_ns), seen.beats
        begun: tuple[CollectiveCount, ...] = ()
        work = ""
        if not waiting_ns:
            moved, waiting_ns = self._collectives.sample(beats, now_ns, seen.is_sharded, seen.work)
            # At 0 its silence is not judged, as in a script's own loop; waiting is still reported.
            beats = beats and moved
            begun = self._collectives.begun() if beats and seen.is_sharded else ()
            work = seen.work or self._collectives.place()
        waiting_ns = self._flow.waiting_ns(waiting_ns, now_ns)
        return ActivitySampled(
            beats, waiting_ns, seen.epoch, seen.step, begun, seen.has_stepped, work
        )

    def _receive(self) -> None:
        try:
            while (message := self._pipe.receive(0)) is not None:
                if isinstance(message, RunEvents):
                    if self._run_path:
                        self._events.add(self._run_path, message.lines)
                    continue
                if isinstance(message, Profile):
                    if self._run_path:
                        start_profile(self._run_path, message.name, message.seconds)
                    continue
                if isinstance(message, Assign):
                    self._run_path = message.spec.run_path
                is_handled, times = signals.is_handled(signal.SIGTERM), self._silent_times()
                self._step(OrderReceived(message, is_handled, times))
        except Unavailable:
            self._lose_pipe()

    def _silent_times(self) -> int:
        """Return for how long native code may keep this thread from running, as in `Pong`."""
        seen = self._mailboxes.activity
        if seen.work:
            return 0
        # Code that has no steps of ours is taken to have begun once its collectives have.
        has_begun = seen.has_stepped or max(c10d.issued(), default=0) >= FIRST_COLLECTIVES
        return 1 if has_begun else FIRST_TIMES

    def _lose_pipe(self) -> None:
        if not self._closed:
            self._closed = True
            self._step(PipeClosed())

    def _send(self, message: PipeToAgent) -> None:
        if self._closed:
            return
        try:
            self._pipe.send(message)
        except Unavailable:
            self._lose_pipe()
        except ElasticError as error:
            # Too large, or with characters that cannot travel: the run continues without it.
            log.error("message_unsendable kind=%s error=%r", type(message).__name__, str(error))

    def _step(self, event: WorkerEvent) -> None:
        effects = self._machine.step(event, self._clock.monotonic_ns())
        # Notified before it is released: an aborted NCCL collective ends without an error.
        for effect in sorted(effects, key=lambda effect: not isinstance(effect, InterruptTrain)):
            self._perform(effect)

    def _perform(self, effect: WorkerEffect) -> None:
        if isinstance(effect, SendPipe):
            self._send(effect.message)
        elif isinstance(effect, (Setup, FormGroup, EnterTrain, CloseGroup)):
            self._mailboxes.give_order(effect)
        elif isinstance(effect, AbortGroup):
            self._mailboxes.set_aborted(effect.generation)
            self._groups.abort(effect.generation)
        elif isinstance(effect, SignalScript):
            log.info("script_asked_to_end reason=%r", effect.reason)
            signals.send_to_main(signal.SIGTERM)
        elif isinstance(effect, InterruptTrain):
            self._interrupter.interrupt(effect.generation, effect.reason, final=effect.final)
        elif isinstance(effect, RequestLeave):
            self._mailboxes.set_request(effect)
        elif isinstance(effect, RequestCheckpoint):
            self._mailboxes.set_save_request(effect)
        elif isinstance(effect, NotifyPreemption):
            self._mailboxes.set_preemption(effect)
        elif isinstance(effect, ResolveReport):
            self._mailboxes.resolve(effect)
        elif isinstance(effect, ExitWorker):
            log.info("worker_exits code=%d reason=%r", effect.code, effect.reason)
            self._events.finish()
            leave_process(effect.code, with_goodbye=effect.code != EXIT_AGENT_GONE)
        elif isinstance(effect, Note):
            log.info("%s", note_text(effect))


def leave_process(code: int, *, with_goodbye: bool) -> NoReturn:
    """End this process now, whatever its main thread does.

    Output is flushed, and what user code registered with `atexit` is called (experiment trackers
    close their runs there), both within `GOODBYE_S`: a main thread that is stuck may hold a lock
    that they need.
    """
    goodbye = threading.Thread(target=_send_goodbye, args=(with_goodbye,), daemon=True)
    goodbye.start()
    goodbye.join(GOODBYE_S)
    os._exit(code)


def _send_goodbye(with_goodbye: bool) -> None:
    flush_output()
    if with_goodbye:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        flush_output()


def flush_output() -> None:
    """Flush Python's streams and C's; one that user code closed or replaced is its own business."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)
