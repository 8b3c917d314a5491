"""The history of a term's jobs, for charts and the timeline; in memory, of a fixed size.

Rule: it only receives data and requests none. A full series drops every second point and continues
at half the rate, so it always covers the whole run. A new term starts empty.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from elastic.core.config import NS_PER_S
from elastic.core.facts import Group, JobId
from elastic.core.telemetry import Telemetry
from elastic.core.view import JobSample
from elastic.runtime.exposition import Histogram
from elastic.wire.codec_jobs import TimedNote

POINTS_MAX = 600
SERIES_MAX = 50
"""Maximum number of metrics per job, the first ones; a script may name a new one at each step."""
NAME_CHARS_MAX = 100
SPANS_MAX = 400
RECENT_MAX = 4000
WORLD_SIZE, RATE, SAMPLES, STEP_MS = "workers", "steps / s", "samples / s", "step, ms"


@dataclass
class Series:
    """Values over time, thinned out; times are Unix seconds, None stands for NaN or infinity."""

    times: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    stride: int = 1
    count: int = 0

    def add(self, unix_s: float, value: float | None) -> bool:
        """Add a value; return whether it is kept."""
        self.count += 1
        if (self.count - 1) % self.stride:
            return False
        self.times.append(unix_s)
        self.values.append(value)
        if len(self.times) > POINTS_MAX:
            self.times, self.values = self.times[::2], self.values[::2]
            self.stride *= 2
        return True


@dataclass
class Span:
    """The time of one generation; times are Unix nanoseconds, 0 for not yet.

    Attributes:
        cause, reason: of its group.
        stood_ns: when training stopped before it; when it was formed, if training did not stop.
        trains_ns: when training continued.
        left: the members that were lost or stopped in it, and why.
        reported_pause_s: the pause in training before it, as reported by its workers.
    """

    generation: int
    cause: str
    reason: str
    world_size: int
    formed_ns: int
    stood_ns: int
    trains_ns: int = 0
    ended_ns: int = 0
    left: list[str] = field(default_factory=list)
    reported_pause_s: float | None = None

    @property
    def pause_s(self) -> float | None:
        """Return the pause in training before it, None while it does not train yet."""
        if self.reported_pause_s is not None:
            return self.reported_pause_s
        return max(0, self.trains_ns - self.stood_ns) / NS_PER_S if self.trains_ns else None


@dataclass
class JobHistory:
    """The history of one job.

    Attributes:
        spans: its generations, oldest first.
        series: by name.
        checkpoints: path -> when it was recorded, Unix nanoseconds.
        recent: (number, series, Unix seconds, value) of the newest points, for pages that poll.
        reforms: number of groups after the first, by cause.
        pauses: before groups after the first.
        refused_checkpoints: number of checkpoint reports that were rejected.
    """

    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=SPANS_MAX))
    series: dict[str, Series] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    recent: deque[tuple[int, str, float, float | None]] = field(
        default_factory=lambda: deque(maxlen=RECENT_MAX)
    )
    number: int = 0
    reforms: Counter[str] = field(default_factory=Counter)
    pauses: Histogram = field(default_factory=Histogram)
    refused_checkpoints: int = 0
    submitted_ns: int = 0
    _stood_ns: int = 0
    _seen: Telemetry = field(default_factory=Telemetry)
    _logged: frozenset[str] = frozenset()

    def add(self, name: str, unix_s: float, value: float | None) -> None:
        series = self.series.get(name)
        if series is None:
            if len(self.series) >= SERIES_MAX:
                return
            series = self.series[name] = Series()
        if series.add(round(unix_s, 2), value):
            self.number += 1
            self.recent.append((self.number, name, round(unix_s, 2), value))

    # ------------------------------------------------------------------- inputs

    def take(self, timed: TimedNote) -> None:
        name, fields, now_ns = timed.note.name, dict(timed.note.fields), timed.unix_ns
        if name == "job_submitted":
            self.submitted_ns = now_ns
        elif name == "report":
            self._report(fields.get("metrics", ""), now_ns)
        elif name == "worker_gone" and int(fields.get("rank", -1)) >= 0:
            self._stands(now_ns)
            if self.spans:
                self.spans[-1].left.append(f"rank {fields['rank']}, {fields.get('cause', '')}")
        elif name == "group_suspended":
            self._stands(now_ns)
        elif name == "group_formed":
            self._form(fields, now_ns)
        elif name in ("group_training", "first_step"):
            self._trains(int(fields.get("generation", 0)), int(fields.get("unix_ns", now_ns)))
            if "pause_s" in fields and self.spans:
                pause_s = self.spans[-1].reported_pause_s = float(fields["pause_s"])
                self.pauses.add(pause_s)
        elif name in ("job_ended", "job_paused") and self.spans:
            self.spans[-1].ended_ns = self.spans[-1].ended_ns or now_ns
            self._stood_ns = 0
        elif name == "checkpoint_recorded":
            self.checkpoints[fields.get("path", "")] = now_ns
        elif name == "checkpoint_refused":
            self.refused_checkpoints += 1

    def sample(self, group: Group, telemetry: Telemetry, unix_ns: int) -> None:
        """Sample the size of a group that trains, and its telemetry, once a second."""
        before, self._seen = self._seen, telemetry
        if not self.spans:  # It was formed in an earlier term.
            size, reason = len(group.members), group.reason
            self.spans.append(Span(group.generation, "", reason, size, unix_ns, unix_ns, unix_ns))
        self.add(WORLD_SIZE, unix_ns / NS_PER_S, float(len(group.members)))
        if telemetry == before or not telemetry.steps:
            return
        self.add(RATE, unix_ns / NS_PER_S, round(telemetry.per_second(telemetry.steps), 4))
        if telemetry.samples:
            self.add(SAMPLES, unix_ns / NS_PER_S, round(telemetry.per_second(telemetry.samples), 2))
        self.add(STEP_MS, unix_ns / NS_PER_S, round(telemetry.step_s * 1e3, 3))
        logged = dict(numbers_of(telemetry.logged))
        self._logged |= logged.keys()
        for name, value in logged.items():
            self.add(name, unix_ns / NS_PER_S, value)

    def _stands(self, now_ns: int) -> None:
        self._stood_ns = self._stood_ns or now_ns
        if self.spans:
            self.spans[-1].ended_ns = self.spans[-1].ended_ns or now_ns

    def _form(self, fields: dict[str, str], now_ns: int) -> None:
        if self.spans:
            self.spans[-1].ended_ns = self.spans[-1].ended_ns or now_ns
        generation, cause = int(fields.get("generation", 0)), fields.get("cause", "")
        if cause != "start":
            self.reforms[cause] += 1
        stood_ns, self._stood_ns = self._stood_ns or now_ns, 0
        size = int(fields.get("world_size", 0))
        reason = fields.get("reason", "")
        self.spans.append(Span(generation, cause, reason, size, now_ns, stood_ns))

    def _trains(self, generation: int, unix_ns: int) -> None:
        span = self.spans[-1] if self.spans else None
        if span is None or span.generation != generation or span.trains_ns:
            return
        span.trains_ns = unix_ns

    def _report(self, text: str, now_ns: int) -> None:
        for name, value in numbers_of(text):
            if name in self._logged:
                continue  # It also comes by telemetry, more often.
            self.add(name, now_ns / NS_PER_S, value)


def numbers_of(text: str) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of reported metrics; None for NaN and the like."""
    try:
        metrics = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return
    if not isinstance(metrics, dict):
        return
    for name, value in metrics.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value) if abs(value) < 1e300 else math.inf
            yield str(name)[:NAME_CHARS_MAX], number if math.isfinite(number) else None


