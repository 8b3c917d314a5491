"""A study and its trials: the state that results from its log, applied line by line.

Rule: a study is defined by its log alone. All readers of the same lines have the same state, be it
the driver that continues the study or a command that only shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

Event = Mapping[str, Any]
"""One line of the log; "e" names its kind."""
ITERATION = "training_iteration"
"""What Ray calls the number of a report within its trial, from 1."""
TOTAL_S = "time_total_s"
"""What Ray calls the seconds of a report since its trial began."""
CHECKPOINT_PATH = "checkpoint_path"
"""What Ray calls the path of the checkpoint that came with a report."""


TRIAL_EVENTS = frozenset(
    ["started", "began", "reported", "resized", "decided", "resumed", "left", "ended"]
)
"""Kinds of lines about one trial."""


class TrialState(Enum):
    """The state of a trial."""

    PENDING = "pending"
    """Proposed; no job of it is known to the cluster."""
    RUNNING = "running"
    """Its job was submitted; it may wait for workers."""
    PAUSED = "paused"
    """It holds no workers until its scheduler resumes it."""
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """By a scheduler, a stopper or a person."""
    FAILED = "failed"


RAYS_STATUS = {
    TrialState.SUCCEEDED: "TERMINATED",
    TrialState.STOPPED: "TERMINATED",
    TrialState.FAILED: "ERROR",
}
"""Ray's words for states, where they are not the same in upper case."""
OVER = frozenset({TrialState.SUCCEEDED, TrialState.STOPPED, TrialState.FAILED})


@dataclass(frozen=True)
class LoggedConfig:
    """A config in the form that the log has.

    Attributes:
        shown: in JSON, perhaps without what that cannot represent.
        pickled: all of it, base64, if JSON cannot represent it; "" otherwise.
    """

    shown: Any = None
    pickled: str = ""

    @classmethod
    def of(cls, event: Event) -> LoggedConfig:
        return cls(event.get("config"), str(event.get("pickled", "")))


@dataclass(frozen=True)
class TrialAttempt:
    """One job of a trial; a trial that took over another one's checkpoint has several.

    Attributes:
        job_id: drawn before it was submitted; "" as long as there is none, or none any more.
        run: name of the job and of the run directory, below the study's.
        begins: a checkpoint's name -> the report that it came with: of those that it may begin
            with and that no report of this run directory names.
        resume_from: path of the checkpoint that it took over, "" for none.
        size: JSON of its scaling config, if its function's trainer asked for one; "" otherwise.
    """

    job_id: str
    run: str
    begins: Mapping[str, int] = field(default_factory=dict)
    resume_from: str = ""
    size: str = ""


@dataclass(frozen=True)
class TrialReport:
    """A report of rank 0 of a trial.

    Attributes:
        number: within the trial, from 1; a report repeated after a loss counts once.
        metrics: as in JSON, so that NaN is "nan".
        place: generation and index in the run directory.
        seconds: since the trial's first job began to run.
        checkpoint: name of the one that came with it, "" for none.
    """

    number: int
    metrics: Mapping[str, Any]
    place: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    checkpoint: str = ""

    def value(self, name: str) -> Any:
        """Return a metric, also one that Ray adds; None if there is none."""
        return {ITERATION: self.number, TOTAL_S: self.seconds}.get(name, self.metrics.get(name))


