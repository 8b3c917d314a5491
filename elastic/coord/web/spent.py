"""How workers spend their time: the goodput of a job as a bar, and the phases of worker steps.

Rule: a bar's parts sum to the allocated time; the numbers are also shown as text.
"""

from __future__ import annotations

from elastic.client.pace import eta_ns, pace_line, position_line
from elastic.client.text_format import duration
from elastic.coord.web.html import Html, element, joined
from elastic.coord.web.parts import Part, pill, row
from elastic.core.config import NS_PER_S
from elastic.core.telemetry import Telemetry
from elastic.core.view import JobView, WorkerView

ROWS_MAX = 64
"""Workers shown, stragglers first; the JSON API returns all."""
BAR_WIDTH, BAR_HEIGHT = 1000, 26
SHOWN_PART = 0.001
STRAGGLES = 0.05
"""A rank is marked as a straggler when its group waits for it for this share of the time."""


def goodput_bar(job: JobView) -> Part:
    """Return the time of all its workers by category, as a bar with a legend."""
    goodput = job.record.goodput
    total = goodput.allocated_ns
    if not total:
        return Part("goodput", element("p", "Nothing was reported yet.", id="goodput"))
    bars, legend, x = [], [], 0.0
    for name, seconds in sorted(goodput.seconds().items(), key=lambda pair: -pair[1]):
        part = seconds * NS_PER_S / total
        if part < SHOWN_PART:
            continue
        label = f"{name.replace('_', ' ')} {part:.1%}"
        bars.append(
            element(
                "rect", element("title", label), x=f"{x:.1f}", y=0,
                width=f"{part * BAR_WIDTH:.1f}", height=BAR_HEIGHT, class_=f"c-{name}",
            )
        )  # fmt: skip
        x += part * BAR_WIDTH
        swatch = element(
            "svg", element("rect", width=10, height=10, class_=f"c-{name}"), viewBox="0 0 10 10",
            aria_hidden="true",
        )  # fmt: skip
        spent = duration(round(seconds * NS_PER_S))
        legend.append(element("li", swatch, f"{label}, {spent}"))
    bar = element(
        "svg", *bars, role="img", viewBox=f"0 0 {BAR_WIDTH} {BAR_HEIGHT}", class_="goodput",
        preserveAspectRatio="none", aria_label="Where the time of workers went",
    )  # fmt: skip
    return Part(
        "goodput", element("div", bar, element("ul", *legend, class_="legend"), id="goodput")
    )


def goodput_text(job: JobView) -> str:
    """Return "93.1% of 12m 4s", a dash before any time was allocated."""
    goodput = job.record.goodput
    if not goodput.allocated_ns:
        return "–"
    return f"{goodput.ratio:.1%} of {duration(goodput.allocated_ns, digits=0)}"


def pace_facts(telemetry: Telemetry) -> dict[str, object]:
    """Return the job's position in the run, its pace, and the estimated time left."""
    facts: dict[str, object] = {
        "position": position_line(telemetry) or "–",
        "pace": pace_line(telemetry) or "–",
    }
    left_ns = eta_ns(telemetry)
    if left_ns is not None:
        facts["time left"] = duration(left_ns, digits=0)
    return facts


def stragglers(job: JobView) -> frozenset[int]:
    """Return the ranks that others wait for more than `STRAGGLES` of their time."""
    return frozenset(
        worker.telemetry.straggler
        for worker in job.workers
        if worker.telemetry.straggler >= 0
        and worker.telemetry.straggler_wait_ns > STRAGGLES * worker.telemetry.wall_ns
    )


def worker_rows(job: JobView) -> dict[str, Html]:
    """Return the workers' rows, stragglers first."""
    late = stragglers(job)

    def place(worker: WorkerView) -> tuple[bool, bool, int, str]:
        return worker.rank not in late, worker.rank < 0, worker.rank, worker.report.worker_id

    rows = {}
    for worker in sorted(job.workers, key=place)[:ROWS_MAX]:
        report, telemetry = worker.report, worker.telemetry
        key, is_late = f"w-{report.worker_id}", worker.rank in late
        mark = element("strong", "others wait for it", class_="late") if is_late else None
        rows[key] = row(
            key,
            worker.rank if worker.rank >= 0 else "–",
            joined(
                report.worker_id, " ", element("small", f"pid {report.pid}" if report.pid else "")
            ),
            joined(pill(report.phase.value), " ", mark),
            worker.steps,
            f"{telemetry.step_s * 1e3:.3g} ms" if telemetry.steps else "–",
            _split(telemetry),
            css="straggler" if is_late else None,
        )
    return rows


def _split(telemetry: Telemetry) -> Html:
    """Return the phases of a step, as a bar and as text."""
    if not telemetry.steps or not telemetry.wall_ns:
        return Html("–")
    waits = min(telemetry.straggler_wait_ns, telemetry.exchange_ns)
    parts = (
        ("compute", "productive", telemetry.compute_ns),
        ("exchange", "eval", telemetry.exchange_ns - waits),
        ("waits for others", "straggler_wait", waits),
        ("data", "data_wait", telemetry.data_wait_ns),
        ("commit", "checkpoint_stall", telemetry.commit_ns),
    )
    # An exchange overlaps with computation in the same step, so the sum may exceed wall time.
    total_ns = max(telemetry.wall_ns, sum(spent_ns for _, _, spent_ns in parts))
    bars, words, x = [], [], 0.0
    for name, css, spent_ns in parts:
        width = 100 * spent_ns / total_ns
        bars.append(
            element("rect", x=f"{x:.0f}", width=f"{width:.0f}", height=8, class_=f"c-{css}")
        )
        x += width
        if width >= 0.5:
            words.append(f"{name} {width:.0f}%")
    bar = element(
        "svg", *bars, viewBox="0 0 100 8", preserveAspectRatio="none", class_="split",
        aria_hidden="true",
    )  # fmt: skip
    return joined(bar, element("small", ", ".join(words)))
