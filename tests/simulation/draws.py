"""What a simulated run is like: times, limits, coordinators and jobs, drawn from its seed.

Rule: each draw moves all that are made after it, and a bug that few seeds show is then shown by
others: whatever is not needed in every run is drawn in some seeds only.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import AgentConfig, CoordinatorConfig, JobSpec
from elastic.core.world import Entry, EntryKind, JobId, Strategy
from tests.simulation.faults import BROKEN_SEED
from tests.simulation.network import Conditions
from tests.simulation.scripts import Script
from tests.simulation.terms import Candidate, LeaseStore
from tests.simulation.world import MS, S, Timeline

SPREADS_S = (0.0001, 0.0001, 0.01, 0.05)
"""For each member of a group, some of them as in groups of hundreds and thousands."""
SHARED_SEED = 2
"""Of every five seeds this one has several coordinators."""
REPORTED_FIRST_EVERY = 7
"""Of so many seeds, members hear in one that their group is over before they hear of the next."""
HANG_TIMEOUTS_S = (1.0, 3.0, 10.0)


def draw_config(seed: int, timeline: Timeline, conditions: Conditions) -> CoordinatorConfig:
    """Draw times and limits that let what matters happen within a run."""
    rng = timeline.rng
    return CoordinatorConfig(
        start_timeout_s=rng.choice([0.0, 1.0, 10.0]),
        node_grace_s=rng.choice([0.0, 0.5, 3.0]),
        form_timeout_s=rng.choice([5.0, 30.0]),
        boundary_timeout_s=rng.choice([2.0, 30.0]),
        healthy_after_s=5.0,
        node_faults_max=1 if seed % 6 == BROKEN_SEED else 2,
        fault_window_s=20.0,
        quarantine_s=5.0,
        # Longer than a healthy agent needs to answer, with all the delay that there is.
        probe_timeout_s=max(0.6, 2 * conditions.delay_max_ns / S + 0.2),
        preemption_deadline_s=5.0,
        report_first_min=2
        if seed % REPORTED_FIRST_EVERY == 3
        else CoordinatorConfig.report_first_min,
    )


def draw_candidates(seed: int, timeline: Timeline, lease: LeaseStore) -> list[Candidate | None]:
    """Return one that is alone on its store, or two or three that wait for each other.

    Not in every seed: rare bugs are caught by what is rare, and each draw moves all others.
    """
    if seed % 5 != SHARED_SEED:
        return [None]
    names = [f"c{index + 1}" for index in range(timeline.rng.randint(2, 3))]
    return [Candidate(timeline, lease, name) for name in names]


def draw_agent_config(seed: int, timeline: Timeline) -> AgentConfig:
    """Draw what agents do by themselves."""
    spread_s = SPREADS_S[seed // 4 % len(SPREADS_S)]
    num_spares = timeline.rng.choice([0, 1, 2])
    return AgentConfig(num_spares=num_spares, drain_timeout_s=5.0, spread_s_per_member=spread_s)


def draw_job(
    timeline: Timeline, index: int, slots: int, *, is_gentle: bool
) -> tuple[JobSpec, Script]:
    """Draw a job that fits into so many slots, and what its train function does."""
    rng = timeline.rng
    replica = rng.choice([1, 1, 1, 2])
    low = rng.randint(1, max(1, min(slots, 4) // replica)) * replica
    high = max(low, rng.randint(low, low + 6) // replica * replica)
    job_id = JobId(f"j{index}")
    spec = JobSpec(
        job_id=job_id,
        name=f"job{index}",
        entry=Entry(EntryKind.FUNCTION, "train"),
        min_workers=low,
        max_workers=high,
        workers_per_replica=replica,
        strategy=rng.choice([Strategy.PACK, Strategy.SPREAD]),
        max_failures=rng.choice([0, 5, -1]),
        hang_timeout_s=rng.choice(HANG_TIMEOUTS_S),
        run_path="/results",
    )
    raises = 0 if is_gentle else rng.choice([0, 0, 0, 1, 2])
    script = Script(
        steps=rng.randint(20, 400),
        report_every=rng.choice([5, 20, 100]),
        step_ns=rng.choice([5 * MS, 50 * MS, 200 * MS]),
        raise_at=rng.randint(1, 20) if raises else -1,
        raises=raises,
    )
    if is_gentle:
        # Long steps too: a machine that goes early then goes before its workers have left.
        step_ns = rng.choice([50 * MS, 1 * S])
        script = replace(script, step_ns=step_ns, steps=min(60, script.steps))
    return spec, script
