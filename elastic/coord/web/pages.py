"""The pages: all jobs and nodes, and one job; pure functions of view and history.

Rule: nothing is decided or requested here, and everything is text until `element` escapes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from elastic.client.show import bounds
from elastic.client.text_format import (
    duration,
    metrics_line,
    missing,
    parsed_metrics,
    world_size,
)
from elastic.coord.history import JobHistory, Span
from elastic.coord.web.html import Html, element, escaped, joined
from elastic.coord.web.output import Line, head
from elastic.coord.web.parts import Page, Part, moment, number, pill, row, table
from elastic.coord.web.spent import ROWS_MAX, goodput_bar, goodput_text, pace_facts, worker_rows
from elastic.core.config import NS_PER_S
from elastic.core.facts import NodeId, NodePhase, WorkerId, WorkerPhase
from elastic.core.view import ClusterView, JobView, NodeView, WorkerView
from elastic.wire.codec_jobs import TimedNote

ENDED_SHOWN = 50
SPANS_SHOWN = 40
EVENTS_SHOWN = 40
CHECKPOINTS_SHOWN = 20
TIMELINE_WIDTH, TIMELINE_HEIGHT = 1000, 34
COLOURS = 8
CARDS_KEPT = 8192


class Clocks:
    """Converts times of the coordinator's monotonic clock to Unix times."""

    def __init__(self, now_ns: int, unix_ns: int) -> None:
        """Take the same moment on both clocks."""
        self._offset_ns = unix_ns - now_ns
        self.unix_ns = unix_ns

    def unix(self, monotonic_ns: int) -> int:
        """Return the Unix time in ns, rounded to seconds, so that it is the same on each call."""
        return round((monotonic_ns + self._offset_ns) / NS_PER_S) * NS_PER_S


# ------------------------------------------------------------------------------------ all jobs


def front_page(view: ClusterView, unix_ns: int, *, about: str, studies: Iterable[str] = ()) -> Page:
    clocks = Clocks(view.now_ns, unix_ns)
    live = [job for job in view.jobs if not job.has_ended()]
    ended = [job for job in reversed(view.jobs) if job.has_ended()][:ENDED_SHOWN]
    rows = {f"j-{job.record.spec.job_id}": _job_row(job, clocks) for job in (*live, *ended)}
    body: list[Html | Part] = [
        element("h1", "Jobs"),
        _paragraph("about", about),
        _paragraph("counts", _counts(view)),
        *table(
            Part("jobs", items=rows, tag="tbody"),
            *("job", "state", "workers", "generation", "goodput", "since", "why"),
            label="Jobs",
        ),
    ]
    names = sorted(studies)
    if names:
        links = (
            element("li", element("a", n, href=f"/studies/{quote(n, safe='')}")) for n in names
        )
        body += [element("h2", "Studies"), element("ul", *links)]
    nodes = {f"n-{node.node.node_id}": _node_row(node, clocks) for node in view.nodes}
    body += [
        element("h2", "Nodes"),
        *table(
            Part("nodes", items=nodes, tag="tbody"),
            *("node", "state", "since", "free slots", "resources", "why"),
            label="Nodes",
        ),
    ]
    return Page("Jobs", body)


def _paragraph(key: str, text: object) -> Part:
    return Part(key, element("p", text, id=key))


def _counts(view: ClusterView) -> str:
    phases: dict[str, int] = {}
    for job in view.jobs:
        phases[job.record.phase.value] = phases.get(job.record.phase.value, 0) + 1
    slots = sum(node.node.num_slots for node in view.nodes)
    free = sum(node.free_slots for node in view.nodes)
    jobs = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items())) or "no jobs"
    return f"{jobs}; {len(view.nodes)} nodes, {free} of {slots} slots are free"


def _job_row(job: JobView, clocks: Clocks) -> Html:
    spec = job.record.spec
    link = element("a", spec.name, href=f"/jobs/{quote(spec.job_id, safe='')}")
    return row(
        f"j-{spec.job_id}",
        joined(link, " ", element("small", spec.job_id)),
        pill(job.record.phase.value),
        f"{world_size(job)} of {bounds(job)}",
        job.record.generation,
        goodput_text(job),
        moment(clocks.unix(job.since_ns)),
        job.reason.partition("\n")[0] or "–",
    )


def _node_row(view: NodeView, clocks: Clocks) -> Html:
    node = view.node
    amounts = [f"{name}={amount:g}" for name, amount in node.resources.as_dict().items()]
    return row(
        f"n-{node.node_id}",
        node.node_id,
        joined(pill(view.phase.value), " cordoned" if view.cordoned else None),
        moment(clocks.unix(view.since_ns)),
        f"{view.free_slots} of {node.num_slots}",
        " ".join([*amounts, node.accelerator_type]).strip() or "–",
        view.reason or "–",
    )


