"""Shows a followed job: one updating line on a terminal, one line per change anywhere else.

Rule: the output of workers goes to stdout unchanged, lines about the job go to stderr, so that a
pipe gets the script's own output. Called by one thread; only the updating line is drawn by another.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from elastic.client.loss_summary import SOON_S, LossSummary
from elastic.client.output import LineCutter
from elastic.client.output_router import OutputRouter
from elastic.client.pace import logged_line, progress_line
from elastic.client.plain import PlainConsole, plain, plain_output
from elastic.client.text_format import (
    duration,
    ending_line,
    leaving,
    metrics_line,
    missing,
    steps_again,
    waiting_line,
    workers,
    world_size,
)
from elastic.core.facts import JobPhase
from elastic.core.view import JobView
from elastic.runtime.clock import Clock, SystemClock
from elastic.wire.codec_jobs import LogChunk, TimedNote

REPEAT_S = 30.0
"""A long wait is printed again after this, where there is no updating line."""
METRICS_INTERVAL_S = 1.0
METRICS_AT_ONCE = 20
"""So many reports are printed as they come, before they are printed once in an interval only."""
BY_ORDER = "stopped"
"""Beginning of the cause of a worker that ended by order; such ends are not printed."""
COLOURS = {
    JobPhase.PENDING: "yellow",
    JobPhase.RUNNING: "green",
    JobPhase.STOPPING: "yellow",
    JobPhase.PAUSED: "yellow",
    JobPhase.SUCCEEDED: "green",
    JobPhase.FAILED: "red",
    JobPhase.STOPPED: "yellow",
}
RULED = {
    "checkpoint_refused": "checkpoint {path} does not count: {reason}",
    "gives_back": "{workers} will be given back to another job",
    "group_stuck": "{reason}; where each of them stands is in its output",
    "left_early": "{reason}",
    "notes_dropped": "{number} events were dropped: too many at once",
}


class _Outage:
    """A time in which the coordinator does not answer.

    Attributes:
        since_ns: None while it answers.
    """

    def __init__(self) -> None:
        self.since_ns: int | None = None
        self._reported_s = 0.0

    def lasts(self, seconds: float, now_ns: int) -> str:
        """It has lasted so long; returns the line to print, "" for none."""
        self.since_ns = now_ns - round(seconds * 1e9)
        if seconds < max(1.0, 2 * self._reported_s):
            return ""
        self._reported_s = seconds
        return f"coordinator unreachable for {seconds:.0f} s, training continues"

    def ends(self, now_ns: int) -> str:
        """The coordinator answers; returns the line to print, "" for none."""
        since_ns, was_reported = self.since_ns, self._reported_s > 0
        self.since_ns, self._reported_s = None, 0.0
        if since_ns is None or not was_reported:
            return ""
        return f"coordinator answers again after {duration(now_ns - since_ns)}"


@dataclass
class _Metrics:
    """What rank 0 has reported last.

    Attributes:
        values: by name.
        paced_ns: when the next ones would be printed if all were an interval apart.
        is_due: these are not printed yet, and are to be.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paced_ns: int = 0
    is_due: bool = False


