"""Effects and the view, one line each: what the transcripts show.

Rule: nothing that an effect carries is left out if a coordinator could get it wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic.core.config import NS_PER_S
from elastic.core.events.coordinator import (
    CloseSession,
    CoordinatorEffect,
    Forget,
    Persist,
    PersistNodes,
    Reply,
    SendAgent,
)
from elastic.core.facts import ReportKind, SessionId
from elastic.core.messages import (
    Announce,
    CoordinatorMessage,
    Drain,
    DumpStacks,
    ForgetWorker,
    LeaveGroup,
    Preemption,
    Probe,
    Refusal,
    Release,
    ReportAck,
    SaveState,
    StartWorker,
    StopWorker,
    TryLinks,
    Welcome,
)
from elastic.core.records import JobRecord
from elastic.core.view import ClusterView


def lines_of(effect: CoordinatorEffect, names: Mapping[SessionId, str]) -> Iterator[str]:
    """Return an effect as lines; `names` tells which node a session belongs to."""
    if isinstance(effect, Persist):
        for record in effect.records:
            yield f"persist {record.spec.job_id}: {record_line(record)}"
    elif isinstance(effect, PersistNodes):
        cordons = [f"{cordon.node_id}={quoted(cordon.reason)}" for cordon in effect.record.cordons]
        yield f"persist nodes: cordoned {' '.join(cordons) or 'none'}"
    elif isinstance(effect, Forget):
        yield f"forget {' '.join(effect.job_ids)}"
    elif isinstance(effect, SendAgent):
        yield f"{names[effect.session]} <- {message_line(effect.message)}"
    elif isinstance(effect, CloseSession):
        yield f"close {names[effect.session]}: {effect.reason}"
    elif isinstance(effect, Reply):
        yield f"reply {effect.error or 'ok'}: {effect.text}"
    else:
        fields = " ".join(f"{name}={quoted(value)}" for name, value in effect.fields)
        yield " ".join(part for part in ("note", effect.name, effect.job_id, fields) if part)


def quoted(value: str) -> str:
    """Return a value as the event log prints it: in quotes if it has spaces."""
    return f'"{value}"' if " " in value else value


def record_line(record: JobRecord) -> str:
    """Return what becomes durable of a job."""
    parts = [record.phase.value, f"g{record.generation}"]
    if record.group:
        parts.append(f"[{' '.join(record.group.worker_ids())}]")
    if record.checkpoints:
        parts.append(f"checkpoints={','.join(c.path for c in record.checkpoints)}")
    if record.paused:
        parts.append("wanted paused")
    if record.is_save_requested:
        parts.append("told to save" + (f" for {record.leaves_for}" if record.leaves_for else ""))
    if record.min_workers or record.max_workers:
        parts.append(f"bounds={record.min_workers}-{record.max_workers}")
    counted = ("failures", "losses", "failed_worker", "result")
    values = {name: getattr(record, name) for name in counted}
    parts += [f"{name}={quoted(str(value))}" for name, value in values.items() if value]
    return " ".join(parts)


def message_line(message: CoordinatorMessage) -> str:
    """Return what an agent is told."""
    if isinstance(message, Announce):
        told = message.assignment
        checkpoint = f", checkpoint {told.reported_checkpoint}" if told.reported_checkpoint else ""
        return (
            f"announce {told.worker_id} g{told.generation}: rank {told.rank} of "
            f"{told.world_size}, leader {told.leader_address}, cause {told.cause}{checkpoint}"
        )
    if isinstance(message, SaveState):
        return f"save {message.worker_id} g{message.generation}: wish {message.request}"
    if isinstance(message, Preemption):
        left = " ".join(f"{node.node_id} (ranks {list(node.ranks)})" for node in message.nodes)
        within = f"{message.timeout_ns / NS_PER_S:g}s"
        return (
            f"preemption {message.worker_id} g{message.generation} within {within}: {left}, "
            f"{message.reason}"
        )
    if isinstance(message, LeaveGroup):
        when = "at a boundary" if message.at_boundary else "at once"
        when += ", saved" if message.saves else ""
        return f"leave {message.worker_id} g{message.generation} {when}: {message.reason}"
    if isinstance(message, StartWorker):
        return f"start {message.worker_id} of {message.spec.job_id}"
    if isinstance(message, StopWorker):
        grace = f"{message.grace_ns / NS_PER_S:g}s"
        asked = ", script asked" if message.asks else ""
        return f"stop {message.worker_id} within {grace}{asked}: {message.reason}"
    if isinstance(message, ForgetWorker):
        return f"forget {message.worker_id}"
    if isinstance(message, ReportAck):
        answer = "accepted" if message.accepted else f"refused: {message.reason}"
        kind = "" if message.kind is ReportKind.SCRIPT else f"{message.kind.value} "
        return f"{kind}report {message.index} of {message.worker_id} g{message.generation} {answer}"
    if isinstance(message, Probe):
        return f"probe {message.number}"
    if isinstance(message, TryLinks):
        return f"try links of {message.job_id}: {' '.join(k.node_id for k in message.links)}"
    if isinstance(message, DumpStacks):
        return f"stacks of {message.worker_id}: {message.reason}"
    if isinstance(message, Drain):
        return f"drain within {message.timeout_ns / NS_PER_S:g}s: {message.reason}"
    if isinstance(message, Release):
        return f"release: {message.reason}"
    if isinstance(message, Refusal):
        return f"refusal{' for good' if message.final else ''}: {message.reason}"
    assert isinstance(message, Welcome), message
    return "welcome"


def status_lines(view: ClusterView) -> Iterator[str]:
    """Return all that status shows, without times."""
    for shown in view.nodes:
        free = f"{shown.free_slots} of {shown.node.num_slots} slots free"
        reason = f" ({shown.reason})" if shown.reason else ""
        yield f"node {shown.node.node_id} {shown.phase.value}{reason}, {free}"
    for job in view.jobs:
        record = job.record
        yield f"job {record.spec.job_id} {record.phase.value} g{record.generation}: {job.reason}"
        if record.failure:
            yield f"  failure in {record.failed_worker}: {record.failure.traceback}"
        for worker in job.workers:
            report = worker.report
            rank = f"rank {worker.rank}" if worker.rank >= 0 else "no rank"
            where = f"g{report.generation}" if report.generation else "no group"
            yield f"  {report.worker_id} {rank}, {report.phase.value} in {where}"
