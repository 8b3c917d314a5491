"""What the tests of the client and of the command share: a coordinator, agents that play a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.from_thread
from click.testing import CliRunner, Result

from elastic.client.cli import main
from elastic.client.jobs import Client
from elastic.core.facts import ExitCause, ExitKind, Failure, JobPhase, WorkerPhase, WorkerReport
from elastic.core.messages import FollowLogs, LogLines, Report, Reported, StopWorker, WorkerUpdate
from elastic.core.view import JobView
from tests.integration.coordinator import Coordinator, ScriptedAgent, node
from tests.patience import DEADLINE_S, wait_for


def stop_all(address: str) -> None:
    """Stop what a test has left running."""
    with Client(address) as client:
        for job in client.list(include_ended=False):
            client.stop(job.record.spec.job_id)


def elastic(coordinator: Coordinator, *args: object, **env: str) -> Result:
    line = ["-c", coordinator.address, *map(str, args)]
    return CliRunner().invoke(main, line, env=env)


def wait_phase(client: Client, job: str, phase: JobPhase) -> JobView:
    def holds() -> JobView | None:
        view = client.get(job)
        return view if view.record.phase is phase else None

    view: JobView = wait_for(holds, f"job {job} to be {phase.value}")
    return view


@contextmanager
def playing(
    address: str, node_id: str, *, failure: Failure | None = None, checkpoint: str = ""
) -> Iterator[Any]:
    """In the background, an agent whose worker trains, reports, prints and ends."""
    with anyio.from_thread.start_blocking_portal() as portal:
        played = portal.start_task_soon(play, address, node_id, failure, checkpoint)
        yield played
        played.result(DEADLINE_S)


async def play(address: str, node_id: str, failure: Failure | None, checkpoint: str) -> None:
    """Be an agent with one worker, from its start to its end."""
    async with ScriptedAgent(address, node(node_id, slots=1)) as agent:
        await agent.join()
        report = await agent.train()
        wish = await agent.hear(FollowLogs)
        worker_id = report.worker_id
        await agent.say(LogLines(wish.follow_id, worker_id, "hello from the worker\n"))
        told = Report(
            worker_id, report.job_id, report.generation, 0, 0, '{"loss": 0.5}', checkpoint
        )
        await agent.say(Reported(told))
        if failure is None:
            finished = replace(report, phase=WorkerPhase.FINISHED, result='"done"')
            await agent.say(WorkerUpdate(finished))
            await agent.hear(StopWorker)
            gone = ended(finished, ExitCause(ExitKind.STOPPED))
        else:
            text = f"{failure.traceback}\n"  # As print() writes it.
            await agent.say(LogLines(wish.follow_id, worker_id, text))
            gone = ended(replace(report, failure=failure), ExitCause(ExitKind.CODE, 1))
        await agent.say(WorkerUpdate(gone))
        await agent.say(LogLines(wish.follow_id, worker_id, "goodbye\n"))
        await agent.say(LogLines(wish.follow_id, worker_id, "", end=True))
        with anyio.move_on_after(1.0):  # Whoever follows has all of it before the stream ends.
            await agent.end()


def ended(report: WorkerReport, cause: ExitCause) -> WorkerReport:
    return replace(report, phase=WorkerPhase.EXITED, exit=cause)
