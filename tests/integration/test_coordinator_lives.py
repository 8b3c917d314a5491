"""A coordinator's lives: killed and started again, replaced, ended, and without its store."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import grpc.aio
import pytest

from elastic.client.jobs import Client
from elastic.coord.suspend_detector import POLL_S, SUSPEND_S
from elastic.core.config import CoordinatorConfig, ns
from elastic.core.facts import (
    ExitCause,
    ExitKind,
    JobPhase,
    NodePhase,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import (
    Announce,
    Coordinators,
    LeaveGroup,
    StartWorker,
    StopWorker,
    WorkerUpdate,
)
from elastic.errors import NotLeading
from elastic.runtime.rpc import error_from_rpc
from tests.integration.coordinator import (
    ROOT,
    Coordinator,
    ScriptedAgent,
    User,
    elastic_coord,
    node,
    spec,
)
from tests.patience import DEADLINE_S

pytestmark = pytest.mark.anyio


def is_phase(phase: JobPhase) -> object:
    return lambda job: job.record.phase is phase


def exited(report: WorkerReport, kind: ExitKind = ExitKind.STOPPED) -> WorkerUpdate:
    return WorkerUpdate(replace(report, phase=WorkerPhase.EXITED, exit=ExitCause(kind)))


async def test_a_restart_after_kill_adopts_what_agents_report_and_no_worker_notices(
    tmp_path: Path,
) -> None:
    store = f"sqlite:{tmp_path / 'coord.sqlite'}"
    with Coordinator(tmp_path / "c", store=store) as coordinator:
        async with (
            ScriptedAgent(coordinator.address, node("n1")) as agent,
            User(coordinator.address) as user,
        ):
            await agent.join()
            job_id = await user.submit(spec("survivor", payload=b"p" * 1_500_000, workers=(1, 2)))
            ready = [await agent.ready(), await agent.ready()]
            first, second = [await agent.form(report) for report in ready]
            running = await user.wait_job(
                job_id,
                lambda job: sum(w.report.phase is WorkerPhase.TRAINING for w in job.workers) == 2,
            )
            coordinator.kill()
            assert (await agent.end())[0] != "OK"
        generation = running.record.generation
        reports = [replace(report, generation=generation) for report in (first, second)]
        coordinator.start()
        coordinator.wait_ready()
        async with (
            ScriptedAgent(coordinator.address, node("n1")) as agent,
            User(coordinator.address) as user,
        ):
            await agent.join(*reports)
            adopted = await user.wait_job(job_id, lambda job: len(job.workers) == 2)
            assert adopted.record.phase is JobPhase.RUNNING
            assert adopted.record.generation == generation
            assert adopted.record.group == running.record.group
            # A third worker would be started with the payload, had it not been kept.
            await agent.say(exited(second, ExitKind.SIGNAL))
            started = await agent.hear(StartWorker)
            assert started.spec.entry.payload == b"p" * 1_500_000
            unasked = [
                m for m in agent.received if isinstance(m, (Announce, LeaveGroup, StopWorker))
            ]
            assert all(
                isinstance(m, Announce) and m.assignment.worker_id == first.worker_id
                for m in unasked
            )


async def wait_asleep(process: subprocess.Popen[bytes]) -> None:
    """Stop a process for so long that it will notice."""
    process.send_signal(signal.SIGSTOP)
    await anyio.sleep(2 * (SUSPEND_S + POLL_S))
    process.send_signal(signal.SIGCONT)


async def test_a_coordinator_that_was_stopped_waits_for_agents_as_after_a_restart(
    tmp_path: Path,
) -> None:
    with Coordinator(tmp_path / "c") as coordinator:
        assert coordinator.process is not None
        async with User(coordinator.address) as user:
            async with ScriptedAgent(coordinator.address, node("n1")) as agent:
                await agent.join()
                await wait_asleep(coordinator.process)
            # Its stream has ended since; twice the usual grace later it is still waited for.
            usual_ns = ns(CoordinatorConfig.node_grace_s)
            away = (NodePhase.DISCONNECTED,)
            await user.wait_node("n1", lambda n: n.phase in away and -n.since_ns > 2 * usual_ns)
            async with ScriptedAgent(coordinator.address, node("n1")) as agent:
                await agent.join()
                await user.wait_node("n1", lambda n: n.phase is NodePhase.READY)


async def test_sigterm_ends_in_order(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator:
        async with ScriptedAgent(coordinator.address, node()) as agent:
            await agent.join()
            assert await anyio.to_thread.run_sync(coordinator.kill, signal.SIGTERM) == 0
            assert (await agent.end())[0] == "OK"


def test_a_tethered_coordinator_ends_with_the_pipe(tmp_path: Path) -> None:
    theirs, ours = os.pipe()
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "elastic.coord.cli", "serve", "--listen", "127.0.0.1:0"),
            *("--store", "memory:", "--ready-file", str(ready), "--tether-fd", str(theirs)),
        ],
        cwd=ROOT,
        pass_fds=(theirs,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
        assert line.startswith("elastic-coord ready address=127.0.0.1:")
        assert line == ready.read_text()
        os.close(ours)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.etcd
async def test_a_standby_waits_and_takes_over_when_the_leader_is_killed(tmp_path: Path) -> None:
    etcd_server = pytest.importorskip("tests.etcd_server")
    if etcd_server.find_etcd() is None:
        pytest.skip("no etcd server here")
    with (
        etcd_server.EtcdServer() as etcd,
        Coordinator(tmp_path / "a", store=etcd.url()) as leader,
    ):
        listen = f"127.0.0.1:{etcd_server.free_ports(1)[0]}"
        standby = Coordinator(tmp_path / "b", store=etcd.url(), listen=listen)
        standby.start()
        try:
            await follow_the_leader(leader, standby)
        finally:
            standby.kill()


async def follow_the_leader(leader: Coordinator, standby: Coordinator) -> None:
    async with ScriptedAgent(leader.address, node("n1")) as agent, User(leader.address) as user:
        await agent.join()
        job_id = await user.submit(spec("handover", payload=b"kept"))
        report = await agent.train()
        job = await user.wait_job(job_id, is_phase(JobPhase.RUNNING))
        standby.wait_logged("standby leader=")
        assert leader.address in standby.log()
        healthy = await anyio.to_thread.run_sync(elastic_coord, "health", "--coord", standby.listen)
        assert (healthy.returncode, healthy.stdout) == (0, f"{standby.listen} STANDBY\n")
        told = await wait_reported(agent, leader.address, standby.listen)
        assert told == {leader.address, standby.listen}
        await standby_answers_reads(standby.listen, leader, job_id)
        # Told of one address only, and that one is about to be gone.
        loyal = Client(leader.address)
        assert not (await anyio.to_thread.run_sync(loyal.status)).standby
        leader.kill()
    await anyio.to_thread.run_sync(standby.wait_ready)
    with loyal:
        assert (await anyio.to_thread.run_sync(loyal.get, job_id)).record.spec.job_id == job_id
    async with ScriptedAgent(standby.address, node("n1")) as agent, User(standby.address) as user:
        await agent.join(replace(report, generation=job.record.generation))
        adopted = await user.wait_job(job_id, lambda j: len(j.workers) == 1)
        assert adopted.record.phase is JobPhase.RUNNING
        assert adopted.record.generation == job.record.generation


async def wait_reported(agent: ScriptedAgent, *addresses: str) -> set[str]:
    """Wait until an agent was told of all of these; the leader learns of a standby in a while."""
    told: set[str] = set()
    while not told.issuperset(addresses):
        told = set((await agent.hear(Coordinators)).addresses)
    return told


def term_of(coordinator: Coordinator) -> int:
    """Return the term in which it leads; its first where the store was quick enough for that."""
    return int(re.findall(r"leader name=.* term=(\d+)", coordinator.log())[-1])


async def standby_answers_reads(standby: str, leading: Coordinator, job_id: str) -> None:
    """It shows what the store holds, says so, and points those to the leader who want more."""
    leader = leading.address
    async with User(standby) as reader:
        job = await reader.get(job_id)
        assert (job.record.phase, job.record.generation) == (JobPhase.RUNNING, 1)
        assert f" at {leader} (pid " in job.reason
        assert job.reason.startswith("as of 0.")
        assert await reader.list(include_ended=False) == ["handover"]
        status = await reader.status()
        assert f" at {leader} (pid " in status.standby
        assert status.coordinators == tuple(sorted((leader, standby)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reader.stop(job_id)
    error = error_from_rpc(caught.value, standby)
    assert isinstance(error, NotLeading)
    assert (error.leader, error.term) == (leader, term_of(leading))
    # Our own client, which knows of nobody else, finds the leader.
    with Client(standby) as client:
        view = await anyio.to_thread.run_sync(client.status)
    assert view.coordinator.startswith(leader)
    assert not view.standby


@pytest.mark.etcd
async def test_a_store_that_is_away_longer_than_the_lease_only_delays(tmp_path: Path) -> None:
    etcd_server = pytest.importorskip("tests.etcd_server")
    if etcd_server.find_etcd() is None:
        pytest.skip("no etcd server here")
    with (
        etcd_server.EtcdServer() as etcd,
        Coordinator(tmp_path / "c", store=etcd.url()) as coordinator,
    ):
        address = coordinator.address
        async with User(address) as user:
            async with ScriptedAgent(address, node("n1")) as agent:
                await agent.join()
                first = await user.submit(spec("first"))
                report = await agent.train()
                await user.wait_job(first, is_phase(JobPhase.RUNNING))
                etcd.member.freeze()
                # It cannot know whether another one leads: it lets its agents look for that one.
                await agent.end()
            for _ in range(2):
                shown = await user.get(first)
                assert shown.reason.startswith("as of ")
                assert shown.record.group is not None
            etcd.member.thaw()
            # Not "leader": then it has the term, and reads what was written before it answers.
            coordinator.wait_logged("elastic-coord ready", times=2)
            async with ScriptedAgent(address, node("n1")) as agent:
                await agent.join(replace(report, generation=1))
                adopted = await user.wait_job(first, lambda job: len(job.workers) == 1)
                assert (adopted.record.phase, adopted.record.generation) == (JobPhase.RUNNING, 1)
        assert "leads_no_more" in coordinator.log()
        assert coordinator.kill(signal.SIGTERM) == 0
