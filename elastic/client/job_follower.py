"""Follows a job to its end, for the command line and `TorchTrainer.fit`.

Rule: two threads read (events, output), the caller's thread prints and runs callbacks, so that an
interrupt or an error in a callback ends all of it at once and leaves nothing running.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic.client.ctrl_c import InterruptHandler
from elastic.client.jobs import Client
from elastic.client.printer import JobPrinter
from elastic.client.streams import ResumingStream
from elastic.client.text_format import parsed_metrics, waiting_line
from elastic.core.events.shared import Note
from elastic.core.facts import JobPhase
from elastic.core.view import JobView
from elastic.errors import ElasticError
from elastic.runtime.clock import Clock, SystemClock
from elastic.wire.codec_jobs import JobEvent, LogChunk, TimedNote

QUEUE_ITEMS_MAX = 1000
TICK_S = 0.25
OUTPUT_GRACE_S = 5.0
"""How long to wait for the end of the output after the job's end."""
JOIN_TIMEOUT_S = 2.0

OnReport = Callable[[dict[str, Any]], None]
OnInterrupt = Callable[[], float | None]
OnNote = Callable[[Note], None]


@dataclass(frozen=True)
class _Outage:
    """The coordinator has been silent for so long; 0.0: it answers again."""

    seconds: float


@dataclass(frozen=True)
class _Over:
    """A stream ended; with the error that ended it, if one did."""

    name: str
    error: BaseException | None


_Item = JobView | TimedNote | LogChunk | _Outage | _Over


class _Reader:
    """A thread that reads a stream into the queue."""

    def __init__(self, name: str, stream: ResumingStream[Any], items: queue.Queue[_Item]) -> None:
        self._name = name
        self._stream = stream
        self._items = items
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follow-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: _Item) -> None:
        """Queue an item; wait while the queue is full, so that a slow screen slows the stream."""
        while not self._stopped.is_set():
            try:
                self._items.put(item, timeout=TICK_S)
            except queue.Full:
                continue
            return

    def stop(self) -> None:
        """End the stream and wait for the thread."""
        self._stopped.set()
        self._stream.close()
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._stream:
                self.put(item)
        except BaseException as raised:  # Raised again by the reader of the queue.
            error = raised
        self.put(_Over(self._name, error))


def follow(
    client: Client,
    job: str,
    printer: JobPrinter,
    *,
    on_report: OnReport | None = None,
    on_note: OnNote | None = None,
    on_interrupt: OnInterrupt | None = None,
    check: Callable[[], None] | None = None,
    timeout_s: float | None = None,
) -> JobView:
    """Follow a job until it has ended and its workers are gone.

    Args:
        client: of the cluster.
        job: id or name.
        printer: shows it; opened and closed here.
        on_report: called with the metrics of rank 0, in the caller's thread.
        on_note: called with every event of the job, in the caller's thread.
        on_interrupt: called at the first Ctrl-C, in the caller's thread; then following continues,
            for so many seconds if it returns a number.
        check: called several times a second until the job has ended, in the caller's thread;
            raises if following has become useless.
        timeout_s: how long to follow, None for as long as it takes.

    Returns:
        The last snapshot of the job: its phase shows how it ended.

    Raises:
        KeyboardInterrupt: Ctrl-C, the second one with `on_interrupt`, or the time it gave is over;
            within a quarter of a second. The job continues, as after the others.
        TimeoutError: the time was over first.
        ElasticError: the job is not known, or the coordinator did not answer for too long.
    """
    return _Follower(client, job, printer, on_report, on_note, on_interrupt, check, timeout_s).run()


@dataclass(kw_only=True)
class _Progress:
    """The state of following.

    Attributes:
        metrics: JSON of the newest report that was passed on.
        reported: hashes of all reports passed on: a new leader shows the newest durable one
            again.
        from_snapshot: it came with a snapshot; its event may still come, and is no new report.
        places: generations and indices of reports whose events came; a new leader gets the newest
            ones again, and sends them again.
        is_fresh: the next snapshot is the first one of a connection.
    """

    view: JobView | None = None
    metrics: str = ""
    reported: set[int] = field(default_factory=lambda: {hash("")})
    from_snapshot: bool = False
    places: set[tuple[str, str]] = field(default_factory=set)
    is_fresh: bool = True
    over: set[str] = field(default_factory=set)


