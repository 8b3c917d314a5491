"""The command `elastic events`: the events of a job, their causes, and pauses in training.

Rule: an event is printed once, as a line for people or as a line of JSON, whether it comes from the
coordinator's memory or from the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click

from elastic.client.jobs import Client
from elastic.client.plain import plain
from elastic.client.terminal import ClusterTarget, output_option
from elastic.client.text_format import steps_again, workers
from elastic.core.events.shared import Note
from elastic.errors import StorageError
from elastic.runtime.eventlog import event_record, fields_text
from elastic.storage.events import read_events
from elastic.wire.codec_jobs import TimedNote

WORDS = {
    "job_submitted": "submitted for {min_workers} to {max_workers} workers",
    "worker_starting": "worker {worker} starts on {node}",
    "worker_gone": "worker {worker} (rank {rank}) {cause}",
    "group_formed": "generation {generation}: {world_size} workers ({cause}: {reason})",
    "group_training": "generation {generation} has formed within {took_ms} ms",
    "group_suspended": "generation {generation} is over: {reason}",
    "change_planned": "the group changes at the next step boundary ({cause}: {reason})",
    "waiting": "waits: {reason}",
    "checkpoint_recorded": "checkpoint {path}",
    "checkpoint_refused": "checkpoint {path} does not count: {reason}",
    "job_ended": "{phase}: {reason}",
}
"""Texts of events; others are shown by their names and fields."""


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Follow the job until it has ended.")
@output_option
@click.pass_obj
def events(target: ClusterTarget, job: str, follow: bool, output: str) -> None:
    """Show what happened to JOB (id or name): kills, new groups, drains, checkpoints, decisions.

    Each with its cause, its reason, and for how long training paused. JSON is one object a
    line.
    """
    with target.connect() as client:
        for timed in happened(client, job, follow=follow):
            line = json.dumps(as_dict(timed)) if output == "json" else event_line(timed)
            click.echo(line)


def happened(client: Client, job: str, *, follow: bool = False) -> Iterator[TimedNote]:
    """Yield the events of a job, oldest first: those of its run directory, then later ones.

    Raises:
        ElasticError: the job is not known, or the coordinator does not answer.
    """
    spec = client.get(job).record.spec
    last_ns = 0
    try:
        stored = read_events(spec.run_path) if spec.run_path else []
    except StorageError:
        stored = []  # This machine may not reach it; use the coordinator's events only.
    known = [from_dict(one) for one in stored if one["job"] == spec.job_id]
    for timed in known:
        last_ns = max(last_ns, timed.unix_ns)
        yield timed
    with client.events(spec.job_id, follow=follow) as stream:
        for timed in stream:
            if timed.unix_ns > last_ns:
                yield timed


def as_dict(timed: TimedNote) -> dict[str, Any]:
    """Return an event as one line of JSON has it, in the schema of all event logs."""
    return event_record(timed.note, timed.unix_ns, "coordinator")


def from_dict(record: dict[str, Any]) -> TimedNote:
    note = Note(record["event"], record["job"], tuple(record["fields"].items()))
    return TimedNote(note, record["time_unix_ns"])


def event_line(timed: TimedNote) -> str:
    """Return an event as text for people, with its local time."""
    moment = datetime.fromtimestamp(timed.unix_ns / 1e9).astimezone()
    return plain(f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d}  {_reported(timed)}")


def _reported(timed: TimedNote) -> str:
    name, fields = timed.note.name, dict(timed.note.fields)
    if name == "first_step":
        size = workers(int(fields.get("world_size", "0")))
        text = f"generation {fields.get('generation')}: {size} train"
        if "pause_s" in fields:
            why = fields.get("lost") or fields.get("cause", "")
            text += f" after a pause of {fields['pause_s']} s ({why})"
        return text + steps_again(fields)
    if name == "worker_gone" and fields.get("rank") == "-1":
        return f"worker {fields.get('worker')}, which was in no group, {fields.get('cause')}"
    if name in WORDS:
        try:
            return WORDS[name].format_map(fields)
        except KeyError:
            pass  # Empty fields are missing.
    return f"{name} {fields_text(timed.note.fields)}".rstrip()
