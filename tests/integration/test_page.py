"""The page of a real coordinator: who sees it, what it shows, and that it follows what happens."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.to_thread import run_sync
from prometheus_client.parser import text_string_to_metric_families

from elastic.coord.roles import Role
from elastic.coord.server_context import ServiceContext
from elastic.coord.web.app import Site
from elastic.coord.web.studies import Studies
from elastic.core.facts import ExitCause, ExitKind, WorkerPhase
from elastic.core.messages import (
    FollowLogs,
    LogLines,
    Progress,
    Report,
    Reported,
    WorkerUpdate,
)
from elastic.core.telemetry import CATEGORIES, Goodput, Telemetry
from elastic.runtime.clock import SystemClock
from tests.integration.coordinator import ROOT, Coordinator, ScriptedAgent, User, node, spec
from tests.integration.locked import authority, certificate, token
from tests.patience import DEADLINE_S, in_time, wait_for_async

pytestmark = pytest.mark.anyio
METRIC = re.compile(r"\belastic_[a-z_]+\b")
HOSTILE = '<script>alert("x")</script>'


@dataclass
class Answer:
    status: int
    text: str
    headers: Any


class Browser:
    """Asks for pages; does not follow where it is sent, keeps one cookie."""

    def __init__(self, url: str, trust: ssl.SSLContext | None = None) -> None:
        self.url, self.cookie = url, ""
        opener = urllib.request.build_opener(NoRedirect, urllib.request.HTTPSHandler(context=trust))
        self._open = opener.open

    async def get(self, path: str, **headers: str) -> Answer:
        return await run_sync(lambda: self._ask(path, None, headers))

    async def post(self, path: str, form: dict[str, str], **headers: str) -> Answer:
        data = urllib.parse.urlencode(form).encode()
        return await run_sync(lambda: self._ask(path, data, headers))

    def _ask(self, path: str, data: bytes | None, headers: dict[str, str]) -> Answer:
        told = {"Accept": "text/html", **{k.replace("_", "-"): v for k, v in headers.items()}}
        if self.cookie:
            told["Cookie"] = self.cookie
        request = urllib.request.Request(self.url + path, data=data, headers=told)
        try:
            with self._open(request, timeout=DEADLINE_S) as answer:
                return Answer(answer.status, answer.read().decode(), answer.headers)
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode(), error.headers)

    async def stream(self, path: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first message of a stream for which `wanted` holds."""

        def read() -> dict[str, Any]:
            request = urllib.request.Request(self.url + path, headers={"Cookie": self.cookie})
            with self._open(request, timeout=DEADLINE_S) as answer:
                for line in answer:
                    if line.startswith(b"data: ") and wanted(told := json.loads(line[6:])):
                        return dict(told)
            raise AssertionError(f"{path} ended")

        return await run_sync(read, abandon_on_cancel=True)


def reported_of(told: Telemetry) -> Goodput:
    """What a worker has spent that was productive all the time."""
    return Goodput(productive_ns=told.wall_ns)


