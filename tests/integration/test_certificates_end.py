"""Certificates that are revoked or expire while their owners talk; training goes on meanwhile."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import grpc.aio
import pytest

from elastic.coord.certs import Wanted, issue
from elastic.coord.roles import Role
from elastic.core.messages import Hello, Welcome
from elastic.core.world import WorkerPhase
from elastic.errors import NotAuthorized
from elastic.runtime.access import Access, find_access
from elastic.runtime.rpc import call_metadata, open_channel
from elastic.runtime.stream import ClientStream, open_stream
from elastic.testing.chaos_jobs import chaos_job
from elastic.testing.local_cluster import LocalCluster
from elastic.wire.codec_stream import (
    ATTACH_METHOD,
    decode_coordinator_message,
    encode_agent_message,
)
from tests.integration.coordinator import DEADLINE_S, Coordinator, elastic_coord, node
from tests.integration.locked import authority, call, certificate, wait_audited

LIST, WATCH = "/elastic.v1.Jobs/List", "/elastic.v1.Jobs/Watch"
DAY_S = 86_400
ENDS_S = 10.0
"""Until what has expired holds nothing open, on a machine that does other work besides."""


class Mutual:
    """A coordinator that asks for certificates, and takes down what it refuses."""

    def __init__(self, folder: Path) -> None:
        self.pki = authority(folder / "pki")
        self.audit = folder / "audit.jsonl"
        args = ("--tls-dir", str(self.pki / "coordinator"), "--audit-log", str(self.audit))
        self.coordinator = Coordinator(folder / "c", args=args)

    @property
    def address(self) -> str:
        return self.coordinator.address

    def revoke(self, which: str) -> None:
        done = elastic_coord("certs", "revoke", str(self.pki), which)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def mutual(tmp_path: Path) -> Iterator[Mutual]:
    made = Mutual(tmp_path)
    with made.coordinator:
        yield made


@asynccontextmanager
async def attached(address: str, name: str, access: Access) -> AsyncIterator[ClientStream]:
    """Give the stream of an agent that was welcomed."""
    stream = await open_stream(address, ATTACH_METHOD, access=access, timeout_s=DEADLINE_S)
    try:
        await stream.write(encode_agent_message(Hello(node(name))))
        with anyio.fail_after(DEADLINE_S):
            while (data := await stream.read()) is not None:
                if isinstance(decode_coordinator_message(data), Welcome):
                    break
        yield stream
    finally:
        await stream.close()


async def end_of(stream: ClientStream) -> str:
    """Read on until the coordinator ends a stream, and return why."""

    async def read_all() -> None:
        while await stream.read() is not None:
            pass

    with anyio.fail_after(DEADLINE_S), pytest.raises(NotAuthorized) as ended:
        await read_all()
    return str(ended.value)


async def refusal_of(channel: grpc.aio.Channel) -> str:
    """Return why a call on a connection that stands is refused, "" if it is not."""
    try:
        await channel.unary_unary(LIST)(b"", metadata=call_metadata(), timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    return ""


async def wait_refused(channel: grpc.aio.Channel) -> str:
    """Call until the coordinator has read the list, and return what it says."""
    with anyio.fail_after(DEADLINE_S):
        while not (why := await refusal_of(channel)):  # noqa: ASYNC110 (nothing tells of it)
            await anyio.sleep(0.05)
    return why


@pytest.mark.anyio
async def test_a_revoked_certificate_ends_its_stream_and_opens_nothing_on_its_connection(
    mutual: Mutual,
) -> None:
    gone = certificate(mutual.pki, "gone", Role.NODE)
    stays = certificate(mutual.pki, "stays", Role.NODE)
    bob = certificate(mutual.pki, "bob", Role.READ)
    async with (
        attached(mutual.address, "gone", gone) as stream,
        attached(mutual.address, "stays", stays) as other,
        open_channel(mutual.address, bob) as channel,
    ):
        assert await refusal_of(channel) == ""
        mutual.revoke("gone")
        ended = await end_of(stream)
        assert "was revoked" in ended
        assert "certs issue ... --name gone --role node" in ended
        mutual.revoke("bob")
        line = await wait_audited(
            mutual.audit, action="certificate revoked", who="the list of revoked certificates"
        )
        assert line["fields"]["what"].startswith("certificate ")
        assert "was revoked" in await wait_refused(channel)
        with pytest.raises(NotAuthorized, match="was revoked"):
            async with attached(mutual.address, "gone", gone):
                pass
        with anyio.move_on_after(1.0) as waiting:
            await other.read()
        assert waiting.cancelled_caught, "nothing was said to who is still welcome"
        renewed = certificate(mutual.pki, "gone", Role.NODE)
        async with attached(mutual.address, "gone", renewed):
            pass


@pytest.mark.anyio
async def test_a_coordinator_that_starts_later_knows_who_was_locked_out(tmp_path: Path) -> None:
    made = Mutual(tmp_path)
    bob = certificate(made.pki, "bob", Role.READ)
    made.revoke("bob")
    with made.coordinator:
        outcome = await call(made.address, LIST, access=bob)
        assert (outcome.code, "was revoked" in outcome.details) == ("UNAUTHENTICATED", True)


@pytest.mark.anyio
async def test_a_certificate_that_expires_ends_the_stream_that_it_opened(mutual: Mutual) -> None:
    until_s = 4.0
    now = datetime.datetime.now(datetime.timezone.utc)
    made = issue(mutual.pki, Wanted(name="brief", role=Role.NODE, days=until_s / DAY_S), now)
    brief = find_access(folder=str(made))
    async with attached(mutual.address, "brief", brief) as stream:
        ended = await end_of(stream)
    late_s = (datetime.datetime.now(datetime.timezone.utc) - now).total_seconds() - until_s
    assert late_s < ENDS_S
    assert "has expired" in ended
    assert "certs issue" in ended
    assert (await call(mutual.address, LIST, access=brief)).code == "UNAVAILABLE"


@pytest.mark.timeout(400)
def test_an_agent_whose_certificate_is_revoked_trains_on_and_comes_back_with_a_new_one(
    tmp_path: Path,
) -> None:
    pki = authority(tmp_path / "pki")
    certificate(pki, "n1", Role.NODE)
    with LocalCluster(nodes=1, directory=tmp_path / "cluster", tls_dir=pki) as cluster:
        job = chaos_job("steps", "revoked", workers=1, directory=tmp_path)
        job_id = cluster.submit(job.spec)
        cluster.wait(
            job_id,
            lambda v: any(w.report.phase is WorkerPhase.TRAINING and w.steps for w in v.workers),
            "training",
        )
        pids = cluster.worker_pids(job_id)
        assert elastic_coord("certs", "revoke", str(pki), "n1").returncode == 0
        wait_logged(cluster, "n1", "was revoked")
        cluster.wait(job_id, lambda v: not v.workers, "the coordinator to have let it go")
        assert cluster.agents["n1"].poll() is None
        certificate(pki, "n1", Role.NODE)
        cluster.wait(
            job_id,
            lambda v: any(w.report.phase is WorkerPhase.TRAINING and w.steps for w in v.workers),
            "training with a new certificate",
        )
        assert cluster.worker_pids(job_id) == pids
        job.finish.touch()
        view = cluster.wait(job_id, lambda v: not v.workers, "the end")
        assert job.check(view)


def wait_logged(cluster: LocalCluster, name: str, text: str) -> None:
    """Wait until a process has logged this."""
    cluster._until(lambda: text in cluster.log_of(name), f"{text!r} in the log of {name}")
