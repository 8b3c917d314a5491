"""Notices of clouds, over real sockets: each is told once; whatever else a server does, none is."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from email.utils import format_datetime
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from elastic.agent.notices.aws import Aws
from elastic.agent.notices.azure import Azure
from elastic.agent.notices.file import WatchedFile
from elastic.agent.notices.gcp import Gcp
from elastic.agent.notices.metadata import MetadataEndpoint
from elastic.agent.notices.slurm import Slurm
from elastic.agent.notices.source import Notice, NoticeSource
from elastic.agent.notices.watching import watch_all
from tests.metadata_server import Cloud, nobody, serving
from tests.patience import DEADLINE_S

POLL_S = 0.02
END = datetime.datetime(2031, 5, 6, 7, 8, 9, tzinfo=datetime.timezone.utc)


class Watched:
    """A source that is watched, and what it told."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.came = anyio.Event()

    def take(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.came.set()
        self.came = anyio.Event()

    async def wait_for(self, count: int) -> list[Notice]:
        """Wait until so many notices came."""
        with anyio.fail_after(DEADLINE_S):
            while len(self.notices) < count:
                await self.came.wait()
        return self.notices


@contextlib.asynccontextmanager
async def watching(*sources: NoticeSource) -> AsyncIterator[Watched]:
    watched = Watched()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_all, sources, watched.take)
        yield watched
        tasks.cancel_scope.cancel()


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def endpoint(cloud: Cloud) -> Iterator[MetadataEndpoint]:
    with serving(cloud) as listening:
        yield listening


pytestmark = pytest.mark.anyio


async def requests(cloud: Cloud, count: int, path: str = "", in_all: bool = False) -> None:
    await anyio.to_thread.run_sync(cloud.wait_for_requests, count, path, in_all)


async def test_an_aws_interruption_is_told_once_with_its_time(
    cloud: Cloud, endpoint: MetadataEndpoint
) -> None:
    async with watching(Aws(endpoint, poll_s=POLL_S)) as watched:
        await requests(cloud, 3, "instance-action")
        assert watched.notices == []
        cloud.action = json.dumps({"action": "terminate", "time": "2031-05-06T07:08:09Z"})
        await watched.wait_for(1)
        await requests(cloud, 3, "instance-action")
    assert watched.notices == [Notice("AWS spot instance-action terminate", END.timestamp())]
    assert sum("PUT" in each for each in cloud.asked) == 1, "a token lasts for hours"


async def test_a_token_that_is_refused_is_renewed(cloud: Cloud, endpoint: MetadataEndpoint) -> None:
    async with watching(Aws(endpoint, poll_s=POLL_S)) as watched:
        await requests(cloud, 1, "instance-action")
        cloud.token = "another"
        cloud.action = json.dumps({"action": "stop", "time": "2031-05-06T07:08:09Z"})
        await watched.wait_for(1)


async def test_a_recommendation_to_rebalance_is_a_source_of_its_own(
    cloud: Cloud, endpoint: MetadataEndpoint
) -> None:
    cloud.rebalance = json.dumps({"noticeTime": "2031-05-06T07:08:09Z"})
    async with watching(Aws(endpoint, poll_s=POLL_S)) as watched:
        await requests(cloud, 3, "instance-action")
        assert watched.notices == []
    async with watching(Aws(endpoint, is_rebalance=True, poll_s=POLL_S)) as watched:
        assert await watched.wait_for(1) == [Notice("AWS rebalance recommendation")]


async def test_a_gcp_preemption_is_told_as_soon_as_it_is_known(
    cloud: Cloud, endpoint: MetadataEndpoint
) -> None:
    async with watching(Gcp(endpoint, retry_s=POLL_S)) as watched:
        await requests(cloud, 1, "preempted?wait", in_all=True)
        cloud.set_value("preempted", "TRUE")
        assert await watched.wait_for(1) == [Notice("GCP preempts this machine", within_s=30.0)]


