"""Bugs in resources that jobs share: the queue, nodes, memory for copies; see `planting`."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic.core.facts import JobPhase
from elastic.core.machine import (
    coordinator,
    copies,
    jobs,
    pausing,
    queueing,
    report_coalescing,
    requests,
)
from elastic.core.policy import (
    eviction,
    packing,
    replication,
)
from elastic.core.policy.decision import Decision
from tests.simulation.planting import Patch, bug


@bug
def forgets_what_is_paused_after_a_restart(patch: Patch) -> None:
    """A paused job runs again when another coordinator takes over."""
    honest = coordinator.restore

    def restore(record: Any, *clocks: Any) -> Any:
        is_paused = record.phase is JobPhase.PAUSED
        phase = JobPhase.PENDING if is_paused else record.phase
        return honest(dataclasses.replace(record, phase=phase, paused=False), *clocks)

    patch.setattr(coordinator, "restore", restore)


@bug
def starts_workers_on_cordoned_nodes(patch: Patch) -> None:
    """A cordon is recorded but has no effect."""
    honest = requests.on_cordon

    def on_cordon(cluster: Any, event: Any) -> None:
        honest(cluster, event)
        cluster.book.cordons.clear()

    patch.setattr(requests, "on_cordon", on_cordon)


@bug
def lets_a_user_go_beyond_the_micro_batches(patch: Patch) -> None:
    """Any bounds are accepted."""
    patch.setattr(requests, "_refuse_bounds", lambda job, low, high: "")


@bug
def takes_any_job_for_a_script_of_torchruns(patch: Patch) -> None:
    """A job that has not reported its micro-batches yet may scale as if it had none."""
    patch.setattr(requests, "_has_own_steps", lambda job: True)


@bug
def keeps_free_slots_for_a_job_that_can_never_run(patch: Patch) -> None:
    """Slots are kept for the first job that does not fit, even if it never can."""
    patch.setattr(packing.WorkerShape, "fitting", lambda self, spec: 1_000_000)


@bug
def sends_copies_to_those_who_train(patch: Patch) -> None:
    """Any node may hold a copy, even one that trains the job."""
    honest = copies._have_it
    patch.setattr(
        copies, "_have_it", lambda job, source: honest(job, source) if source else frozenset()
    )


@bug
def frees_a_copy_when_another_node_is_chosen(patch: Patch) -> None:
    """A copy is freed before the newly chosen node has it."""
    patch.setattr(replication, "is_superfluous", lambda copy, holder: copy > replication.NO_COPY)


@bug
def frees_rows_once_one_node_has_newer_ones(patch: Patch) -> None:
    """The previous group's snapshot is then incomplete, and that of this group not yet complete."""

    def base(job: Any) -> Any:
        newest = [job.copies.newest(at, source) for source, at in job.copies.holders.items()]
        return max(newest, default=replication.NO_COPY)

    patch.setattr(copies, "_base", base)


@bug
def takes_rows_of_the_group_before_for_newer_ones(patch: Patch) -> None:
    """The rows of a node that has died are then freed just when they are needed."""

    def base(job: Any) -> Any:
        newest = [job.copies.newest(at, source) for source, at in job.copies.holders.items()]
        return min(newest, default=replication.NO_COPY)

    patch.setattr(copies, "_base", base)


@bug
def takes_the_next_snapshot_before_all_rows_have_arrived(patch: Patch) -> None:
    """The two snapshots of each node may then be of other steps than the copies of a dead node."""
    patch.setattr(replication, "is_awaited", lambda mode, **_: Decision(False, "why wait"))


@bug
def lets_a_node_hold_its_own_rows(patch: Patch) -> None:
    """The rows and their copy are lost together with the node."""
    honest = copies._have_it
    patch.setattr(
        copies, "_have_it", lambda job, source: frozenset() if source else honest(job, source)
    )


@bug
def asks_nodes_with_members_alone_for_rows(patch: Patch) -> None:
    """No member is sent the address of a node that has rows but does not train."""
    honest = replication.querying_rank

    def asks(node_id: Any, first_ranks: Any, world_size: int) -> int:
        return honest(node_id, first_ranks, world_size) if node_id in first_ranks else world_size

    patch.setattr(replication, "querying_rank", asks)


