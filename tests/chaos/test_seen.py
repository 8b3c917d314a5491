"""What people see of a run with two kills: where time went, what happened, who printed what."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from elastic.core.config import JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, JobPhase
from elastic.core.telemetry import CATEGORIES
from elastic.core.view import JobView
from elastic.storage.events import read_events
from elastic.testing.local_cluster import LocalCluster
from tests.chaos import seen_job
from tests.chaos.shared import train_with

WORKERS = 3
STEP_S = 0.1
"""A step takes less, also on a slow machine."""


def submitted(cluster: LocalCluster, folder: Path) -> str:
    entry = Entry(EntryKind.SCRIPT, seen_job.__file__, args=(str(folder),))
    return cluster.submit(
        JobSpec(
            job_id=JobId(""), name="seen", entry=entry, min_workers=1, max_workers=WORKERS,
            run_path=str(folder / "run"),
        )
    )  # fmt: skip


def kill(cluster: LocalCluster, job_id: str, rank: int) -> str:
    """Kill a worker while all of them train, and wait until they do again; return who it was."""
    view = cluster.wait(job_id, lambda one: train_with(WORKERS, one), "all to train")
    victim = next(worker for worker in view.workers if worker.rank == rank)
    os.kill(victim.report.pid, signal.SIGKILL)
    generation = view.record.generation

    def goes_on(one: JobView) -> bool:
        return one.record.generation > generation and train_with(WORKERS, one)

    cluster.wait(job_id, goes_on, "all to train again")
    return str(victim.report.worker_id)


def elastic(cluster: LocalCluster, *words: str) -> str:
    """Return what a command of `elastic` prints."""
    command = [sys.executable, "-m", "elastic.client.cli", "--coord", cluster.address, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_run_with_two_kills_tells_all_of_it(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = submitted(cluster, tmp_path)
    killed = [kill(cluster, job_id, rank) for rank in (1, 0)]

    # While it trains: how fast, and who. A first sample has no rate yet.
    cluster.wait(
        job_id, lambda view: view.telemetry.per_second(view.telemetry.steps) > 0, "a rate of steps"
    )
    shown = json.loads(elastic(cluster, "status", job_id, "--json"))
    assert shown["telemetry"]["steps_per_s"] > 0
    assert {worker["rank"] for worker in shown["workers"]} == set(range(WORKERS))
    assert "seen" in elastic(cluster, "top", "--once")

    # Where ranks stand, and where one of them spends its time.
    assert "main (" in elastic(cluster, "stack", job_id, "--rank", "0")
    path = elastic(cluster, "profile", job_id, "--rank", "1", "--seconds", "1").strip()
    profile = json.loads(Path(path).read_text())
    main, frames = profile["profiles"][0], profile["shared"]["frames"]
    assert main["name"] == "MainThread"
    assert seen_job.__file__ in {frames[place]["file"] for one in main["samples"] for place in one}

    (tmp_path / "finish").touch()
    ended = cluster.wait(
        job_id, lambda view: view.record.phase is JobPhase.SUCCEEDED and not view.workers, "the end"
    )

    # Where time went: all that was allocated, as the moments of the workers' events say it.
    events = [
        json.loads(line) for line in elastic(cluster, "events", job_id, "--json").splitlines()
    ]
    began, held_ns = {}, 0
    for event in events:
        worker = event["fields"].get("worker")
        if event["event"] == "worker_starting":
            began[worker] = event["time_unix_ns"]
        elif event["event"] == "worker_gone":
            held_ns += event["time_unix_ns"] - began.pop(worker)
    assert not began
    goodput = ended.record.goodput
    assert ended.unreported_ns == 0
    assert abs(goodput.allocated_ns - held_ns) <= WORKERS * STEP_S * 1e9
    assert goodput.productive_ns > 0
    assert goodput.start_ns > 0
    assert goodput.reform_ns > 0
    told = json.loads(elastic(cluster, "status", job_id, "--json"))["goodput"]
    assert set(told["seconds"]) == set(CATEGORIES)
    assert abs(sum(told["seconds"].values()) - told["allocated_s"]) < 1e-3

    # What happened: each kill, and how long training stood still for it.
    gone = [one["fields"] for one in events if one["event"] == "worker_gone"]
    assert [one["worker"] for one in gone if "SIGKILL" in one["cause"]] == killed
    after = [one["fields"] for one in events if "lost" in one["fields"]]
    assert [one["lost"].partition(" ")[0] for one in after] == killed
    assert all(0 < float(one["pause_s"]) < 30 for one in after)
    assert len({one["time_unix_ns"] for one in events}) == len(events)
    stored = read_events(str(tmp_path / "run"))
    assert [e["fields"]["worker"] for e in stored if e["event"] == "worker_gone"][:2] == killed
    assert Counter(e["time_unix_ns"] for e in stored).most_common(1)[0][1] == 1

    # Who printed what: each line once, also of those who were killed.
    written = Counter(
        line
        for path in tmp_path.glob("*.lines")
        for line in path.read_text().splitlines()
        if re.fullmatch(r"printed \d+ \d+", line)
    )
    chunks = [json.loads(line) for line in elastic(cluster, "logs", job_id, "--json").splitlines()]
    lines = [line for chunk in chunks for line in chunk["text"].splitlines()]
    printed = Counter(line for line in lines if line.startswith("printed "))
    assert set(printed.values()) == {1}
    missing = sorted(written - printed)
    assert not missing, f"{missing[:9]} of {len(missing)}"
    assert len(printed - written) <= len(killed)  # Printed, and killed before it was written down.
    moments = [chunk["unix_ns"] for chunk in chunks if chunk["unix_ns"]]
    assert moments == sorted(moments)
    assert {chunk["generation"] for chunk in chunks} >= {1, ended.record.generation}
    mine = elastic(cluster, "logs", job_id, "--rank", "1", "--grep", "printed").splitlines()
    assert mine
    assert all(line.startswith("printed ") for line in mine)