@dataclass
class Trial:
    """One configuration that is tried.

    Attributes:
        number: in the order of proposals, from 0.
        name: study and number; names its job and its run directory, too.
        label: for people; the name, unless a user made another one.
        trainable_name: of the function, or the class of the trainer, that it runs.
        attempts: one for each run directory, with its newest job.
        reports: those that count, oldest first.
        rungs: resource -> value, where a scheduler has judged it.
        verdict: why it must end, "" for not.
        started_unix_ns: when its first job began to run; until then, when that was submitted.
        has_begun: its first job has begun to run.
        sizes: how often its function's trainer asked for another size, since the study was opened
            or its config was changed.
    """

    number: int
    name: str
    label: str = ""
    logged_config: LoggedConfig = LoggedConfig()
    state: TrialState = TrialState.PENDING
    attempts: list[TrialAttempt] = field(default_factory=list)
    reports: list[TrialReport] = field(default_factory=list)
    rungs: dict[int, float] = field(default_factory=dict)
    verdict: str = ""
    reason: str = ""
    error: Mapping[str, str] | None = None
    started_unix_ns: int = 0
    has_begun: bool = False
    trainable_name: str = ""
    sizes: int = 0

    @property
    def config(self) -> Any:
        """Return what the trainable is called with, as JSON shows it."""
        return self.logged_config.shown

    @property
    def trial_id(self) -> str:
        return self.name

    @property
    def status(self) -> str:
        """Return its state in Ray's words: PENDING, RUNNING, PAUSED, TERMINATED or ERROR."""
        return RAYS_STATUS.get(self.state, self.state.name)

    @property
    def last_result(self) -> dict[str, Any]:
        """Return its newest metrics as numbers, with what Ray adds to them; {} for none."""
        if not self.reports:
            return {}
        newest = self.reports[-1]
        metrics = {name: _as_number(value) for name, value in newest.metrics.items()}
        ours = {ITERATION: newest.number, "trial_id": self.name, TOTAL_S: newest.seconds}
        return {**metrics, **ours}

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def attempt(self) -> TrialAttempt:
        """Return its present job; there must be one."""
        return self.attempts[-1]

    @property
    def iteration(self) -> int:
        """Return the number of its newest report, 0 for none."""
        return self.reports[-1].number if self.reports else 0

    def value(self, metric: str) -> float | None:
        """Return the newest value of a metric, None if its newest report has none."""
        return number_of(self.reports[-1].metrics.get(metric)) if self.reports else None


