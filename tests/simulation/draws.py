"""Draws the configuration of a simulated run from its seed: times, limits, coordinators, jobs.

Rule: an additional draw changes all later draws of a seed, and so which seeds find a rare bug. So
a feature that not every run needs is drawn in some seeds only.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.config import AgentConfig, CoordinatorConfig, JobSpec
from elastic.core.facts import Entry, EntryKind, JobId, Strategy
from tests.simulation.faults import BROKEN_SEED
from tests.simulation.network import Conditions
from tests.simulation.scripts import Script
from tests.simulation.terms import Candidate, LeaseStore
from tests.simulation.world import MS, S, Timeline

SPREADS_S = (0.0001, 0.0001, 0.01, 0.05)
"""Spread per member of a group; the larger values simulate groups of hundreds and thousands."""
SHARED_SEED = 2
"""Of five seeds, the one with several coordinators."""
REPORTED_FIRST_EVERY = 7
"""Of so many seeds, in one members learn of their group's end before they learn of the next."""
HANG_TIMEOUTS_S = (1.0, 3.0, 10.0)


def draw_config(seed: int, timeline: Timeline, conditions: Conditions) -> CoordinatorConfig:
    """Draw times and limits such that all relevant events can happen within a run."""
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
        # Longer than a healthy agent needs to reply, including all delays.
        probe_timeout_s=max(0.6, 2 * conditions.delay_max_ns / S + 0.2),
        preemption_deadline_s=5.0,
        announce_end_early_min=2
        if seed % REPORTED_FIRST_EVERY == 3
        else CoordinatorConfig.announce_end_early_min,
    )


def draw_candidates(seed: int, timeline: Timeline, lease: LeaseStore) -> list[Candidate | None]:
    """Return [None] for a coordinator that is alone on its store, or two or three candidates.

    Not in every seed: see this module's rule.
    """
    if seed % 5 != SHARED_SEED:
        return [None]
    names = [f"c{index + 1}" for index in range(timeline.rng.randint(2, 3))]
    return [Candidate(timeline, lease, name) for name in names]


def draw_agent_config(seed: int, timeline: Timeline) -> AgentConfig:
    """Draw the settings of agents."""
    spread_s = SPREADS_S[seed // 4 % len(SPREADS_S)]
    num_spares = timeline.rng.choice([0, 1, 2])
    return AgentConfig(num_spares=num_spares, drain_timeout_s=5.0, spread_s_per_member=spread_s)


def draw_job(
    timeline: Timeline, index: int, slots: int, *, is_gentle: bool
) -> tuple[JobSpec, Script]:
    """Draw a job that fits into so many slots, and the behavior of its train function."""
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
        # Long steps too, so that a machine that ends early does so before its workers have left.
        step_ns = rng.choice([50 * MS, 1 * S])
        script = replace(script, step_ns=step_ns, steps=min(60, script.steps))
    return spec, script
