"""The HTTP routes: pages, streams of their changes, and metrics.

    /  /jobs/JOB  /studies/STUDY         pages; each has a stream of its changes at PATH/stream
    /jobs/JOB/series                     the series of the charts, as JSON
    /jobs/JOB/log  /jobs/JOB/log/stream  output of workers: the newest lines, and new ones
    /api/v1/status  /api/v1/jobs/JOB     the output of `elastic status -o json`
    /metrics                             for Prometheus

Rule: a page is made from one snapshot of the view and changes nothing. It is made at most twice a
second, however many viewers it has.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from elastic.client.show import job_as_dict, status_as_dict
from elastic.coord.history import History, JobHistory
from elastic.coord.lookup import find_job
from elastic.coord.server_context import ServiceContext
from elastic.coord.web.access import shown_name, status_of
from elastic.coord.web.figures import exposition
from elastic.coord.web.html import clean
from elastic.coord.web.output import newest_lines, output_stream
from elastic.coord.web.pages import document, front_page, job_page, log_page, plain_page
from elastic.coord.web.parts import Changes, Page
from elastic.coord.web.studies import Studies
from elastic.core.facts import JobId
from elastic.core.view import ClusterView, JobView
from elastic.errors import ElasticError, NotFound
from elastic.runtime.exposition import CONTENT_TYPE, Histogram
from elastic.version import __version__

TICK_S = 1.0
PAGE_SHARE, PAGE_KEPT_S_MAX = 0.01, 5.0
"""Of the time, for making a page that is open; and the longest time for which it is kept."""
POINTS_PER_TICK = 500
ASSETS = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "uplot.css": "text/css",
    "uplot.js": "text/javascript",
    "uplot-LICENSE.txt": "text/plain",
    "icon.svg": "image/svg+xml",
}


@dataclass
class Site:
    """The pages of one coordinator.

    Attributes:
        context: source of the view.
        studies: studies that are shown, too.
        answered: durations of gRPC requests, by method.
    """

    context: ServiceContext
    studies: Studies
    answered: Mapping[str, Histogram] = field(default_factory=dict)
    _made: dict[str, tuple[int, Page]] = field(default_factory=dict)

    def app(self) -> Starlette:
        """Return the application for requests that the gate has admitted."""
        pages: list[tuple[str, Callable[[Request], Any]]] = [
            ("/", self._front),
            ("/jobs/{job}", self._job),
            ("/studies/{study}", self._study),
        ]
        routes = [
            Route("/stream", self._streaming(self._front)),
            Route("/jobs/{job}/stream", self._streaming(self._job)),
            Route("/studies/{study}/stream", self._streaming(self._study)),
            Route("/jobs/{job}/series", self._series),
            Route("/jobs/{job}/log", self._log),
            Route("/jobs/{job}/log/stream", self._log_stream),
            Route("/api/v1/status", self._status_json),
            Route("/api/v1/jobs/{job}", self._job_json),
            Route("/metrics", self._metrics),
            Route("/assets/{name}", _asset),
            *(Route(path, self._showing(make)) for path, make in pages),
        ]
        handlers: Any = {ElasticError: _on_error, 404: _on_missing}
        return Starlette(routes=routes, exception_handlers=handlers)

    # ------------------------------------------------------------------------------- pages

    def _history(self, job_id: JobId) -> JobHistory:
        tenure = self.context.leader_state.tenure
        history = tenure.history if tenure is not None else None
        return (history or History()).of(job_id)

    async def _find(self, request: Request) -> tuple[ClusterView, JobView, JobHistory]:
        view, _ = await self.context.read_view()
        job = find_job(view, request.path_params["job"])
        return view, job, self._history(job.record.spec.job_id)

    async def _front(self, _: Request) -> Page:
        view, standby = await self.context.read_view()
        context = self.context
        about = f"coordinator {context.name}, version {__version__}, store {context.store}"
        about = f"{standby}; {about}" if standby else about
        names = await self.studies.names()
        return front_page(view, context.clock.unix_ns(), about=about, studies=names)

    async def _job(self, request: Request) -> Page:
        view, job, history = await self._find(request)
        tenure = self.context.leader_state.tenure
        watchers = tenure.driver.watchers if tenure is not None else None
        events = watchers.history(job.record.spec.job_id) if watchers is not None else ()
        return job_page(view, job, history, self.context.clock.unix_ns(), events)

    async def _study(self, request: Request) -> Page:
        return await self.studies.page(request.path_params["study"])

    async def _page(self, make: Callable[[Request], Any], request: Request) -> Page:
        """Return a page, made for all viewers at most once in half a tick.

        That of a thousand workers takes tens of milliseconds: it is made less often.
        """
        key = request.scope["path"].removesuffix("/stream") or "/"
        now_ns = self.context.clock.monotonic_ns()
        until_ns, page = self._made.get(key, (0, None))
        if page is None or now_ns > until_ns:
            page = await make(request)
            took_ns = self.context.clock.monotonic_ns() - now_ns
            kept_ns = min(max(TICK_S * 0.5e9, took_ns / PAGE_SHARE), PAGE_KEPT_S_MAX * 1e9)
            self._made[key] = now_ns + int(kept_ns), page
            for old in [k for k, (until, _) in self._made.items() if now_ns > until + 10e9]:
                del self._made[old]
        return page

    # ------------------------------------------------------------------------------- responses

    def _showing(self, make: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def show(request: Request) -> Response:
            page = await self._page(make, request)
            path = request.scope["path"].rstrip("/")
            user = shown_name(request.state.caller)
            return HTMLResponse(document(page, user=user, stream=f"{path}/stream"))

        return show

    def _streaming(self, make: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def stream(request: Request) -> Response:
            await self._page(make, request)  # So that a missing page returns an error status.
            return _events(request, self._changes(make, request))

        return stream

    async def _changes(
        self, make: Callable[[Request], Any], request: Request
    ) -> AsyncGenerator[str, None]:
        """Yield the changes of a page as server-sent events, once a second."""
        changes = Changes()
        seen = request.headers.get("last-event-id") or request.query_params.get("seq", "0")
        number = int(seen) if seen.isdecimal() else 0
        job_id = JobId("")
        if "job" in request.path_params:
            job_id = (await self._find(request))[1].record.spec.job_id
        while True:
            page = await self._page(make, request)
            for message in changes.take(page.parts()):
                yield f"data: {message}\n\n"
            if page.charts and changes.budget > 0:
                history = self._history(job_id)
                if number > history.number:  # It counts points of an earlier leader.
                    number = 0
                recent = [point for point in history.recent if point[0] > number]
                if recent:
                    number = recent[:POINTS_PER_TICK][-1][0]
                    points = [point[1:] for point in recent[:POINTS_PER_TICK]]
                    text = json.dumps({"points": points, "marks": _marks(history)})
                    changes.budget -= len(text)
                    yield f"id: {number}\ndata: {text}\n\n"
            yield ": \n\n"  # Only a write detects a client that is gone.
            await anyio.sleep(TICK_S)
            changes.earn(TICK_S)

    async def _series(self, request: Request) -> Response:
        _, _, history = await self._find(request)
        series = {
            clean(name): {"t": one.times, "v": one.values} for name, one in history.series.items()
        }
        plot = {"series": series, "marks": _marks(history), "seq": history.number}
        return JSONResponse(plot)

    async def _log(self, request: Request) -> Response:
        _, job, _ = await self._find(request)
        lines = await newest_lines(self.context, job.record.spec.job_id, request.query_params)
        page = log_page(job, lines)
        return HTMLResponse(document(page, user=shown_name(request.state.caller), stream=""))

    async def _log_stream(self, request: Request) -> Response:
        _, job, _ = await self._find(request)
        job_id, query = job.record.spec.job_id, request.query_params
        return _events(request, output_stream(self.context, job_id, query))

    async def _status_json(self, _: Request) -> Response:
        return JSONResponse(status_as_dict(await self.context.status()))

    async def _job_json(self, request: Request) -> Response:
        view, job, _ = await self._find(request)
        return JSONResponse(job_as_dict(job, view.now_ns))

    async def _metrics(self, _: Request) -> Response:
        text = exposition(self.context, self.answered)
        return Response(text, media_type=CONTENT_TYPE)


def _marks(history: JobHistory) -> dict[str, Any]:
    """Return the marks in charts: when generations began to train, and checkpoints."""
    spans = [s for s in history.spans if s.trains_ns]
    return {
        "generations": [
            [round(s.trains_ns / 1e9, 2), s.generation, clean(s.cause)[:20]] for s in spans[-100:]
        ],
        "checkpoints": [round(ns / 1e9, 2) for ns in list(history.checkpoints.values())[-200:]],
    }


def _events(request: Request, messages: AsyncGenerator[str, None]) -> Response:
    """Return a stream that ends when its caller's credentials become invalid."""
    gate, caller = request.state.gate, request.state.caller

    async def stream() -> AsyncGenerator[str, None]:
        yield "retry: 2000\n\n"
        async with aclosing(messages) as open_messages:
            try:
                async for message in open_messages:
                    if gate.why_over(caller):
                        return
                    yield message
            except ElasticError as error:
                yield f"data: {json.dumps({'over': clean(str(error))})}\n\n"

    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise NotFound(f"there is no {name!r} among the assets")
    data = (package_files("elastic.coord.web") / "assets" / name).read_bytes()
    return Response(data, media_type=ASSETS[name], headers={"cache-control": "max-age=300"})


async def _on_error(request: Request, error: Exception) -> Response:
    status = status_of(error) if isinstance(error, ElasticError) else 500
    return _error_response(request, status, str(error))


async def _on_missing(request: Request, _: Exception) -> Response:
    return _error_response(request, 404, f"there is no page {request.scope['path'][:200]!r} here")


def _error_response(request: Request, status: int, text: str) -> Response:
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(plain_page("Not here", text), status)
    return PlainTextResponse(f"{clean(text)}\n", status)