@dataclass
class Study:
    """All trials of a study.

    Attributes:
        settings: from the first line: trainable, metric, mode, seed, num_samples.
        proposals: config of each trial as it was proposed; a scheduler may have changed it since.
        order: (kind, trial) of proposals and ends, in order, to be replayed to a search.
        is_exhausted: the search has no more proposals.
        size: JSON of the scaling config of the newest report whose function's trainer had asked for
            one; "" for none. Later trials begin with it: it is known to find room.
        over: why the study ended, "" while it runs.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    proposals: list[LoggedConfig] = field(default_factory=list)
    order: list[tuple[str, int]] = field(default_factory=list)
    owner: Mapping[str, Any] | None = None
    is_exhausted: bool = False
    over: str = ""
    size: str = ""

    @property
    def metric(self) -> str:
        """Return the metric that trials are compared by, "" for none."""
        return str(self.settings.get("metric") or "")

    @property
    def trainable_name(self) -> str:
        return str(self.settings.get("trainable") or "")

    @property
    def sign(self) -> float:
        """Return what a value is multiplied with so that greater is better."""
        return -1.0 if self.settings.get("mode") == "min" else 1.0

    def apply(self, event: Event) -> None:
        """Apply a line; ignore one of an unknown kind, from a later version."""
        kind = event.get("e")
        if kind == "study":
            self.settings = dict(event["settings"])
        elif kind == "opened":
            self.owner, self.over = event.get("owner"), ""
            # Perhaps on another cluster, where these have no room, or are not what is asked for.
            self.size = ""
            for trial in self.trials:
                trial.sizes = 0
                if trial.attempts:
                    trial.attempts[-1] = replace(trial.attempt, size="")
        elif kind == "exhausted":
            self.is_exhausted = True
        elif kind == "over":
            self.over = str(event["reason"])
        elif kind == "proposed":
            self._propose(event)
        elif kind in TRIAL_EVENTS:
            trial = self.trials[int(event["trial"])]
            getattr(self, f"_{kind}")(trial, event)

    def _propose(self, event: Event) -> None:
        number = int(event["trial"])
        name, config = str(event["name"]), LoggedConfig.of(event)
        label = str(event.get("label") or name)
        self.trials.append(Trial(number, name, label, config, trainable_name=self.trainable_name))
        self.proposals.append(config)
        self.order.append(("proposed", number))

    def _started(self, trial: Trial, event: Event) -> None:
        begins = {str(name): int(n) for name, n in event.get("begins", {}).items()}
        begun = TrialAttempt(
            str(event["job"]),
            str(event["run"]),
            begins,
            str(event.get("from", "")),
            str(event.get("size", "")),
        )
        if trial.attempts and trial.attempt.run == begun.run:
            trial.attempts.pop()  # The same run continues as another job.
        trial.attempts.append(begun)
        trial.started_unix_ns = trial.started_unix_ns or int(event.get("unix_ns", 0))
        trial.state = TrialState.RUNNING

    def _began(self, trial: Trial, event: Event) -> None:
        if not trial.has_begun:
            trial.has_begun, trial.started_unix_ns = True, int(event["unix_ns"])

    def _reported(self, trial: Trial, event: Event) -> None:
        self.size = trial.attempt.size or self.size
        place = (int(event["generation"]), int(event["index"]))
        trial.reports.append(
            TrialReport(
                int(event["n"]),
                event["metrics"],
                place,
                float(event.get("s", 0.0)),
                str(event.get("checkpoint", "")),
            )
        )

    def _resized(self, trial: Trial, event: Event) -> None:
        self._left(trial, event)
        trial.attempts[-1] = replace(trial.attempt, size=str(event["size"]))
        trial.sizes += 1

    def _decided(self, trial: Trial, event: Event) -> None:
        trial.rungs.update({int(at): float(v) for at, v in event.get("rungs", {}).items()})
        what = event["what"]
        if what == "stop":
            trial.verdict = str(event["reason"])
        elif what == "pause":
            trial.state = TrialState.PAUSED
        elif what == "exploit":
            trial.logged_config = LoggedConfig.of(event)
            begins = {str(event["checkpoint"]): trial.iteration}
            trial.attempts.append(
                TrialAttempt("", str(event["run"]), begins, str(event["from"]), trial.attempt.size)
            )
            trial.state, trial.sizes = TrialState.PENDING, 0
        trial.reason = str(event.get("reason", ""))

    def _resumed(self, trial: Trial, event: Event) -> None:
        trial.state, trial.reason = TrialState.RUNNING, str(event.get("reason", ""))

    def _left(self, trial: Trial, event: Event) -> None:
        # Its job is gone; another one continues in the same run directory, or in a new one.
        if trial.state is not TrialState.PAUSED:
            trial.state, trial.error, trial.verdict = TrialState.PENDING, None, ""
        trial.attempts[-1] = replace(trial.attempt, job_id="")
        if event.get("anew"):
            trial.reports, trial.rungs = [], {}
            run = f"{trial.name}-{len(trial.attempts) + 1}"
            trial.attempts.append(TrialAttempt("", run, size=trial.attempt.size))

    def _ended(self, trial: Trial, event: Event) -> None:
        trial.state, trial.reason = TrialState(event["phase"]), str(event.get("reason", ""))
        trial.error = event.get("error")
        self.order.append(("ended", trial.number))

    def best(self) -> Trial | None:
        """Return the trial whose newest value is best, the first of equals; None without any."""
        scored = [(trial.value(self.metric), trial) for trial in self.trials]
        finite = [(v * self.sign, t) for v, t in scored if v is not None and math.isfinite(v)]
        return max(finite, key=lambda pair: (pair[0], -pair[1].number))[1] if finite else None


def _as_number(value: Any) -> Any:
    number = number_of(value) if isinstance(value, str) else None
    return value if number is None else number


def number_of(value: Any) -> float | None:
    """Return a metric as a number, also from JSON text such as "nan"; None if it is none."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None