@pytest.mark.parametrize(
    ("event", "reasons"),
    [
        ("MIGRATE_ON_HOST_MAINTENANCE", []),
        ("TERMINATE_ON_HOST_MAINTENANCE", ["GCP host maintenance ends this machine"]),
    ],
)
async def test_maintenance_is_a_notice_only_if_it_ends_the_machine(
    cloud: Cloud, endpoint: MetadataEndpoint, event: str, reasons: list[str]
) -> None:
    async with watching(Gcp(endpoint, wait_s=1, retry_s=POLL_S)) as watched:
        await requests(cloud, 1, "maintenance-event?wait", in_all=True)
        cloud.set_value("maintenance-event", event)
        await requests(cloud, 2, "maintenance-event?wait")
        assert [notice.reason for notice in watched.notices] == reasons


async def test_an_azure_event_counts_if_it_names_this_machine_and_ends_it(
    cloud: Cloud, endpoint: MetadataEndpoint
) -> None:
    def event(number: int, kind: str, machine: str) -> dict[str, object]:
        return {
            "EventId": f"E{number}", "EventType": kind, "ResourceType": "VirtualMachine",
            "Resources": [machine], "EventStatus": "Scheduled",
            "NotBefore": format_datetime(END, usegmt=True),
        }  # fmt: skip

    cloud.events = [event(1, "Freeze", "vm-7"), event(2, "Preempt", "vm-8")]
    async with watching(Azure(endpoint, poll_s=POLL_S)) as watched:
        await requests(cloud, 3, "scheduledevents")
        assert watched.notices == []
        cloud.events = [*cloud.events, event(3, "Preempt", "vm-7")]
        await watched.wait_for(1)
        await requests(cloud, 2, "scheduledevents")
    assert watched.notices == [Notice("Azure scheduled event Preempt", END.timestamp())]


CLOUDS: dict[str, Callable[[MetadataEndpoint], NoticeSource]] = {
    "aws": lambda endpoint: Aws(endpoint, poll_s=POLL_S),
    "gcp": lambda endpoint: Gcp(endpoint, wait_s=1, retry_s=POLL_S),
    "azure": lambda endpoint: Azure(endpoint, poll_s=POLL_S),
}


def take_machine(cloud: Cloud) -> None:
    cloud.action = json.dumps({"action": "terminate", "time": "2031-05-06T07:08:09Z"})
    cloud.set_value("preempted", "TRUE")
    cloud.events = [{"EventId": "E", "EventType": "Preempt", "Resources": ["vm-7"]}]


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("mood", ["500", "redirect", "garbage", "endless", "portal"])
async def test_a_server_that_talks_nonsense_is_asked_again_and_believed_when_it_is_well(
    cloud: Cloud, endpoint: MetadataEndpoint, name: str, mood: str
) -> None:
    cloud.set_mood(mood)
    async with watching(CLOUDS[name](endpoint)) as watched:
        await requests(cloud, 3)
        assert watched.notices == []
        take_machine(cloud)
        cloud.set_mood("")
        await watched.wait_for(1)


@pytest.mark.parametrize("mood", ["hang", "drip"])
async def test_a_question_to_a_server_that_hangs_ends_in_time(
    cloud: Cloud, endpoint: MetadataEndpoint, mood: str
) -> None:
    cloud.set_mood(mood)
    assert await endpoint.request("/latest/api/token", timeout_s=0.3) is None


@pytest.mark.parametrize("name", CLOUDS)
async def test_where_nobody_listens_nothing_is_told_and_nothing_fails(name: str) -> None:
    async with watching(CLOUDS[name](nobody())) as watched:
        with anyio.move_on_after(0.3):
            await watched.wait_for(1)
        assert watched.notices == []


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", '"x"', "{}", '{"action": "terminate"}', '{"action": 7, "time": 8}',
     '{"action": "terminate", "time": "soon"}', "<html>sign in</html>"],
)  # fmt: skip
async def test_an_aws_answer_that_is_no_notice_is_none(
    cloud: Cloud, endpoint: MetadataEndpoint, text: str
) -> None:
    cloud.action = text
    async with watching(Aws(endpoint, poll_s=POLL_S)) as watched:
        await requests(cloud, 3, "instance-action")
        assert watched.notices == []


