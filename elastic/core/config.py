"""Configuration: frozen, keyword-only, validated on construction; names include units.

Rule: validation never fills in a value. Times are in seconds (`_s`) for people, and converted to
nanoseconds once, by `ns`.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from elastic.core.facts import NO_JOB, Entry, JobId, Resources, Strategy
from elastic.errors import ConfigError

NS_PER_S = 1_000_000_000
DRAIN_TIMEOUT_S_MAX = 30 * 24 * 3600.0
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
ENTRY_BYTES_MAX = 16 * 1024 * 1024
"""A pickled train function larger than this carries data that belongs in a file."""
PRIORITY_MAX = 1000
TRACKERS_VARIABLE = "ELASTIC_TRACKERS"
"""In a job's environment: where its metrics are shown, see `storage.trackers`."""
VIRTUAL_LOCAL_RANK = "ELASTIC_VIRTUAL_LOCAL_RANK"
"""Variable of a job's environment; "1": each worker sees its own GPU only, and LOCAL_RANK is 0."""
KNOWN_ACCELERATORS = (
    "A10", "A10G", "A30", "A40", "A100", "A6000", "B100", "B200", "B300", "GB200", "GB300", "GH200",
    "H20", "H100", "H200", "K80", "L4", "L40", "L40S", "P4", "P100", "RTX3090", "RTX4090",
    "RTX5090", "T4", "V100",
)  # fmt: skip


def ns(seconds: float) -> int:
    """Turn seconds into integer nanoseconds."""
    return round(seconds * NS_PER_S)


TEXT_CHARS_MAX = 1000
"""Maximum length of a reason or a label that a user gives."""

STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Signal that makes a worker write its stacks; no script and no scheduler uses it."""


def check_name(what: str, name: str) -> None:
    """Refuse a name that cannot be part of a path or a key; ConfigError has the rule."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{what} name {name!r}: expected 1 to 100 letters, digits, '.', '_', '=' or '-', "
            f"beginning with a letter or digit"
        )


