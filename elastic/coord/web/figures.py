"""The coordinator's metrics for Prometheus. They have few labels and no ranks: agents export those.

Rule: a standby omits all that only the leader knows, so that just one coordinator reports jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic.client.text_format import world_size
from elastic.coord.history import History
from elastic.coord.server_context import ServiceContext
from elastic.core.config import NS_PER_S
from elastic.core.facts import JobPhase, NodePhase
from elastic.core.view import ClusterView, JobView
from elastic.runtime import exposition as text
from elastic.runtime.exposition import Family, Histogram


def exposition(context: ServiceContext, answered: Mapping[str, Histogram]) -> str:
    """Return all metrics as text; `answered` has the durations of gRPC requests, by method."""
    tenure = context.leader_state.tenure
    leader = Family("elastic_leader", "gauge", "1 on the coordinator that leads.")
    leader.add(1 if tenure is not None else 0)
    if tenure is None:
        return text.exposition([leader])
    view, history = context.view(), tenure.history or History()
    families = [leader, *_cluster(view, history), *_jobs(view, history, context.clock.unix_ns())]
    driver = tenure.driver
    families += [
        Family(
            "elastic_agents_connected", "gauge", "Streams of agents that stand."
        ).add(len(driver.sessions)),
        _histogram(
            "elastic_store_commit_seconds", "Writing a record until it is durable.", driver.commits
        ),
    ]  # fmt: skip
    requests = Family("elastic_rpc_seconds", "histogram", "Requests over gRPC until the answer.")
    for method, took in sorted(answered.items()):
        requests.add_histogram(took, method=method.rpartition("/")[2])
    return text.exposition([*families, requests])


def _histogram(name: str, about: str, values: Histogram) -> Family:
    return Family(name, "histogram", about).add_histogram(values)


def _cluster(view: ClusterView, history: History) -> Iterator[Family]:
    nodes = Family("elastic_nodes", "gauge", "Nodes by what the coordinator thinks of them.")
    for phase in NodePhase:
        nodes.add(sum(node.phase is phase for node in view.nodes), phase=phase.value)
    yield nodes
    slots = Family("elastic_slots", "gauge", "Workers that could run at once, and still start.")
    slots.add(sum(node.node.num_slots for node in view.nodes), state="all")
    slots.add(sum(node.free_slots for node in view.nodes), state="free")
    yield slots
    quarantined = Family(
        "elastic_node_quarantined", "gauge", "1 for a node that gets no new workers for a while."
    )
    for node in view.nodes:
        quarantined.add(node.node.node_id in history.quarantined, node=node.node.node_id)
    yield quarantined
    jobs = Family("elastic_jobs", "gauge", "Jobs by state.")
    for stands in JobPhase:
        jobs.add(sum(job.record.phase is stands for job in view.jobs), state=stands.value)
    yield jobs
    taken = Family("elastic_preemptions_total", "counter", "What was taken, by what took it.")
    for source in ("drain", "priority"):
        taken.add(history.preemptions[source], source=source)
    yield taken
    yield _histogram(
        "elastic_queue_wait_seconds", "From submission to the first group.", history.queue_waits
    )


def _jobs(view: ClusterView, history: History, unix_ns: int) -> Iterator[Family]:
    """Yield the metrics of jobs; ended ones have only their info and state."""
    info = Family("elastic_job_info", "gauge", "1; the labels identify the job.")
    state = Family(
        "elastic_job_state", "gauge", "1 for the state that the job is in, 0 for the others."
    )
    generation = Family("elastic_job_generation", "gauge", "Number of the newest group.")
    workers = Family("elastic_job_workers", "gauge", "Workers by what they do.")
    bounds = Family("elastic_job_bounds", "gauge", "Smallest and largest group.")
    rate = Family(
        "elastic_job_steps_per_second", "gauge", "Steps of the group, over its last second."
    )
    samples = Family("elastic_job_samples_per_second", "gauge", "The same of samples.")
    epoch = Family("elastic_job_epoch", "gauge", "Of the next step to be committed, from 0.")
    step = Family("elastic_job_step", "gauge", "The same within its epoch, from 0.")
    reforms = Family(
        "elastic_job_reforms_total", "counter", "Groups after the first, by what made them needed."
    )
    pauses = Family(
        "elastic_reform_seconds", "histogram", "How long training paused for another group."
    )
    age = Family("elastic_checkpoint_age_seconds", "gauge", "Since the newest one was recorded.")
    refused = Family(
        "elastic_checkpoint_failures_total", "counter", "Reported checkpoints that do not count."
    )
    goodput = Family(
        "elastic_job_goodput_seconds_total", "counter",
        "Time of workers by what it went into; all categories sum to the time they were held.",
    )  # fmt: skip
    failures = Family("elastic_job_failures_total", "counter", "How often user code raised.")
    for job in view.jobs:
        record, job_id = job.record, job.record.spec.job_id
        spec, own = record.spec, history.of(job_id)
        info.add(1, job=job_id, name=spec.name, run=spec.run_path)
        for phase in JobPhase:
            state.add(record.phase is phase, job=job_id, state=phase.value)
        if job.has_ended():
            continue
        generation.add(record.generation, job=job_id)
        for does, count in sorted(_worker_phases(job).items()):
            workers.add(count, job=job_id, state=does)
        for side, bound in zip(("min", "max"), record.bounds, strict=True):
            bounds.add(bound, job=job_id, bound=side)
        telemetry = job.telemetry
        if world_size(job) and telemetry.steps:
            rate.add(telemetry.per_second(telemetry.steps), job=job_id)
            samples.add(telemetry.per_second(telemetry.samples), job=job_id)
            epoch.add(telemetry.epoch, job=job_id)
            step.add(telemetry.step, job=job_id)
        for category, seconds in record.goodput.seconds().items():
            goodput.add(seconds, job=job_id, category=category)
        for cause, count in sorted(own.reforms.items()):
            reforms.add(count, job=job_id, cause=cause)
        pauses.add_histogram(own.pauses, job=job_id)
        newest = record.checkpoints[-1].path if record.checkpoints else ""
        if newest in own.checkpoints:
            age.add((unix_ns - own.checkpoints[newest]) / NS_PER_S, job=job_id)
        refused.add(own.refused_checkpoints, job=job_id)
        failures.add(record.failures, job=job_id)
    yield from (
        info, state, generation, workers, bounds, rate, samples, epoch, step, goodput, reforms,
        pauses, age, refused, failures,
    )  # fmt: skip


def _worker_phases(job: JobView) -> dict[str, int]:
    counts: dict[str, int] = {}
    for worker in job.workers:
        phase = worker.report.phase.value
        counts[phase] = counts.get(phase, 0) + 1
    return counts