class JobPrinter:
    """Turns snapshots and events of a job into lines.

    Attributes:
        ranks: of the workers whose output is shown; () for all, None for none.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        ranks: tuple[int, ...] | None = (0,),
        stdout: TextIO | None = None,
        clock: Clock | None = None,
        router: OutputRouter | None = None,
    ) -> None:
        self.ranks = ranks
        self._console = console or PlainConsole(stderr=True)
        self._stdout = stdout or sys.stdout
        self._clock = clock or SystemClock()
        self._router = router
        self._lines = LineCutter(
            shows_prefix=ranks is not None and len(ranks) != 1,
            prefix=None if router is None else router.prefix,
        )
        self._view: JobView | None = None
        self._reported: tuple[object, ...] = ()
        self._reported_ns = 0
        self._paced_ns = self._clock.monotonic_ns()
        self._generation = 0
        self._losses = LossSummary()
        self._planned: tuple[str, int] = ("", 0)
        self._metrics = _Metrics()
        self._outage = _Outage()
        self._live: Live | None = None

    # ------------------------------------------------------------ start and end

    def open(self) -> None:
        """Start the updating line, if there is a terminal."""
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=partial(self._moving_line, Spinner("dots")),
                console=self._console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def close(self, *, reported_elsewhere: str = "") -> None:
        """Print what is still held back, and end the updating line.

        Args:
            reported_elsewhere: a traceback that the caller shows, and that is omitted here.
        """
        self._print_loss(is_over=True)
        self._write(self._lines.flush(reported_elsewhere))
        self._print_metrics(is_over=True)
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if self._view is not None and self._view.has_ended():
            colour = COLOURS[self._view.record.phase]
            self.print_line(ending_line(self._view), style=colour)

    # ------------------------------------------------------------ inputs

    def job(self, view: JobView) -> None:
        """Take a snapshot; print what changed."""
        self._view = view
        if self._router is not None:
            self._router.know(view)
        record = view.record
        if record.generation > self._generation and record.phase is JobPhase.RUNNING:
            self._generation = record.generation
            self._print_group(world_size(view), record.group.reason if record.group else "")
        state = (record.phase, missing(view), leaving(view))
        if state != self._reported:
            self._reported = state
            # Usually over soon: printed only if it is not.
            self._reported_ns = self._clock.monotonic_ns() - round((REPEAT_S - SOON_S) * 1e9)

    def note(self, timed: TimedNote) -> None:
        """Take an event, and print it if it matters."""
        name, fields = timed.note.name, dict(timed.note.fields)
        if name == "group_formed":
            generation = int(fields.get("generation", "0"))
            if generation > self._generation:
                self._generation = generation
                cause = fields.get("cause", "")
                self._print_group(
                    int(fields.get("world_size", "0")), cause, fields.get("reason", "")
                )
        elif name == "group_training":
            generation, now_ns = int(fields.get("generation", "0")), self._clock.monotonic_ns()
            self._losses.trains(generation, at_unix_ns=timed.unix_ns, now_ns=now_ns)
        elif name == "first_step" and "pause_s" in fields:
            pause_ns = round(float(fields["pause_s"]) * 1e9)
            size = int(fields.get("world_size", "0"))
            line = self._losses.steps(int(fields.get("generation", "0")), size, pause_ns)
            if line:
                self.print_line(line + steps_again(fields))
        elif name == "worker_gone" and not fields.get("cause", "").startswith(BY_ORDER):
            self._lost(fields, timed.unix_ns)
        elif name == "change_planned":
            self._planned = (fields.get("reason", ""), self._clock.monotonic_ns())
        elif name in RULED:
            blank = dict.fromkeys(("reason", "path", "number", "workers"), "")
            self.print_line(RULED[name].format_map({**blank, **fields}))

    def report(self, metrics: dict[str, Any]) -> None:
        """Take the metrics of rank 0; printed where no updating line shows them."""
        self._metrics.values, self._metrics.is_due = metrics, self._live is None
        self._print_metrics()

    def output(self, chunk: LogChunk) -> None:
        if self._router is not None and not self._router.route(chunk):
            return
        self._write(self._lines.take(chunk, self._clock.monotonic_ns()))

    def outage(self, seconds: float) -> None:
        """Print that the coordinator does not answer, or with 0.0 that it answers again."""
        now_ns = self._clock.monotonic_ns()
        line = self._outage.lasts(seconds, now_ns) if seconds else self._outage.ends(now_ns)
        if line:
            self.print_line(line)

    def tick(self) -> None:
        """Print what is overdue: held output, delayed lines, a wait that lasts."""
        self._write(self._lines.overdue(self._clock.monotonic_ns()))
        self._print_loss()
        reason, since_ns = self._planned
        if reason and self._age_s(since_ns) >= SOON_S:
            self._planned = ("", 0)
            self.print_line(f"a change is planned: {reason}")
        self._print_metrics()
        if self._live is None and self._age_s(self._reported_ns) >= REPEAT_S:
            self._print_state()
        if self._live is None and self._age_s(self._paced_ns) >= REPEAT_S:
            self._print_pace()

    def print_line(self, text: str, *, style: str = "") -> None:
        line = Text(f"[elastic {time.strftime('%H:%M:%S')}] ", style="dim").append(
            plain(text), style=style or "default"
        )
        self._console.print(line, soft_wrap=True)

    # ------------------------------------------------------------ lines

    def _lost(self, fields: dict[str, str], at_unix_ns: int) -> None:
        rank = fields.get("rank", "-1")
        who = f"worker {fields.get('worker')}{f' (rank {rank})' if rank != '-1' else ''}"
        if rank == "-1":  # It was in no group: training was not interrupted.
            self.print_line(f"lost {who}, {fields.get('cause')}")
            return
        now_ns = self._clock.monotonic_ns()
        self._losses.add(who, fields.get("cause", ""), at_unix_ns=at_unix_ns, now_ns=now_ns)

    def _print_loss(self, *, is_over: bool = False) -> None:
        line = self._losses.overdue(self._clock.monotonic_ns(), is_over=is_over)
        if line:
            self.print_line(line)

    def _print_group(self, size: int, cause: str, reason: str = "") -> None:
        self._planned = ("", 0)
        if self._losses:
            self._losses.formed(self._generation, size)
            return
        more = "" if cause in ("", "start") else f" ({': '.join(filter(None, (cause, reason)))})"
        self.print_line(f"generation {self._generation}: {workers(size)}{more}")

    def _print_state(self) -> None:
        view, now_ns = self._view, self._clock.monotonic_ns()
        self._reported_ns = now_ns
        if view is None or self._outage.since_ns is not None:
            return
        name, waiting = view.record.spec.name, waiting_line(view, now_ns)
        if waiting:
            self.print_line(f"job {name} {waiting}")

    def _print_pace(self) -> None:
        """Print a training job's progress, where there is no updating line."""
        self._paced_ns = self._clock.monotonic_ns()
        view = self._view
        if view is None or not world_size(view) or not view.telemetry.steps:
            return
        parts = (progress_line(view.telemetry), logged_line(view.telemetry))
        size, generation = workers(world_size(view)), view.record.generation
        self.print_line(f"{', '.join(filter(None, parts))} ({size}, generation {generation})")

    def _print_metrics(self, *, is_over: bool = False) -> None:
        """Print the newest metrics if they are due, and not too many were printed just now."""
        metrics, now_ns = self._metrics, self._clock.monotonic_ns()
        ahead_s = (metrics.paced_ns - now_ns) / 1e9
        if not metrics.is_due or not (is_over or ahead_s < METRICS_AT_ONCE * METRICS_INTERVAL_S):
            return
        metrics.is_due = False
        metrics.paced_ns = max(metrics.paced_ns, now_ns) + round(METRICS_INTERVAL_S * 1e9)
        line = metrics_line(metrics.values)
        if line:
            self.print_line(f"report: {line}")

    def _moving_line(self, spinner: Spinner) -> RenderableType:
        """Return the line at the bottom of a terminal; drawn by rich's own thread."""
        view, now_ns = self._view, self._clock.monotonic_ns()
        if view is None:
            return Text("")
        record = view.record
        text = Text.assemble(
            (record.spec.name, "bold"), "  ", (record.phase.value, COLOURS[record.phase])
        )
        if world_size(view):
            text.append(f"  generation {record.generation}  {workers(world_size(view))}")
        pace, logged = progress_line(view.telemetry), logged_line(view.telemetry)
        if pace and world_size(view):
            text.append(f"  {pace}", style="green")
        if logged or self._metrics.values:
            text.append(f"  {logged or metrics_line(self._metrics.values)}", style="cyan")
        away_since_ns = self._outage.since_ns  # The other thread changes it.
        if away_since_ns is not None:
            away = duration(now_ns - away_since_ns)
            text.append(f"  coordinator unreachable for {away}, training continues", "yellow")
        else:
            text.append(f"  {plain(waiting_line(view, now_ns))}", style="yellow")
        text.truncate(max(20, self._console.width - 3), overflow="ellipsis")
        spinner.update(text=text)
        return spinner

    def _write(self, text: str) -> None:
        """Write output of workers; above the updating line, if both share a terminal."""
        if not text:
            return
        if self._stdout.isatty():
            text = plain_output(text)
        if self._live is not None and self._stdout.isatty():
            for line in text.removesuffix("\n").split("\n"):
                # Of a line that was overwritten, as by tqdm, only the last version is shown.
                shown = Text.from_ansi(line.rstrip("\r").rpartition("\r")[2])
                self._console.print(shown, soft_wrap=True)
            return
        self._stdout.write(text)
        self._stdout.flush()

    def _age_s(self, since_ns: int) -> float:
        return (self._clock.monotonic_ns() - since_ns) / 1e9