def check_text(what: str, text: str) -> str:
    """Return `text` if it is one printable line.

    Raises:
        ConfigError: it is too long, or has control characters.
    """
    if len(text) > TEXT_CHARS_MAX or any(not c.isprintable() for c in text):
        raise ConfigError(
            f"{what} {text[:100]!r}: expected one line of at most {TEXT_CHARS_MAX} characters, "
            f"without control characters"
        )
    return text


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job as a user submitted it.

    Attributes:
        job_id: unique for ever in a cluster; drawn by the client, or, if "", by the coordinator.
        name: unique among the jobs that have not ended; also names the run directory.
        entry: what each worker runs.
        min_workers, max_workers: the group is never smaller while training, nor larger.
        workers_per_replica: a group's size is a multiple of this; both bounds are as well.
        resources_per_worker: taken from the node for each worker.
        strategy: how workers spread over nodes.
        accelerator_type: only nodes that have this one, "" for any.
        label_selector: only nodes that carry all of these labels.
        backend: "gloo", "nccl" or "auto" (nccl with GPUs).
        collective_timeout_s: torch.distributed's own timeout; a backstop, not the detector. Also
            the time in which a worker must have started, at least ten minutes; four hours where it
            may be in its train function.
        hang_timeout_s: a member that has made no progress for this long, while all others wait for
            it in a reduction or a collective of a sharded model, is killed; 0 for never. Must be
            longer than anything that one rank does alone while the others train (an evaluation, a
            checkpoint written by the script).
        max_failures: how often user code may raise before the job fails; -1 for ever.
        max_preemptions: how many nodes announced drains (a notice of the cloud, SIGTERM, an
            operator) may take from its groups before the job fails; -1 for ever.
        run_path: the run directory, storage_path/name, as an fsspec path.
        num_to_keep: checkpoints that are kept; -1 for all.
        score_attribute, score_order: which are the best ones; "" for the newest.
        resume_from: path of the reported checkpoint to start from, "" for none; used until the job
            has recorded one of its own.
        priority: waiting jobs with a greater one go first; -1000 to 1000.
        non_preemptible: it keeps its min also when a job of higher priority waits.
        own_steps: its code divides its steps among workers itself, as scripts for torchrun do, so
            that a group of any size can train it.
        resumes: its run directory has a state to continue from, or `resume_from` is one.
        grace_s: time for a script's own SIGTERM handler when the job is stopped.
        feeds: the job whose workers it feeds with data, "" for none: it ends with that one, and
            grows from its min while they wait for data. It has nothing to lose, and so gives way
            at any moment.
    """

    job_id: JobId
    name: str
    entry: Entry
    min_workers: int
    max_workers: int
    workers_per_replica: int = 1
    resources_per_worker: Resources = field(default_factory=Resources)
    strategy: Strategy = Strategy.PACK
    accelerator_type: str = ""
    label_selector: tuple[tuple[str, str], ...] = ()
    backend: str = "auto"
    collective_timeout_s: float = 1800.0
    hang_timeout_s: float = 30.0
    max_failures: int = 0
    max_preemptions: int = -1
    run_path: str = ""
    num_to_keep: int = -1
    score_attribute: str = ""
    score_order: str = "max"
    resume_from: str = ""
    priority: int = 0
    non_preemptible: bool = False
    own_steps: bool = False
    resumes: bool = False
    grace_s: float = 30.0
    feeds: JobId = NO_JOB

    def __post_init__(self) -> None:
        check_name("job", self.name)
        if not 1 <= self.min_workers <= self.max_workers:
            raise ConfigError(
                f"job {self.name}: min_workers={self.min_workers} and max_workers="
                f"{self.max_workers}: expected 1 <= min <= max"
            )
        replica = self.workers_per_replica
        if replica < 1 or self.min_workers % replica or self.max_workers % replica:
            raise ConfigError(
                f"job {self.name}: workers_per_replica={replica} must be at least 1 and divide "
                f"min_workers={self.min_workers} and max_workers={self.max_workers}"
            )
        if self.backend not in ("auto", "gloo", "nccl"):
            raise ConfigError(
                f"job {self.name}: backend={self.backend!r}: expected auto, gloo or nccl"
            )
        if not 0 < self.collective_timeout_s < float("inf"):
            raise ConfigError(
                f"job {self.name}: collective_timeout_s={self.collective_timeout_s}: expected a "
                f"finite number > 0"
            )
        if not 0 <= self.hang_timeout_s < float("inf"):
            raise ConfigError(
                f"job {self.name}: hang_timeout_s={self.hang_timeout_s}: expected a finite number "
                f">= 0 (0 for never)"
            )
        if not 0 <= self.grace_s < float("inf"):
            raise ConfigError(
                f"job {self.name}: grace_s={self.grace_s}: expected a finite number >= 0"
            )
        if self.max_failures < -1:
            raise ConfigError(
                f"job {self.name}: max_failures={self.max_failures}: expected -1 (for ever) or more"
            )
        if self.max_preemptions < -1:
            raise ConfigError(
                f"job {self.name}: max_preemptions={self.max_preemptions}: expected -1 (for ever) "
                f"or more"
            )
        if self.num_to_keep != -1 and self.num_to_keep < 1:
            raise ConfigError(
                f"job {self.name}: num_to_keep={self.num_to_keep}: expected -1 (all) or >= 1"
            )
        if self.score_order not in ("max", "min"):
            raise ConfigError(
                f"job {self.name}: score_order={self.score_order!r}: expected max or min"
            )
        if not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise ConfigError(
                f"job {self.name}: priority={self.priority}: expected -{PRIORITY_MAX} to "
                f"{PRIORITY_MAX}"
            )
        if len(self.entry.payload) > ENTRY_BYTES_MAX:
            raise ConfigError(
                f"job {self.name}: the pickled train function has {len(self.entry.payload)} bytes, "
                f"at most {ENTRY_BYTES_MAX} are sent; load large data inside the function"
            )


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Times and limits of the coordinator's machine; what flags of its command set is checked.

    Attributes:
        start_timeout_s: a first group waits this long for workers that are still starting,
            once it has min; too small: an early second re-form; too large: a late start.
        node_grace_s: a node whose stream broke is lost after this, or at once when a member of
            its group reports that the group broke.
        probe_timeout_s: while members wait for a peer, an agent that does not answer this long is
            lost. Must exceed a round trip plus the longest scheduling delay of a healthy agent on
            a loaded machine: if too small, its workers are restarted for nothing.
        adoption_grace_s: after its own restart the coordinator waits this long for agents that
            it knows from the journal; must exceed the agents' longest back-off.
        adoption_s_max: and for as long as others of them still come, up to this long: thousands
            cannot reconnect at once.
        broken_grace_s: a group that broke without a known loss is formed again after this.
        form_timeout_s: a member that has not begun to train this long after its generation was
            announced is killed.
        boundary_timeout_s: members leave a group at one boundary; those that linger this long
            after the first are cut off.
        boundary_save_s: the same if they save their state before they leave, and none of them has
            stalled; a little longer than their own timeout for storage.
        stop_grace_s: between asking a worker to end and killing it.
        restart_delay_s_max: longest back-off between replacements of a failing worker.
        crash_loop_limit: losses in a row, without a step that is not one done again, a report or a
            healthy period in between, after which the job fails; kills and lost nodes are none.
        healthy_after_s: training this long without a loss resets the count of losses in a row.
        node_faults_max: more hangs, crashes and failed starts of workers than this on one node
            within `fault_window_s`, and more than twice as many as on any other, keep new workers
            off it for `quarantine_s` from the last one.
        jobs_max: jobs that have not ended, at once.
        ended_jobs_kept: number of ended jobs kept in memory.
        announce_end_early_min: groups of at least this size are notified of their end before the
            next group is computed; smaller ones get both at once.
        preemption_deadline_s: time of a preempted job for a checkpoint, and again to reach a
            boundary; after that it continues later from its newest checkpoint.
    """

    start_timeout_s: float = 10.0
    node_grace_s: float = 0.5
    probe_timeout_s: float = 0.6
    adoption_grace_s: float = 10.0
    adoption_s_max: float = 120.0
    broken_grace_s: float = 0.3
    form_timeout_s: float = 60.0
    boundary_timeout_s: float = 30.0
    boundary_save_s: float = 660.0
    stop_grace_s: float = 5.0
    restart_delay_s_max: float = 30.0
    crash_loop_limit: int = 10
    healthy_after_s: float = 30.0
    node_faults_max: int = 4
    fault_window_s: float = 600.0
    quarantine_s: float = 600.0
    jobs_max: int = 1000
    ended_jobs_kept: int = 200
    announce_end_early_min: int = 2000
    preemption_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("probe_timeout_s", "preemption_deadline_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"coordinator: {name}={getattr(self, name)}: expected a finite number > 0"
                )


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Times and limits of an agent's machine; what flags of its command set is checked.

    Attributes:
        num_spares: processes kept warm (torch imported) beside the workers.
        reconnect_delay_s_min, reconnect_delay_s_max: bounds of the jittered back-off.
        drain_timeout_s: a drained node leaves by then at the latest.
        ping_interval_s: how often a worker's control thread is asked for an answer.
        control_timeout_s: a worker whose control thread does not answer this long is killed.
        stopped_timeout_s: a worker process that the kernel shows as stopped (SIGSTOP) this long
            is killed.
        stop_grace_s: at the agent's own end, between asking workers to end and killing them.
        spawn_failures_max: spawns that fail in a row before the agent gives up.
        spread_s_per_member: reports that all members of a group send at the same time are spread,
            with this interval between members; see `policy.pacing`. Groups for which that is less
            than 20 milliseconds in all (200 members) send them at once.
    """

    num_spares: int = 1
    reconnect_delay_s_min: float = 0.05
    reconnect_delay_s_max: float = 5.0
    drain_timeout_s: float = 30.0
    ping_interval_s: float = 1.0
    control_timeout_s: float = 30.0
    stopped_timeout_s: float = 0.5
    stop_grace_s: float = 5.0
    spawn_failures_max: int = 5
    spread_s_per_member: float = 0.0001

    def __post_init__(self) -> None:
        if self.num_spares < 0:
            raise ConfigError(f"--spares {self.num_spares}: expected a number of at least 0")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(
                f"--drain-timeout {self.drain_timeout_s}: expected seconds, 0 or more and finite"
            )