@dataclass
class _Follower:
    """One call of `follow`, with its arguments."""

    client: Client
    job: str
    printer: JobPrinter
    on_report: OnReport | None
    on_note: OnNote | None
    on_interrupt: OnInterrupt | None
    check: Callable[[], None] | None
    timeout_s: float | None

    def __post_init__(self) -> None:
        self._clock: Clock = SystemClock()
        self._items: queue.Queue[_Item] = queue.Queue(QUEUE_ITEMS_MAX)
        self._readers: list[_Reader] = []
        self._seen = _Progress()

    def run(self) -> JobView:
        with InterruptHandler() as ctrl_c:
            self.printer.open()
            try:
                self._read("events", self.client.watch(self.job, on_outage=self._on_outage))
                self._until_over(ctrl_c)
            finally:
                for reader in self._readers:
                    reader.stop()
                self.printer.close(reported_elsewhere=self._traceback())
        view = self._seen.view
        if view is None:  # Closed from elsewhere before anything came.
            view = self.client.get(self.job)
        return view

    def _read(self, name: str, stream: ResumingStream[Any]) -> None:
        reader = _Reader(name, stream, self._items)
        self._readers.append(reader)  # Before it starts: it may report an outage at once.
        reader.start()

    def _on_outage(self, seconds: float) -> None:
        self._readers[0].put(_Outage(seconds))

    def _until_over(self, ctrl_c: InterruptHandler) -> None:
        started_ns = self._clock.monotonic_ns()
        give_up_ns: int | None = None
        end_ns: int | None = None
        while True:
            if ctrl_c.take():
                if self.on_interrupt is None:
                    raise KeyboardInterrupt
                stop, self.on_interrupt = self.on_interrupt, None
                limit_s = stop()
                if limit_s is not None:
                    end_ns = self._clock.monotonic_ns() + round(limit_s * 1e9)
            if end_ns is not None and self._clock.monotonic_ns() > end_ns:
                raise KeyboardInterrupt
            if self.timeout_s is not None and self._is_after(started_ns, self.timeout_s):
                raise TimeoutError(self._late())
            try:
                self._take(self._items.get(timeout=TICK_S))
            except queue.Empty:
                self.printer.tick()
            if self.check is not None and not self._has_ended():
                self.check()
            if "events" in self._seen.over:
                if len(self._seen.over) >= len(self._readers):
                    return
                give_up_ns = give_up_ns or self._clock.monotonic_ns()
                if self._is_after(give_up_ns, OUTPUT_GRACE_S):
                    return

    def _has_ended(self) -> bool:
        view = self._seen.view
        return "events" in self._seen.over or (view is not None and view.has_ended())

    def _is_after(self, start_ns: int, seconds: float) -> bool:
        return self._clock.monotonic_ns() - start_ns > seconds * 1e9

    def _late(self) -> str:
        view = self._seen.view
        wait = waiting_line(view, self._clock.monotonic_ns()) if view else "was not seen yet"
        state = wait or (f"is {view.record.phase.value}" if view else "")
        name = view.record.spec.name if view else self.job
        return f"job {name} has not ended within {self.timeout_s:g} s and continues; it {state}"

    # ------------------------------------------------------------ items

    def _take(self, item: _Item) -> None:
        if isinstance(item, LogChunk):
            self.printer.output(item)
        elif isinstance(item, _Outage):
            self._seen.is_fresh = True
            self.printer.outage(item.seconds)
        elif isinstance(item, _Over):
            self._take_end(item)
        else:
            self._take_event(item)

    def _take_event(self, event: JobEvent) -> None:
        seen = self._seen
        if isinstance(event, JobView):
            if seen.view is None and self.printer.ranks is not None:
                job_id, ranks = event.record.spec.job_id, self.printer.ranks
                self._read("output", self.client.logs(job_id, ranks=ranks, follow=True))
            seen.view = event
            self.printer.job(event)
            # Events from before the connection are not sent: the snapshot has the newest report.
            is_reported = hash(event.record.metrics) in seen.reported
            if (seen.is_fresh or event.has_ended()) and not is_reported:
                self._report(event.record.metrics, from_snapshot=True)
            seen.is_fresh = False
            return
        self.printer.note(event)
        if self.on_note is not None:
            self.on_note(event.note)
        if event.note.name == "report":
            fields = dict(event.note.fields)
            place = (fields.get("generation", ""), fields.get("index", ""))
            metrics = fields.get("metrics", "")
            is_known = seen.from_snapshot and metrics == seen.metrics
            if not is_known and place not in seen.places:
                self._report(metrics, from_snapshot=False)
            seen.places.add(place)
            seen.from_snapshot = False

    def _report(self, text: str, *, from_snapshot: bool) -> None:
        self._seen.metrics, self._seen.from_snapshot = text, from_snapshot
        self._seen.reported.add(hash(text))
        metrics = parsed_metrics(text)
        self.printer.report(metrics)
        if self.on_report is not None:
            self.on_report(metrics)

    def _take_end(self, over: _Over) -> None:
        self._seen.over.add(over.name)
        if over.error is None:
            return
        if over.name == "events" or not isinstance(over.error, ElasticError):
            raise over.error
        self.printer.print_line(f"output is not followed any more: {over.error}")

    def _traceback(self) -> str:
        """Return the traceback that the caller shows at the end."""
        view = self._seen.view
        if view is None or view.record.phase is not JobPhase.FAILED:
            return ""
        return view.record.failure.traceback if view.record.failure else ""