# --------------------------------------------------------------------------------------- a job


def job_page(
    view: ClusterView,
    job: JobView,
    history: JobHistory,
    unix_ns: int,
    events: Sequence[TimedNote] = (),
) -> Page:
    spec, clocks = job.record.spec, Clocks(view.now_ns, unix_ns)
    place = f"/jobs/{quote(spec.job_id, safe='')}"
    body: list[Html | Part] = [
        element("h1", spec.name, " ", element("small", spec.job_id)),
        _head(job, history, clocks),
        _why(job),
        element("h2", "Generations"),
        _timeline(history, clocks.unix_ns),
        *table(
            Part("spans", items=_span_rows(history), tag="tbody"),
            *("generation", "cause", "workers", "formed", "pause", "left in it", "why"),
            label="Generations",
        ),
        element("h2", "Where the time of workers went"),
        goodput_bar(job),
        element("h2", "Nodes and ranks"),
        Part("map", items=_node_cards(view, job), css="map"),
        element("h2", "Workers"),
        _more_workers(job),
        *table(
            Part("workers", items=worker_rows(job), tag="tbody"),
            *("rank", "worker", "state", "steps", "step", "where its time goes"),
            label="Workers",
        ),
        element("h2", "Metrics"),
        Html('<div id="charts" class="charts"></div>'),
        *table(
            Part("metrics", items=_metric_rows(job, history), tag="tbody"),
            *("metric", "newest", "lowest", "highest"),
            label="Metrics",
        ),
        element("h2", "Checkpoints"),
        *table(
            Part("checkpoints", items=_checkpoint_rows(job, history), tag="tbody"),
            *("checkpoint", "recorded", "generation", "state", "metrics"),
            label="Checkpoints",
        ),
        element("h2", "What happened"),
        *table(
            Part("events", items=_event_rows(events), tag="tbody"),
            *("when", "what", ""),
            label="What happened",
        ),
        element("h2", "Output"),
        _log_form(place),
        Html('<pre id="log" class="log" tabindex="0" aria-label="Output of workers"></pre>'),
    ]
    return Page(spec.name, body, charts=f"{place}/series", log=f"{place}/log")


def _head(job: JobView, history: JobHistory, clocks: Clocks) -> Part:
    record = job.record
    newest = record.checkpoints[-1].path if record.checkpoints else ""
    facts: dict[str, object] = {
        "state": joined(pill(record.phase.value), " since ", moment(clocks.unix(job.since_ns))),
        "generation": record.generation or "–",
        "workers": f"{world_size(job)} of {bounds(job)}",
        **(pace_facts(job.telemetry) if world_size(job) else {}),
        "goodput": goodput_text(job),
        "newest checkpoint": moment(history.checkpoints.get(newest, 0)) if newest else "none",
        "entry": record.spec.entry.target,
        "run": record.spec.run_path or "–",
    }
    if record.submitter:
        facts["submitter"] = record.submitter
    items = (
        element("div", element("dt", name), element("dd", value)) for name, value in facts.items()
    )
    return Part("head", element("dl", *items, id="head", class_="facts"))


def _why(job: JobView) -> Part:
    """Return why the job waits or how it ended, and the traceback of its failure."""
    record = job.record
    waits = missing(job)
    if waits:
        why: object = joined(element("strong", "Waits for: "), waits)
    else:
        why = job.reason or record.reason
    is_plain = not waits and not job.has_ended()
    parts = [element("p", why, class_="now" if is_plain else "why") if why else None]
    failure = record.failure
    if failure is not None:
        detail = failure.traceback.rstrip() or f"{failure.error_type}: {failure.message}"
        parts.append(element("p", f"First failure, in worker {record.failed_worker}:"))
        parts.append(element("pre", detail, class_="log", tabindex="0"))
    return Part("why", element("div", *parts, id="why"))


