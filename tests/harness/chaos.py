"""Real processes under faults that a seed draws: whatever is killed, the job ends right.

    python -m tests.harness.chaos --kills 1200 --every 2
    python -m tests.harness.chaos --seed 7 --events 20 --every 2
    python -m tests.harness.chaos --job epochs --seeds 50
    python -m tests.harness.chaos --job wide --width 5000 --kills 200 --every 4

A small cluster trains while workers, agents, nodes and the coordinator are killed and stopped,
nodes drain and come back: half of the faults within 300 ms of the one before. Then all is healed.
The job `steps` trains in a loop over `train.epochs()`: its weights and optimizer state must have
the SHA-256 of a run that nobody disturbed, and every sample must count once in every epoch. The
job `wide` does the same with as many parameters as asked for, and checksums. The job `epochs` is
called again at each change, goes on from checkpoints, and must have counted every epoch once; it
also survives the loss of everybody.

Rule: a seed draws what is done, to whom and when; what the machine makes of it differs from run
to run, so that a seed which failed may have to be run several times to fail again.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

from elastic.core.facts import ENDED
from elastic.core.view import JobView
from elastic.errors import ElasticError
from elastic.testing.local_cluster import LocalCluster, start_of
from tests.harness.breaking import Breaker
from tests.harness.chaos_jobs import ChaosFailed, ChaosJob, Verdict, chaos_job
from tests.harness.traces import end_references

BURST_S = 0.3
WEIGHTS = {
    "kill_worker": 4.0,
    "kill_all_workers": 0.5,
    "stop_worker": 1.0,
    "kill_spare": 1.0,
    "kill_agent": 2.0,
    "stop_agent": 1.0,
    "kill_node": 2.0,
    "kill_all_agents": 0.3,
    "kill_coordinator": 2.0,
    "drain": 1.0,
    "start_node": 2.0,
}
"""How often each fault is drawn."""
NEVER = sys.maxsize
LOSSES = ("kill_worker", "stop_worker", "kill_agent", "stop_agent", "kill_node")
"""Faults after which a group of survivors goes on, so that there is a recovery to measure."""
STEADY_S = 5.0
"""How long the full group is watched before the first fault, for the pace of a quiet run."""


@dataclass(frozen=True)
class Fault:
    """One thing to break.

    Attributes:
        pause_s: since the one before.
        kind: a name of `WEIGHTS`.
        draw: says to whom, and for how long: from 0 to 1.
    """

    pause_s: float
    kind: str
    draw: float


@dataclass(frozen=True)
class Outcome:
    """What a run showed.

    Attributes:
        faults: what was done, in order; those without a victim are left out.
        verdict: how the job ended.
        generations: groups that were formed.
        recoveries_s: from each loss of a member to the end of the next group's first step.
        goodput: epochs per second under faults, in parts of those before the first one; 0 if
            that cannot be told.
    """

    faults: tuple[str, ...]
    verdict: Verdict
    generations: int
    recoveries_s: tuple[tuple[str, float], ...]
    goodput: float


def draw_faults(seed: int, events: int, every_s: float) -> list[Fault]:
    """Draw a schedule; half of the faults come within 300 ms of the one before."""
    rng = random.Random(seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    faults = []
    for _ in range(events):
        pause_s = rng.uniform(0, BURST_S) if rng.random() < 0.5 else rng.expovariate(1 / every_s)
        kind = rng.choices(kinds, weights)[0]
        faults.append(Fault(min(pause_s, 4 * every_s), kind, rng.random()))
    return faults


def draw_kills(seed: int, kills: int, every_s: float) -> list[Fault]:
    """Draw so many kills of one worker, one every `every_s` seconds."""
    rng = random.Random(seed)
    return [Fault(every_s, "kill_worker", rng.random()) for _ in range(kills)]


class Chaos:
    """One run on one cluster."""

    def __init__(self, cluster: LocalCluster, job: ChaosJob) -> None:
        """Describe the run; the cluster is up, with all its nodes."""
        self._cluster = cluster
        self._job = job

    def run(self, faults: list[Fault]) -> Outcome:
        """Break what the faults say, heal all, and check how the job ended.

        Raises:
            ChaosFailed: it did not end right; says how.
        """
        cluster, job = self._cluster, self._job
        job_id = cluster.submit(job.spec)
        view = cluster.wait(job_id, self._has_begun, "the full group's first report")
        if view.record.phase in ENDED:
            job.check(view)
        breaker = Breaker(cluster, job_id)
        time.sleep(STEADY_S)
        began_ns = time.time_ns()
        done = self._strike_all(breaker, faults)
        over_ns = time.time_ns()
        breaker.heal()
        job.finish.touch()
        view = cluster.wait(job_id, lambda v: v.record.phase in ENDED, "the end")
        verdict = job.check(view)
        check_processes(breaker.seen_processes())
        check_logs(cluster)
        return Outcome(
            faults=tuple(kind for kind, _, _ in done),
            verdict=verdict,
            generations=view.record.generation,
            recoveries_s=tuple(recoveries(cluster, done)),
            goodput=goodput(cluster, began_ns, over_ns) if job.counts_epochs_once else 0.0,
        )

    def _strike_all(self, breaker: Breaker, faults: list[Fault]) -> list[tuple[str, int, int]]:
        # The end itself is broken into as well: the last faults come while the job may finish.
        finish_at = len(faults) - int(faults[-1].draw * 3) if faults else 0
        done = []
        for index, fault in enumerate(faults):
            time.sleep(fault.pause_s)
            if index == finish_at:
                self._job.finish.touch()
            if not self._job.survives(fault.kind, breaker.size):
                continue
            # A group without survivors starts anew, which is no recovery.
            generation = breaker.generation if breaker.size > 1 else NEVER
            began_ns = time.time_ns()
            if breaker.strike(fault.kind, fault.draw):
                done.append((fault.kind, began_ns, generation))
        return done

    def _has_begun(self, view: JobView) -> bool:
        """Return whether all that can be there train and have reported, or never will."""
        if view.record.phase in ENDED:
            return True
        group = view.record.group
        is_full = group is not None and len(group.members) == self._job.spec.max_workers
        return bool(view.record.metrics) and is_full


# ---------------------------------------------------------------- what must hold in the end


def check_processes(seen: dict[int, str]) -> None:
    """Wait until no worker of the job is left.

    Args:
        seen: pids of all that there were, and when each was started.

    Raises:
        ChaosFailed: some stay.
    """
    deadline = time.monotonic() + 10
    while left := [pid for pid, start in seen.items() if start and start_of(pid) == start]:
        if time.monotonic() > deadline:
            raise ChaosFailed(f"the job has ended and its processes {left} are still there")
        time.sleep(0.05)


def check_logs(cluster: LocalCluster) -> None:
    """Look for bugs in what the daemons wrote.

    Raises:
        ChaosFailed: a daemon raised; shows the end of its log.
    """
    for name in ["coordinator", *cluster.agents]:
        text = cluster.log_of(name)
        if "InvariantViolation" in text or (name == "coordinator" and "Traceback" in text):
            where = max(text.find("Traceback"), 0)
            raise ChaosFailed(f"the log of {name} shows a bug: {text[where:][:6000]}")
    for path in sorted((cluster.directory / "logs").rglob("*")):
        if path.is_file() and "InvariantViolation" in path.read_text(errors="replace"):
            raise ChaosFailed(f"{path} shows a bug in a worker")


def recoveries(cluster: LocalCluster, done: list[tuple[str, int, int]]) -> list[tuple[str, float]]:
    """Return (kind, seconds from the fault to the end of the next group's first step).

    Only faults that no other one interrupted before that step count: the others have no
    recovery of their own.
    """
    firsts = sorted(
        (int(dict(t.note.fields)["unix_ns"]), int(dict(t.note.fields)["generation"]))
        for t in list(cluster.notes)
        if t.note.name == "first_step"
    )
    found = []
    for index, (kind, began_ns, generation) in enumerate(done):
        after = [ns for ns, number in firsts if ns > began_ns and number > generation]
        until_ns = done[index + 1][1] if index + 1 < len(done) else None
        if kind in LOSSES and after and (until_ns is None or after[0] < until_ns):
            found.append((kind, (after[0] - began_ns) / 1e9))
    return found


def goodput(cluster: LocalCluster, began_ns: int, over_ns: int) -> float:
    """Return epochs per second under faults, in parts of those before the first one.

    Args:
        cluster: whose notes tell of the reports.
        began_ns: when the first fault could come, unix time.
        over_ns: when the last one was done.
    """
    reports: dict[int, int] = {}
    for timed in list(cluster.notes):
        if timed.note.name == "report":
            metrics = json.loads(dict(timed.note.fields)["metrics"])
            if "epoch" in metrics:
                reports.setdefault(int(metrics["epoch"]), timed.unix_ns)
    times = sorted(reports.values())
    before = [ns for ns in times if ns <= began_ns]
    during = [ns for ns in times if began_ns < ns <= over_ns]
    if len(before) < 2 or len(during) < 2:
        return 0.0
    paces = [(len(part) - 1) / (part[-1] - part[0]) for part in (before, during)]
    return paces[1] / paces[0]


# ---------------------------------------------------------------- many runs


def run_faults(
    job_name: str, seed: int, faults: list[Fault], *, nodes: int = 3, width: int = 64
) -> Outcome:
    """Run one schedule on a cluster of its own; what fails leaves its logs.

    Raises:
        ElasticError: the job did not end right.
    """
    with LocalCluster(nodes=nodes) as cluster:
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=cluster.directory))
        name = f"chaos-{seed}"
        job = chaos_job(job_name, name, workers=nodes, directory=directory, width=width)
        try:
            return Chaos(cluster, job).run(faults)
        finally:
            end_references()


def percentiles(seconds: list[float]) -> str:
    """Return "n=9 p50=0.080 s p90=0.210 s p99=0.350 s max=0.350 s"."""
    if not seconds:
        return "n=0"
    ordered = sorted(seconds)
    p50, p90, p99 = (
        ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99)
    )
    return (
        f"n={len(ordered)} p50={p50:.3f} s p90={p90:.3f} s p99={p99:.3f} s max={ordered[-1]:.3f} s"
    )


@click.command()
@click.option(
    "--job", type=click.Choice(["steps", "wide", "epochs"]), default="steps", show_default=True
)
@click.option("--kills", default=0, help="Only kill workers, so many, one every --every seconds.")
@click.option("--seed", default=0, show_default=True, help="The first seed.")
@click.option("--seeds", default=1, show_default=True, help="How many seeds to run.")
@click.option("--events", default=20, show_default=True, help="Faults in a run.")
@click.option("--every", default=2.0, show_default=True, help="Mean seconds between bursts.")
@click.option("--nodes", default=3, show_default=True)
@click.option("--width", default=64, show_default=True, help="Of the layers of the job 'wide'.")
def main(
    job: str, kills: int, seed: int, seeds: int, events: int, every: float, nodes: int, width: int
) -> None:
    """Break a real cluster on this machine, seed by seed; fail on the first wrong end."""
    all_faults: list[str] = []
    times: dict[str, list[float]] = {}
    for number in range(seed, seed + seeds):
        faults = draw_kills(number, kills, every) if kills else draw_faults(number, events, every)
        try:
            outcome = run_faults(job, number, faults, nodes=nodes, width=width)
        except ElasticError as error:
            click.echo(f"seed {number} failed: {error}")
            sys.exit(1)
        all_faults += outcome.faults
        for kind, seconds in outcome.recoveries_s:
            times.setdefault(kind, []).append(seconds)
        goodput = f", goodput {outcome.goodput:.1%}" if outcome.goodput else ""
        click.echo(
            f"seed {number}: {len(outcome.faults)} faults survived, {outcome.generations} "
            f"generations{goodput}, {outcome.verdict.text}"
        )
    for kind in WEIGHTS:
        if kind in all_faults:
            seconds_of = percentiles(times.get(kind, []))
            click.echo(f"{kind}: {all_faults.count(kind)}, recovery {seconds_of}")


if __name__ == "__main__":
    main()