@bug
def does_not_say_again_where_to_bring_what_was_lost(patch: Patch) -> None:
    """After a loss, a holder gets no copies until the next snapshot."""
    patch.setattr(copies, "_note_lost", lambda job, node_id, now: None)


@bug
def lets_drained_nodes_go_with_what_they_hold(patch: Patch) -> None:
    """A drained node without workers leaves at once, with its copies."""
    patch.setattr(copies, "kept_for", lambda *args: "")


@bug
def keeps_copies_of_jobs_that_have_ended(patch: Patch) -> None:
    """The nodes are not ordered to free their copies."""
    patch.setattr(copies, "end", lambda cluster, job: None)


@bug
def chooses_a_holder_and_tells_nobody_who_trains(patch: Patch) -> None:
    """The members are not ordered to send copies to the holder."""
    patch.setattr(copies, "_order", lambda cluster, job, holder: None)


@bug
def takes_no_job_down(patch: Patch) -> None:
    """Running jobs keep their slots, whichever jobs wait."""
    patch.setattr(eviction, "fewest", lambda count, fits: ())


@bug
def takes_jobs_down_that_have_nothing_to_go_on_from(patch: Patch) -> None:
    """A job is preempted even if it has no checkpoint, without time to save one."""
    patch.setattr(eviction, "why_it_stays", lambda spec, **facts: "")
    patch.setattr(jobs.JobState, "_leave_by_ns", lambda self: self.release.deadline_ns)


@bug
def waits_without_end_for_a_checkpoint_that_does_not_come(patch: Patch) -> None:
    """A job without a checkpoint that cannot be saved makes the urgent one wait for ever."""
    _judge_what_is_in_vain(patch, Decision(eviction.EvictionSave.AWAITED, "it will come"))


@bug
def takes_a_job_down_whose_checkpoint_did_not_come(patch: Patch) -> None:
    """A job whose time to save is over is preempted without a checkpoint."""
    _judge_what_is_in_vain(patch, Decision(eviction.EvictionSave.OVER, "out of time"))


def _judge_what_is_in_vain(patch: Patch, wrong: Decision[eviction.EvictionSave]) -> None:
    """Replace the decision about a job that has no checkpoint and cannot save one."""
    honest = eviction.judge_saving

    def judge_saving(**facts: Any) -> Any:
        decision = honest(**facts)
        return wrong if decision.value is eviction.EvictionSave.IN_VAIN else decision

    patch.setattr(eviction, "judge_saving", judge_saving)


@bug
def takes_a_job_down_before_the_others_can_go_too(patch: Patch) -> None:
    """Each job leaves when it is saved, whether or not that makes enough room."""
    patch.setattr(pausing, "_co_preempted", lambda cluster, job: [])


@bug
def takes_jobs_down_for_anybody(patch: Patch) -> None:
    """All jobs are preempted as if they had the lowest priority."""
    honest = queueing.demand_of

    def demand_of(cluster: Any, job: Any) -> Any:
        demand = honest(cluster, job)
        if not demand.trains:
            return demand
        return dataclasses.replace(demand, spec=dataclasses.replace(demand.spec, priority=-1000))

    patch.setattr(queueing, "demand_of", demand_of)


@bug
def keeps_a_preempted_job_out_for_ever(patch: Patch) -> None:
    """A job's order to make room is never withdrawn."""
    honest = queueing._make_room

    def make_room(cluster: Any, job: Any, for_whom: str) -> None:
        honest(cluster, job, for_whom or job.release.yields_to)

    patch.setattr(queueing, "_make_room", make_room)


@bug
def waits_for_others_after_the_last_of_a_wave(patch: Patch) -> None:
    """The last report of a wave waits for further reports, as the first ones do."""
    honest = report_coalescing.may_wait
    patch.setattr(
        report_coalescing, "may_wait", lambda *args: honest(*args) or args[1].newest.wave is None
    )