def _timeline(history: JobHistory, unix_ns: int) -> Part:
    """Return a bar for each generation, and a red gap for each pause, over the whole run."""
    spans = list(history.spans)
    if not spans:
        return Part("timeline", element("p", "No group yet.", id="timeline"))
    begin = spans[0].stood_ns
    end = max(*(max(s.ended_ns, s.trains_ns, s.formed_ns) for s in spans), begin + NS_PER_S)
    if not spans[-1].ended_ns:
        # In steps, so that the picture does not change with each update.
        step = max(2 * NS_PER_S, (end - begin) // 200)
        end = max(end, begin + -(-(unix_ns - begin) // step) * step)
    scale = TIMELINE_WIDTH / (end - begin)
    bars = []
    for span in spans:
        begins = (span.stood_ns - begin) * scale
        trains = ((span.trains_ns or span.ended_ns or end) - begin) * scale
        ends = ((span.ended_ns or end) - begin) * scale
        pause = max(trains - begins, 0.0)
        if pause:
            bars.append(_bar(begins, max(pause, 1.5), "pause", f"{_pause(span)} standing still"))
        label = f"generation {span.generation}, {span.world_size} workers, {span.cause or 'known'}"
        bars.append(_bar(trains, max(ends - trains, 1.0), f"g{span.generation % COLOURS}", label))
    picture = element(
        "svg", *bars, role="img", viewBox=f"0 0 {TIMELINE_WIDTH} {TIMELINE_HEIGHT}",
        preserveAspectRatio="none", class_="timeline", aria_label="Generations over time",
    )  # fmt: skip
    ends_now = spans[-1].ended_ns or unix_ns
    scale_line = element(
        "p",
        joined(moment(begin), element("span", f"{len(spans)} generations, red: standing still")),
        element("span", "now" if ends_now == unix_ns else moment(ends_now)),
        class_="scale",
    )
    return Part("timeline", element("div", picture, scale_line, id="timeline"))


def _bar(x: float, width: float, css: str, title: str) -> Html:
    return element(
        "rect", element("title", title), x=f"{x:.1f}", y=0, width=f"{width:.1f}",
        height=TIMELINE_HEIGHT, class_=css,
    )  # fmt: skip


def _pause(span: Span) -> str:
    return "–" if span.pause_s is None else duration(round(span.pause_s * NS_PER_S), digits=2)


def _span_rows(history: JobHistory) -> dict[str, Html]:
    spans = list(history.spans)[-SPANS_SHOWN:]
    return {
        f"g-{span.generation}": row(
            f"g-{span.generation}",
            span.generation,
            span.cause or "–",
            span.world_size,
            moment(span.formed_ns),
            _pause(span) if span.cause not in ("", "start") else "–",
            "; ".join(span.left[:4]) + (" …" if len(span.left) > 4 else "") or "–",
            span.reason or "–",
        )
        for span in reversed(spans)
    }


def _node_cards(view: ClusterView, job: JobView) -> dict[str, Html]:
    """Return a card for each node that has workers of the job, with a cell for each."""
    nodes = {node.node.node_id: node for node in view.nodes}
    by_node: dict[NodeId, list[WorkerView]] = {}
    for worker in job.workers:
        by_node.setdefault(worker.node_id, []).append(worker)
    cards = {}
    for node_id, workers in sorted(by_node.items()):
        node = nodes.get(node_id)
        phase = node.phase if node is not None else NodePhase.LOST
        kind = node.node.accelerator_type if node is not None else ""
        cells = tuple((w.rank, w.report.worker_id, w.report.phase) for w in workers)
        cards[f"c-{node_id}"] = _node_card(node_id, phase.value, kind, cells)
    return cards


@functools.lru_cache(CARDS_KEPT)
def _node_card(
    node_id: NodeId, phase: str, kind: str, workers: tuple[tuple[int, WorkerId, WorkerPhase], ...]
) -> Html:
    """Return the card of a node; cached, because thousands stay the same for hours."""
    cells = [
        element(
            "li",
            rank if rank >= 0 else "·",
            class_=f"s-{does.value}",
            title=f"{worker_id}: {does.value}",
        )
        for rank, worker_id, does in sorted(workers, key=lambda w: (w[0] < 0, w[0], w[1]))
    ]
    state = None if phase == "ready" else pill(phase)
    head = element("h3", node_id, " ", element("small", kind), state)
    return element("section", head, element("ul", *cells), id=f"c-{node_id}", class_="card")


def _more_workers(job: JobView) -> Part:
    more = len(job.workers) - ROWS_MAX
    text = f"{ROWS_MAX} of {len(job.workers)} workers are shown." if more > 0 else ""
    return _paragraph("more-workers", text)


def _metric_rows(job: JobView, history: JobHistory) -> dict[str, Html]:
    """Return the charted numbers, and the newest values of other reported metrics."""
    rows: dict[str, Html] = {}
    for name, series in history.series.items():
        known = [value for value in series.values if value is not None]
        newest = series.values[-1] if series.values else None
        low, high = (min(known), max(known)) if known else (None, None)
        key = f"m-{len(rows)}"
        rows[key] = row(key, name, number(newest, 6), number(low, 6), number(high, 6))
    for name, value in parsed_metrics(job.record.metrics).items():
        if name not in history.series and isinstance(value, (str, bool, int, float)):
            key = f"m-{len(rows)}"
            rows[key] = row(key, name, str(value)[:200], "", "")
        if len(rows) > ROWS_MAX:
            break
    return rows


def _checkpoint_rows(job: JobView, history: JobHistory) -> dict[str, Html]:
    rows = {}
    for record in reversed(job.record.checkpoints[-CHECKPOINTS_SHOWN:]):
        key = f"k-{record.generation}-{record.index}"
        rows[key] = row(
            key,
            record.path.rstrip("/").rpartition("/")[2],
            moment(history.checkpoints.get(record.path, 0)),
            record.generation,
            record.status.value.lower().replace("_", " "),
            metrics_line(parsed_metrics(record.metrics)) or "–",
        )
    return rows


def _event_rows(events: Sequence[TimedNote]) -> dict[str, Html]:
    rows = {}
    for timed in events[-EVENTS_SHOWN:][::-1]:
        key = f"e-{timed.unix_ns}-{timed.note.name}"
        fields = " ".join(f"{k}={v}" for k, v in timed.note.fields if k != "unix_ns")
        name = timed.note.name.replace("_", " ")
        rows[key] = row(key, moment(timed.unix_ns), name, fields[:500])
    return rows


def _log_form(place: str) -> Html:
    """Return the form that selects output; without JavaScript it opens the newest lines."""
    return element(
        "form",
        element("label", "rank ", _input("rank", "all", inputmode="numeric", size=4)),
        element("label", " contains ", _input("contains", "", size=20)),
        element("button", "show"),
        id="log-form", method="get", action=f"{place}/log",
    )  # fmt: skip


def _input(name: str, placeholder: str, **attributes: object) -> Html:
    return element("input", name=name, placeholder=placeholder, autocomplete="off", **attributes)


def log_page(job: JobView, lines: Iterable[Line]) -> Page:
    """Return the newest lines of output, for browsers without JavaScript."""
    spec = job.record.spec
    place = f"/jobs/{quote(spec.job_id, safe='')}"
    text = "\n".join(f"{head(line)} {line[-1]}" for line in lines)
    body: list[Html | Part] = [
        element("h1", "Output of ", element("a", spec.name, href=place)),
        _log_form(place),
        element("pre", text or "nothing", class_="log", tabindex="0"),
    ]
    return Page(f"Output of {spec.name}", body)


# ------------------------------------------------------------------------------------- documents


def document(page: Page, *, user: str, stream: str) -> str:
    """Return the whole document of a page.

    Args:
        page: its contents.
        user: name of the viewer, "" without authentication.
        stream: path of its changes, "" for none.
    """
    leave = None
    if user:
        button = element("button", "log out", class_="plain")
        form = element("form", button, method="post", action="/logout")
        leave = element("span", user, " ", form, class_="user")
    head = joined(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", page.title, " · elastic"),
        element("link", rel="stylesheet", href="/assets/uplot.css"),
        element("link", rel="stylesheet", href="/assets/page.css"),
        element("link", rel="icon", href="/assets/icon.svg", type="image/svg+xml"),
        element("script", src="/assets/uplot.js", defer=True) if page.charts else None,
        element("script", src="/assets/page.js", type="module") if stream else None,
    )
    body = element(
        "body",
        element("a", "to the content", href="#main", class_="skip"),
        element(
            "header",
            element("a", "elastic", href="/", class_="home"),
            element("span", "", id="live", role="status"),
            leave,
        ),
        element("main", page.html(), id="main"),
        data_stream=stream or None,
        data_charts=page.charts or None,
        data_log=page.log or None,
    )
    return f"<!doctype html>\n{element('html', element('head', head), body, lang='en')}\n"


def login_page(why: str, then: str) -> str:
    """Return the page that asks for a token.

    Args:
        why: why the last attempt failed, "" for none.
        then: path to open after the login.
    """
    form = element(
        "form",
        element("label", "Token ", element(
            "input", name="token", type="password", autocomplete="current-password",
            required=True, autofocus=True,
        )),
        element("input", type="hidden", name="then", value=then),
        element("button", "log in"),
        method="post", action="/login", class_="login",
    )  # fmt: skip
    body = [
        element("h1", "Log in"),
        element("p", why, class_="why") if why else Html(""),
        element(
            "p", "This coordinator shows itself to holders of a token of the role read, submit or "
            "admin: ", element("code", "elastic-coord tokens create --role read"), ".",
        ),
        form,
    ]  # fmt: skip
    return document(Page("Log in", body), user="", stream="")


def plain_page(title: str, text: str) -> str:
    body = [element("h1", title), escaped(element("p", text))]
    return document(Page(title, body), user="", stream="")