def ends_of(told: dict[str, Any]) -> list[list[Any]]:
    """Names and values of the points that a message tells of."""
    return [point[::2] for point in told.get("points", [])]


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Tags(HTMLParser):
    """What stands in a document: elements by name, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_url(coordinator: Coordinator) -> str:
    words = coordinator.ready_file.read_text().split()
    return next(word for word in words if word.startswith("page=")).removeprefix("page=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def shown(folder: Path) -> dict[Role, str]:
    return {role: token(folder / "tokens.json", role, f"the-{role.value}") for role in Role}


@pytest.fixture(scope="module")
def leaver(folder: Path) -> str:
    return token(folder / "tokens.json", Role.READ, "leaver")


@pytest.fixture(scope="module")
def coordinator(folder: Path, shown: dict[Role, str], leaver: str) -> Iterator[Coordinator]:
    studies = folder / "studies"
    (studies / "sweep").mkdir(parents=True)
    lines = [
        {"e": "study", "settings": {"name": "sweep", "metric": "loss", "mode": "min"}},
        {"e": "proposed", "trial": 0, "name": "sweep-0", "config": {"lr": HOSTILE}},
        {"e": "started", "trial": 0, "job": "j-sweep", "run": "sweep-0", "unix_ns": 1},
        {
            "e": "reported", "trial": 0, "n": 1, "metrics": {"loss": 0.25}, "generation": 1,
            "index": 0,
        },
    ]  # fmt: skip
    text = "".join(json.dumps({"t": 1.0, **line}) + "\n" for line in lines)
    (studies / "sweep" / "study.jsonl").write_text(text)
    args = ("--tokens", str(folder / "tokens.json"), "--http", "0", "--studies", str(studies))
    with Coordinator(folder / "c", args=args) as running:
        yield running


def routes() -> list[str]:
    context: Any = ServiceContext(None, None, "memory:", SystemClock())  # type: ignore[arg-type]
    app = Site(context, Studies("", SystemClock())).app()
    return [route.path for route in app.routes]  # type: ignore[attr-defined]


async def test_nothing_is_shown_to_whoever_shows_nothing(
    coordinator: Coordinator, shown: dict[Role, str]
) -> None:
    browser = Browser(page_url(coordinator))
    paths = [path.replace("{", "").replace("}", "") for path in routes()] + ["/nowhere", "/logout"]
    for path in paths:
        answer = await browser.get(path)
        expected = 404 if path.startswith("/assets/") else 401
        assert answer.status == expected, (path, answer.text)
        answer = await browser.get(path, Authorization="Bearer elt_0000000000_wrong")
        assert answer.status == expected, (path, answer.text)
        assert "set-cookie" not in answer.headers
        if expected == 401:
            node_role = await browser.get(path, Authorization=f"Bearer {shown[Role.NODE]}")
            assert node_role.status == 403, (path, node_role.text)


async def test_a_login_shows_a_job_as_it_goes_on(
    coordinator: Coordinator, shown: dict[Role, str]
) -> None:
    browser = Browser(page_url(coordinator))
    login = await browser.get("/login")
    assets = [value for _, a in Tags(login.text).tags for value in a.values() if value]
    for path in {value for value in assets if value.startswith("/assets/")}:
        assert (await browser.get(path)).status == 200
    form = {"token": shown[Role.READ], "then": "/"}
    strange = await browser.post("/login", form, Origin="http://elsewhere.example")
    assert strange.status == 403
    answer = await browser.post("/login", form)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert shown[Role.READ] not in cookie
    browser.cookie = cookie.partition(";")[0]

    async with (
        User(coordinator.address, token=shown[Role.ADMIN]) as user,
        ScriptedAgent(coordinator.address, node("the-node"), token=shown[Role.NODE]) as agent,
        in_time(),
    ):
        await agent.join()
        job_id = await user.submit(spec("digits"))
        worker = await agent.train()
        metrics = json.dumps({"loss": 0.5, HOSTILE: 1.5, "note": HOSTILE})
        first = Report(worker.worker_id, worker.job_id, worker.generation, 0, 0, metrics)
        await agent.say(Reported(first))
        await user.wait_job(job_id, lambda job: job.record.metrics)

        front = await browser.get("/")
        assert f"/jobs/{job_id}" in front.text
        assert "/studies/sweep" in front.text
        policy = front.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        page = await browser.get(f"/jobs/{job_id}")
        read = Tags(page.text)
        names = {tag for tag, _ in read.tags}
        assert {"table", "svg", "dl", "time"} <= names
        assert HOSTILE in "".join(read.texts)
        scripts = [attrs for tag, attrs in read.tags if tag == "script"]
        assert all((attrs.get("src") or "").startswith("/assets/") for attrs in scripts)
        assert not any("style" in attrs or "onclick" in attrs for _, attrs in read.tags)
        ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
        assert len(ids) == len(set(ids))

        series = json.loads((await browser.get(f"/jobs/{job_id}/series")).text)
        assert series["series"]["loss"]["v"] == [0.5]
        assert series["marks"]["generations"][0][1] == worker.generation

        # The stream tells of a second report, in the table and in the chart.
        async with anyio.create_task_group() as tasks:
            received: list[dict[str, Any]] = []

            async def listen(what: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
                path = f"/jobs/{job_id}/stream?seq={series['seq']}"
                received.append({"what": what, **await browser.stream(path, wanted)})

            tasks.start_soon(listen, "row", lambda told: "0.0625" in told.get("html", ""))
            tasks.start_soon(listen, "point", lambda told: ["loss", 0.0625] in ends_of(told))
            second = replace(first, index=1, metrics='{"loss": 0.0625}')
            await agent.say(Reported(second))
        assert {told["what"] for told in received} == {"row", "point"}

        # Output arrives as text, without what a terminal would obey.
        async with anyio.create_task_group() as tasks:
            lines: list[Any] = []

            async def output() -> None:
                told = await browser.stream(f"/jobs/{job_id}/log/stream", lambda t: "lines" in t)
                lines.extend(told["lines"])

            tasks.start_soon(output)
            wish = await agent.hear(FollowLogs)
            text = f"\x1b[31mred\x1b[0m {HOSTILE}\r\nbell\x07 \x1b]0;title\x07end\n"
            await agent.say(LogLines(wish.follow_id, wish.worker_id, text))
        assert [line[-1] for line in lines] == [f"red {HOSTILE}", "bell\\x07 end"]

        # A loss: the next generation, with its cause and pause.
        gone = ExitCause(ExitKind.SIGNAL, 9)
        await agent.say(WorkerUpdate(replace(worker, phase=WorkerPhase.EXITED, exit=gone)))
        again = await agent.train()
        assert again.generation > worker.generation
        row = f"g-{again.generation}"
        await browser.stream(f"/jobs/{job_id}/stream", lambda told: told.get("set") == row)

        # All that the board and the alerts ask for is there to be asked for.
        told = Telemetry(steps=4, wall_ns=10**9, samples=256, epoch=2, step=3)
        done = Progress(again.worker_id, again.generation, 4, 1, reported_of(told), told)
        await agent.say(done)
        saved = Report(again.worker_id, again.job_id, again.generation, 0, 0, "{}", "/saved")
        await agent.say(Reported(saved))
        await user.wait_job(job_id, lambda job: job.record.checkpoints and job.telemetry.steps)
        figures = {}
        answer = await browser.get("/metrics", Authorization=f"Bearer {shown[Role.READ]}")
        for family in text_string_to_metric_families(answer.text):
            figures[family.name] = family
        of_job = {"job": job_id}
        assert [s.value for s in figures["elastic_job_generation"].samples] == [again.generation]
        [reforms] = figures["elastic_job_reforms"].samples
        assert reforms.labels["job"] == of_job["job"]
        assert reforms.value == 1
        assert figures["elastic_leader"].samples[0].value == 1
        rpcs = figures["elastic_rpc_seconds"].samples
        assert {"Submit", "Get"} <= {sample.labels["method"] for sample in rpcs}
        assert [s.value for s in figures["elastic_job_epoch"].samples] == [2]
        spent = {
            s.labels["category"]: s.value for s in figures["elastic_job_goodput_seconds"].samples
        }
        assert set(spent) == set(CATEGORIES)
        assert spent["productive"] > 0
        names = {sample.name for family in figures.values() for sample in family.samples}
        names |= set(METRIC.findall((ROOT / "elastic/agent/figures.py").read_text()))
        for file in ("grafana.json", "alerts.yaml"):
            asked = set(METRIC.findall((ROOT / "docker" / "monitoring" / file).read_text()))
            assert len(asked) > 5
            assert not asked - names, file
        status = json.loads((await browser.get("/api/v1/status")).text)
        assert [job["name"] for job in status["jobs"]] == ["digits"]
        await user.stop(job_id)

    study = await browser.get("/studies/sweep")
    told = "".join(Tags(study.text).texts)
    assert study.status == 200
    assert "loss=0.25" in told
    assert HOSTILE in told
    assert (await browser.get("/studies/..%2f..")).status == 404
    assert (await browser.post("/logout", {})).status == 303
    assert (await browser.get("/")).status == 401


async def test_a_revoked_token_ends_what_it_has_opened(
    coordinator: Coordinator, folder: Path, leaver: str
) -> None:
    from elastic.coord.tokens import revoke_token

    path = folder / "tokens.json"
    browser = Browser(page_url(coordinator))
    answer = await browser.post("/login", {"token": leaver, "then": "//x"})
    assert answer.headers["location"] == "/"
    browser.cookie = answer.headers["set-cookie"].partition(";")[0]
    assert (await browser.get("/")).status == 200
    async with anyio.create_task_group() as tasks:

        async def listen() -> None:
            with pytest.raises(AssertionError, match="ended"):
                await browser.stream("/stream", lambda told: False)

        tasks.start_soon(listen)
        revoke_token(path, "leaver", SystemClock().unix_ns())
    assert (await browser.get("/")).status == 401


async def test_where_certificates_are_asked_for_browsers_show_one(tmp_path: Path) -> None:
    ours = authority(tmp_path / "ours")
    statuses = {Role.READ: 200, Role.NODE: 403}
    shown = {role: certificate(ours, f"the-{role.value}", role).tls for role in statuses}
    args = ("--tls-dir", str(ours / "coordinator"), "--http", "0")
    with Coordinator(tmp_path / "c", args=args) as running:
        for role, expected in statuses.items():
            files = shown[role]
            assert files is not None
            trust = ssl.create_default_context(cafile=str(files.ca))
            with pytest.raises(OSError, match=r"(?i)ssl|reset|closed"):
                await Browser(page_url(running), trust).get("/")
            assert files.cert is not None
            trust.load_cert_chain(files.cert, files.key)
            assert (await Browser(page_url(running), trust).get("/")).status == expected


async def test_without_locks_only_this_machine_is_answered(tmp_path: Path) -> None:
    with Coordinator(tmp_path, args=("--http", "0")) as running:
        browser = Browser(page_url(running))
        assert (await browser.get("/")).status == 200
        rebound = await browser.get("/", Host="attacker.example")
        assert rebound.status == 403
        await wait_for_async(lambda: "call_refused" in running.log(), running.log)