# ---------------------------------------------------------------- without a server


Looks = Callable[[int], Awaitable[None]]


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Wait until files were looked at so often: what is there at the first look is no news."""
    polled, look = threading.Semaphore(0), WatchedFile._text

    def counted(self: WatchedFile) -> str | None:
        text = look(self)
        polled.release()
        return text

    async def polls(count: int) -> None:
        with anyio.fail_after(DEADLINE_S):
            for _ in range(count):
                await anyio.to_thread.run_sync(polled.acquire, abandon_on_cancel=True)

    monkeypatch.setattr(WatchedFile, "_text", counted)
    return polls


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("", Notice("the notice file appeared")),
        ('{"deadline_s": 12, "reason": "rack power"}', Notice("rack power", within_s=12)),
        ('{"deadline_s": -3}', Notice("the notice file appeared")),
        ('{"deadline_s": "NaN", "reason": 4}', Notice("the notice file appeared")),
        ("maintenance\nat noon", Notice("maintenance at noon")),
    ],
)
async def test_a_file_that_appears_is_a_notice(
    tmp_path: Path, polls: Looks, text: str, notice: Notice
) -> None:
    path = tmp_path / "notice"
    async with watching(WatchedFile(path, poll_s=POLL_S)) as watched:
        await polls(2)
        partial = tmp_path / "partial"
        partial.write_text(text)
        partial.rename(path)
        assert await watched.wait_for(1) == [notice]


async def test_a_file_of_an_earlier_life_is_no_notice_until_it_changes(
    tmp_path: Path, polls: Looks
) -> None:
    path = tmp_path / "notice"
    path.write_text("old")
    async with watching(WatchedFile(path, poll_s=POLL_S)) as watched:
        await polls(4)
        assert watched.notices == []
        path.write_text("new")
        assert (await watched.wait_for(1))[0].reason == "new"


async def test_an_annotation_of_kubernetes_is_a_notice(tmp_path: Path, polls: Looks) -> None:
    path = tmp_path / "annotations"
    path.write_text('team="vision"\n')
    async with watching(WatchedFile(path, is_annotations=True, poll_s=POLL_S)) as watched:
        await polls(2)
        assert watched.notices == []
        partial = tmp_path / "partial"
        partial.write_text('team="vision"\nelastic-torch/drain="45s"\n')
        partial.rename(path)
        assert (await watched.wait_for(1))[0].within_s == 45


async def wait_until_caught(number: int) -> None:
    """Wait until the signal no longer ends this process."""
    with anyio.fail_after(DEADLINE_S):
        while signal.getsignal(number) is signal.SIG_DFL:  # noqa: ASYNC110 - nobody tells.
            await anyio.sleep(0.01)


async def test_slurms_signal_is_a_notice_each_time() -> None:
    async with watching(Slurm("77")) as watched:
        await wait_until_caught(signal.SIGUSR1)
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR1)
            notices = await watched.wait_for(count)
    assert notices == [Notice("SIGUSR1 of SLURM job 77")] * 2


async def test_the_end_of_a_slurm_job_is_told_in_good_time() -> None:
    end_s = time.time() + 60.2
    async with watching(Slurm("77", end_s, lead_s=60)) as watched:
        (notice,) = await watched.wait_for(1)
    assert notice == Notice("the time of SLURM job 77 is nearly over", end_s)
    assert time.time() >= end_s - 60.05


class Growing:
    """A file that says more at each look, and then no more."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def open(self, **options: Any) -> io.StringIO:
        return io.StringIO(self.texts.pop(0) if len(self.texts) > 1 else self.texts[0])


async def test_a_notice_is_read_when_its_writer_is_done() -> None:
    said = '{"deadline_s": 120, "reason": "upgrade"}'
    file = Growing("old", "", said[:5], said)
    async with watching(WatchedFile(cast("Path", file), poll_s=POLL_S)) as watched:
        assert await watched.wait_for(1) == [Notice("upgrade", within_s=120.0)]