class History:
    """The history of all jobs of a term.

    Attributes:
        preemptions: number of drains and preempted jobs, by cause.
        queue_waits: seconds from submission to the first group.
        quarantined: nodes that get no workers for a while.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobId, JobHistory] = {}
        self.preemptions: Counter[str] = Counter()
        self.queue_waits = Histogram()
        self.quarantined: set[str] = set()

    def of(self, job_id: JobId) -> JobHistory:
        """Return the history of one job; an empty one if it has none."""
        return self._jobs.get(job_id) or JobHistory()

    def take(self, timed: TimedNote) -> None:
        note, fields = timed.note, dict(timed.note.fields)
        if note.name == "node_quarantined":
            self.quarantined.add(fields.get("node", ""))
        elif note.name in ("node_healthy", "node_lost", "node_left"):
            self.quarantined.discard(fields.get("node", ""))
        elif note.name == "drain_started":
            self.preemptions["drain"] += 1
        elif note.name == "job_preempted":
            self.preemptions["priority"] += 1
        if note.job_id:
            job = self._jobs.setdefault(JobId(note.job_id), JobHistory())
            job.take(timed)
            if note.name == "group_formed" and fields.get("cause") == "start" and job.submitted_ns:
                self.queue_waits.add((timed.unix_ns - job.submitted_ns) / NS_PER_S)
                job.submitted_ns = 0

    def sample(self, samples: Sequence[JobSample], unix_ns: int) -> None:
        """Sample all jobs, once a second, and drop those that the coordinator forgot."""
        known = {one.job_id for one in samples}
        for job_id in [job_id for job_id in self._jobs if job_id not in known]:
            del self._jobs[job_id]
        for one in samples:
            if one.group is not None:
                history = self._jobs.setdefault(one.job_id, JobHistory())
                history.sample(one.group, one.telemetry, unix_ns)
