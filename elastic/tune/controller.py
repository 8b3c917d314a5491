"""The driver of a study: proposes trials, submits them as jobs, reads reports, and decides.

Rule: the log is a write-ahead log: an action is logged before it is carried out. After a crash,
the next driver finds logged actions that were not carried out (`_recover`): the log has the names
and ids of all jobs, and a report that is read again gets the same number.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from elastic.client.attempts import note_end
from elastic.client.ctrl_c import InterruptHandler
from elastic.client.jobs import Client, new_job_id
from elastic.client.printer import BY_ORDER
from elastic.client.study_show import StudyView, config_line, headline
from elastic.client.text_format import world_size
from elastic.core.facts import ENDED, JobPhase
from elastic.core.policy.decision import Decision
from elastic.core.policy.tuning.decision import TrialAction, TrialDecision
from elastic.core.study import (
    CHECKPOINT_PATH,
    ITERATION,
    LoggedConfig,
    Study,
    Trial,
    TrialAttempt,
    TrialState,
    number_of,
)
from elastic.core.view import JobView, NodeView
from elastic.errors import ElasticError, NotFound, Refused, UsageError
from elastic.runtime.clock import SystemClock
from elastic.storage.metrics import MetricsReader, Numbering
from elastic.storage.run_directory import RunDirectory
from elastic.storage.study_log import StudyLog
from elastic.train.cluster import check_fits
from elastic.tune.callback import Callbacks
from elastic.tune.following import Events, Following, Watch
from elastic.tune.schedulers import TrialScheduler
from elastic.tune.search import Exhausted, Searcher
from elastic.tune.session import size_asked_by
from elastic.tune.stopper import Stopper
from elastic.tune.taking import TAKEN, next_run, take_newest
from elastic.tune.trials import Recipe, from_json, from_log, reported, room_for, to_log
from elastic.wire.codec_jobs import JobEvent

if TYPE_CHECKING:
    from elastic.core.config import JobSpec
    from elastic.train.cluster import ClusterConnection


TICK_S = 0.25
POLL_S = 2.0
"""Seconds between polls of the cluster for its nodes and of storage for a stop request."""
SIZES_MAX = 3
"""How often a trial is submitted again because its trainer asks for another size."""
GOES_ON = "its trial continues as another job"
SAME_FAILURES_MAX = 10
"""The study ends after so many trials with the same failure, if none has reported yet."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The components and limits that a study runs with.

    Attributes:
        recipe: makes the trainer of a trial.
        search, scheduler, stopper, callbacks: already bound to the study's metric.
        max_concurrent: limit of running trials; 0 for as many as the cluster has room for.
        ahead: trials that are submitted beyond that room, so that one waits in the queue when a
            slot comes free.
        num_samples: limit for searchers that never end by themselves; -1 for no limit.
        time_budget_s: None for no limit.
        label: returns the name that is displayed for a trial.
        fail_fast: the first trial that fails ends the study.
        is_quiet: print nothing.
    """

    recipe: Recipe
    search: Searcher
    scheduler: TrialScheduler
    stopper: Stopper
    callbacks: Callbacks
    max_concurrent: int = 0
    ahead: int = 0
    num_samples: int = 1
    time_budget_s: float | None = None
    label: Callable[[Trial], str] | None = None
    fail_fast: bool = False
    is_quiet: bool = False


class Controller:
    """Runs one study to its end."""

    def __init__(
        self, log: StudyLog, plan: Plan, client: Client, cluster: ClusterConnection
    ) -> None:
        """Start nothing yet; see `run`."""
        self._log = log
        self._plan = plan
        self._client = client
        self._cluster = cluster
        self._events: Events = queue.SimpleQueue()
        self._following: dict[int, Following] = {}
        self._stop_reason = ""
        self._is_leaving = False
        self._room = 0
        self._nodes: Sequence[NodeView] = ()
        self._checked = self._since = time.monotonic()
        self._same: deque[str] = deque(maxlen=SAME_FAILURES_MAX)
        self._view = StudyView(log.study, is_quiet=plan.is_quiet)
        self._clock = SystemClock()

    @property
    def study(self) -> Study:
        """Return the study's state, as replayed from the log."""
        return self._log.study

    def run(self) -> None:
        """Propose, run and judge trials until the study is done.

        Raises:
            KeyboardInterrupt: Ctrl-C: all trials were stopped; those that can were saved first.
            UsageError: the trials' reports or their resources are not usable.
            ElasticError: the cluster does not reply, or the log cannot be written.
        """
        with InterruptHandler() as ctrl_c, self._view:
            try:
                self._recover()
                while not self._is_done():
                    if ctrl_c.take():
                        self._is_leaving = True
                        self._view.print_line(
                            "the trials that run are stopped; Ctrl-C again leaves them"
                        )
                        self._stop_all("interrupted in its script")
                    self._check_all()
                    self._fill()
                    self._receive()
                    self._settle()
                    self._view.draw(time.monotonic() - self._since)
                if not self._is_leaving:
                    self._log.add({"e": "over", "reason": self._stop_reason or "all trials ended"})
                    self._plan.callbacks.call("on_experiment_end", trials=self.study.trials)
            except Exception:
                self._abandon()
                raise
            finally:
                for following in self._following.values():
                    following.watch.close()
            self._view.draw(time.monotonic() - self._since)
            self._view.moved(headline(self.study))
        if self._is_leaving:
            raise KeyboardInterrupt(
                f"study {self.study.settings['name']} was interrupted; resume it: "
                f"tune.Tuner.restore({self._log.files.path!r}, trainable).fit()"
            )

    def _abandon(self) -> None:
        """Stop all jobs after an error: without this driver no process judges their trials."""
        self._client.wait_for_answers(0.0)
        for trial in self.study.trials:
            if trial.attempts and trial.attempt.job_id and not trial.is_over:
                with contextlib.suppress(ElasticError):
                    self._client.stop(trial.attempt.job_id, "its study ended", now=True)
                    self._log.add({"e": "left", "trial": trial.number})

    # ---------------------------------------------------------------------------- recovery

    def _recover(self) -> None:
        """Replay the log into the search and the stopper, and find the jobs that still exist."""
        for kind, number in self.study.order:
            trial = self.study.trials[number]
            if kind == "proposed":
                self._plan.search.takes_again(trial.name, from_log(self.study.proposals[number]))
            else:
                self._report_search(trial)
        for trial in self.study.trials:
            for report in trial.reports:
                metrics = reported(trial, report.number, report.metrics, report.seconds)
                self._plan.stopper(trial.name, metrics)
        for trial in self.study.trials:
            if len(trial.attempts) > 1 and not trial.is_over:
                self._leave(trial.attempts[-2])
            is_to_begin = trial.is_over or trial.state is TrialState.PENDING
            if is_to_begin or self._find(trial):
                continue
            if trial.verdict:
                self._end(trial, TrialState.STOPPED, trial.verdict)
            elif trial.state is not TrialState.PAUSED:
                self._log.add({"e": "left", "trial": trial.number})

    def _find(self, trial: Trial) -> bool:
        """Follow a trial's job, and repeat the last decision about it; False if there is none."""
        if not trial.attempt.job_id:
            return False
        try:
            phase = self._client.get(trial.attempt.job_id).record.phase
        except NotFound:
            return False
        self._follow(trial)
        if phase in ENDED:
            return True
        if trial.verdict:
            self._halt(trial, trial.verdict)
        elif trial.state is TrialState.PAUSED:
            self._ask(self._client.pause, trial)
        elif phase is JobPhase.PAUSED:
            self._ask(self._client.resume, trial)
        return True

    # ------------------------------------------------------------------------------ trials

    def _is_done(self) -> bool:
        if self._is_leaving:
            return not self._following
        live = any(not trial.is_over for trial in self.study.trials)
        return not live and (self.study.is_exhausted or bool(self._stop_reason))

    def _fill(self) -> None:
        """Start pending and new trials while the limit of running trials allows."""
        if self._stop_reason:
            for trial in () if self._is_leaving else self.study.trials:
                if not trial.is_over and trial.number not in self._following:
                    self._end(trial, TrialState.STOPPED, self._stop_reason)
            return
        for trial in self.study.trials:
            if trial.state is TrialState.PENDING and self._may_start():
                self._start(trial)
        while not self.study.is_exhausted and self._may_start():
            trial_or_none = self._propose()
            if trial_or_none is None:
                return
            if not self._room:
                self._count_room()
            self._start(trial_or_none)

    def _may_start(self) -> bool:
        """Return whether there is room; a trial that fails at its start may end the study."""
        return not self._stop_reason and self._has_room()

    def _has_room(self) -> bool:
        room = self._room + self._plan.ahead if self._room else 1
        limit = self._plan.max_concurrent or room
        return sum(t.state is TrialState.RUNNING for t in self.study.trials) < limit

    def _propose(self) -> Trial | None:
        """Request a config from the search and log it as a trial; None if it has none now."""
        number, samples = len(self.study.trials), self._plan.num_samples
        name = f"{self.study.settings['name']}_{number:05d}"
        try:
            if 0 <= samples <= number and self._plan.search.total is None:
                raise Exhausted
            config = self._plan.search.suggest(name)
        except Exhausted:
            self._log.add({"e": "exhausted"})
            return None
        if config is None:
            if all(t.is_over or t.state is TrialState.PAUSED for t in self.study.trials):
                paused = sum(t.state is TrialState.PAUSED for t in self.study.trials)
                raise UsageError(
                    f"{type(self._plan.search).__name__} proposes nothing although no trial runs "
                    f"({paused} are paused until others have come as far): let it propose more at "
                    f"once"
                )
            return None
        event = {"e": "proposed", "trial": number, "name": name, **to_log(dict(config))}
        if self._plan.label is not None:
            trial = Trial(
                number, name, name, LoggedConfig(config), trainable_name=self.study.trainable_name
            )
            event["label"] = str(self._plan.label(trial))
        self._log.add(event)
        return self.study.trials[number]

    def _start(self, trial: Trial) -> None:
        """Submit a trial's job, in the run directory of its newest attempt."""
        known = trial.attempts[-1] if trial.attempts else TrialAttempt("", trial.name)
        config = from_log(trial.logged_config)
        size = known.size or self.study.size
        trainer = self._plan.recipe.trainer(known.run, config, known.resume_from, size)
        spec = replace(trainer.job_spec(self._cluster.env), job_id=new_job_id())
        try:
            self._check(trial, spec)
        except UsageError as error:
            if not trial.sizes:
                raise
            self._fail(trial, str(error))  # Other trials may ask for less.
            return
        self._log.add(
            {
                "e": "started",
                "trial": trial.number,
                "job": spec.job_id,
                "run": known.run,
                "unix_ns": self._clock.unix_ns(),
                "begins": dict(known.begins),
                "from": known.resume_from,
                "size": size,
            }
        )
        trainer.submit(spec, self._client, self._cluster)
        self._follow(trial)
        self._view.moved(f"trial {trial.label} started: {config_line(config)}")
        self._plan.callbacks.call("on_trial_start", trials=self.study.trials, trial=trial)

    def _check(self, trial: Trial, spec: JobSpec) -> None:
        """Raise UsageError for a job that an embedded cluster can never place."""
        if self._cluster.is_embedded:
            self._nodes = self._nodes or self._client.status().view.nodes
            try:
                check_fits(spec, [view.node for view in self._nodes])
            except UsageError as error:
                raise UsageError(f"trial {trial.label}: {error}") from None

    def _follow(self, trial: Trial) -> None:
        before = self._following.pop(trial.number, None)
        if before is not None:
            before.watch.close()
        run = RunDirectory(self._log.files.folder(trial.attempt.run).path)
        named = {one.checkpoint: one.number for one in trial.reports if one.checkpoint}
        self._following[trial.number] = Following(
            Watch(self._client, trial, self._events),
            MetricsReader(run.files, 0),
            Numbering(trial.attempt.begins, named),
            run,
        )

    # -------------------------------------------------------------------------------- events

    def _receive(self) -> None:
        """Wait up to TICK_S for events of jobs, and handle all that are queued."""
        came: list[tuple[int, str, JobEvent | Exception]] = []
        with contextlib.suppress(queue.Empty):
            came.append(self._events.get(timeout=TICK_S))
            while True:
                came.append(self._events.get_nowait())
        ended: dict[int, JobView] = {}
        touched: set[int] = set()
        for number, job_id, event in came:
            trial = self.study.trials[number]
            if number not in self._following or job_id != trial.attempt.job_id:
                continue  # Of an earlier attempt.
            if isinstance(event, Exception):
                raise event
            touched.add(number)
            if isinstance(event, JobView):
                self._following[number].view = event
                self._view.workers[number] = f"{world_size(event)} of {event.record.bounds[1]}"
                if event.record.phase is JobPhase.RUNNING:
                    self._note_begin(trial, event.record.since_unix_ns)
                elif event.record.phase in ENDED:
                    ended[number] = event
            elif event.note.name == "group_formed":
                self._note_begin(trial, event.unix_ns)
            elif event.note.name == "worker_gone":
                self._show_loss(trial, dict(event.note.fields))
        # An event may arrive before its report is in storage. Local storage is cheap to poll.
        self._read(set(self._following) if self._log.files.is_local else touched)
        for number, view in ended.items():
            trial = self.study.trials[number]
            if view.record.spec.job_id == trial.attempt.job_id:
                self._take_end(trial, view)

    def _show_loss(self, trial: Trial, fields: Mapping[str, str]) -> None:
        """Print that a trial has lost a worker, unless it was stopped by order."""
        cause = fields.get("cause", "")
        if not cause.startswith(BY_ORDER):
            self._view.print_line(f"trial {trial.label}: worker {fields.get('worker')} {cause}")

    def _note_begin(self, trial: Trial, unix_ns: int) -> None:
        """Log when a trial began to run, from when its seconds count."""
        if unix_ns and not trial.has_begun and not trial.reports:
            self._log.add({"e": "began", "trial": trial.number, "unix_ns": unix_ns})

    def _read(self, numbers: set[int], *, is_over: bool = False) -> None:
        """Handle the new reports of some trials, in the order in which they were made."""
        rows = []
        for number in numbers & set(self._following):
            trial = self.study.trials[number]
            if not trial.is_over and not trial.verdict:
                new = self._following[number].ready(is_over=is_over)
                rows += [(row.get("unix_ns", 0), number, n, row) for n, row in enumerate(new)]
        rows.sort(key=lambda one: one[:3])
        attempts = {number: len(self.study.trials[number].attempts) for number in numbers}
        for unix_ns, number, _, row in rows:
            trial = self.study.trials[number]
            if trial.is_over or trial.verdict or len(trial.attempts) != attempts[number]:
                continue  # An earlier report already led to a decision.
            place = self._following[number].numbering.take(row)
            if place > trial.iteration:
                self._take_report(trial, place, row, unix_ns)

    def _take_report(self, trial: Trial, number: int, row: Mapping[str, Any], unix_ns: int) -> None:
        seconds = round(max(0, unix_ns - trial.started_unix_ns) / 1e9, 3)
        given = row["metrics"]
        name = row.get("checkpoint", "")
        if name:
            run = RunDirectory(self._log.files.folder(trial.attempt.run).path)
            given = {CHECKPOINT_PATH: run.checkpoint_path(name), **given}
        self._log.add(
            {
                "e": "reported",
                "trial": trial.number,
                "n": number,
                "metrics": given,
                "generation": row["generation"],
                "index": row["index"],
                "s": seconds,
                "checkpoint": name,
            }
        )
        self._check_metric(trial, given)
        metrics = reported(trial, number, given, seconds)
        self._plan.search.on_trial_result(trial.name, metrics)
        self._plan.callbacks.call(
            "on_trial_result", trials=self.study.trials, trial=trial, result=metrics
        )
        if self._plan.stopper(trial.name, metrics):
            self._apply(trial, Decision(TrialDecision(TrialAction.STOP), self._met(metrics)))
        elif trial.state is TrialState.RUNNING and not self._stop_reason:
            self._apply(trial, self._plan.scheduler.judge(self.study, trial))
        if self._plan.stopper.stop_all() and not self._stop_reason:
            self._stop_all("its stopper has had enough")

    def _met(self, metrics: Mapping[str, Any]) -> str:
        return f"stop criterion met at report {metrics[ITERATION]}"

    def _check_metric(self, trial: Trial, metrics: Mapping[str, Any]) -> None:
        """Raise UsageError if a trial lacks the metric; warn if it has become NaN."""
        metric = self.study.metric
        if not metric:
            return
        value = number_of(metrics.get(metric))
        if value is None and all(metric not in r.metrics for r in trial.reports):
            raise UsageError(
                f"trial {trial.label} reported {', '.join(sorted(metrics)) or 'nothing'} and not "
                f"{metric!r}, which TuneConfig(metric=...) names: report it, or name another one"
            )
        before = trial.reports[-2].metrics.get(metric) if len(trial.reports) > 1 else None
        if value is not None and value != value and before != "nan":
            self._view.print_line(
                f"trial {trial.label}: {metric} is NaN at report {trial.iteration}: it counts as "
                f"worse than every number"
            )

    # ------------------------------------------------------------------------------- actions

    def _apply(self, trial: Trial, decision: Decision[TrialDecision]) -> None:
        verdict, number = decision.value, trial.number
        if verdict.action is TrialAction.GO_ON and not verdict.rungs:
            return
        event: dict[str, Any] = {
            "e": "decided",
            "trial": number,
            "n": trial.iteration,
            "what": verdict.action.value,
            "reason": decision.reason,
            "rungs": {str(at): value for at, value in verdict.rungs.items()},
        }
        if verdict.action is TrialAction.EXPLOIT:
            self._exploit(trial, event, self.study.trials[verdict.donor])
            return
        self._log.add(event)
        if verdict.action is TrialAction.STOP:
            self._halt(trial, decision.reason)
        elif verdict.action is TrialAction.PAUSE:
            self._ask(self._client.pause, trial)

    def _exploit(self, trial: Trial, event: dict[str, Any], donor: Trial) -> None:
        """Continue a trial from another trial's newest checkpoint, with a mutated config."""
        config = self._plan.scheduler.explore(trial, from_log(donor.logged_config))
        # Copied: the donor keeps training, and may delete its checkpoint.
        run, old = next_run(trial), trial.attempt
        target = self._log.files.folder(f"{TAKEN}/{run}").path
        taken = take_newest(self._log.files.folder(donor.attempt.run).path, target)
        if taken is None:
            reason = f"trial {donor.label} has no checkpoint to continue from yet"
            self._log.add({**event, "what": TrialAction.GO_ON.value, "reason": reason})
            self._view.print_line(f"trial {trial.label} continues as it is: {reason}")
            return
        event.update({"donor": donor.number, "run": run}, **to_log(config))
        self._log.add({**event, "checkpoint": taken.name, "from": taken.path})
        self._view.moved(f"trial {trial.label}: {event['reason']}: {config_line(config)}")
        self._leave(old, "its trial continues from another one's checkpoint")
        self._start(trial)

    def _resize(self, trial: Trial, size: str) -> None:
        """Let `_fill` continue a trial as a job of the size that its function's trainer asks for.

        Unless the study has been told to stop meanwhile.
        """
        if trial.sizes == SIZES_MAX:
            self._fail(
                trial,
                f"its trainers have asked for another size {SIZES_MAX + 1} times: give all that "
                f"the function fits the same scaling_config, or set the size with "
                f"tune.with_resources",
            )
            return
        self._log.add({"e": "resized", "trial": trial.number, "size": size})
        self._unfollow(trial)
        number = from_json(size).num_workers
        self._view.moved(f"trial {trial.label}: its trainer asks for num_workers={number}")

    def _fail(self, trial: Trial, message: str) -> None:
        error = {"error_type": "UsageError", "message": message, "traceback": "", "worker": ""}
        self._end(trial, TrialState.FAILED, message, error)

    def _unfollow(self, trial: Trial) -> None:
        following = self._following.pop(trial.number, None)
        if following is not None:
            following.watch.close()
        self._view.workers.pop(trial.number, None)

    def _leave(self, attempt: TrialAttempt, reason: str = GOES_ON) -> None:
        """Stop the job of a run that its trial has replaced by another run."""
        with contextlib.suppress(Refused, NotFound):
            self._client.stop(attempt.job_id, reason, now=True)
        run_path = self._log.files.folder(attempt.run).path
        note_end(run_path, attempt.job_id, JobPhase.STOPPED, reason)

    def _halt(self, trial: Trial, reason: str) -> None:
        """Stop a trial's job; its end is handled as an event, as for any other job."""
        if trial.number not in self._following:
            self._end(trial, TrialState.STOPPED, reason)
            return
        with contextlib.suppress(Refused, NotFound):
            self._client.stop(trial.attempt.job_id, reason)

    def _ask(self, what: Callable[[str], None], trial: Trial) -> None:
        """Request a pause or resume; if the job has ended, its end comes as an event."""
        with contextlib.suppress(Refused, NotFound):
            what(trial.attempt.job_id)

    def _settle(self) -> None:
        """Apply the scheduler's decisions about paused trials."""
        if not any(t.state is TrialState.PAUSED for t in self.study.trials):
            return
        for number, decision in self._plan.scheduler.settle(self.study):
            if self._stop_reason:
                return  # Perhaps only now: a trial that fails at its start may end the study.
            trial = self.study.trials[number]
            if decision.value.action is TrialAction.STOP:
                self._apply(trial, decision)
                continue
            self._log.add({"e": "resumed", "trial": number, "reason": decision.reason})
            if trial.number in self._following:
                self._ask(self._client.resume, trial)
            else:
                self._start(trial)

    def _stop_all(self, reason: str) -> None:
        """Stop every followed trial, and propose no more."""
        self._stop_reason = reason
        for trial in self.study.trials:
            if not trial.is_over and trial.number in self._following:
                with contextlib.suppress(Refused, NotFound):
                    self._client.stop(trial.attempt.job_id, reason)

    # ------------------------------------------------------------------------------ the end

    def _take_end(self, trial: Trial, view: JobView) -> None:
        record = view.record
        path = self._log.files.folder(trial.attempt.run).path
        self._read({trial.number}, is_over=True)
        if trial.is_over or trial.attempt.job_id != record.spec.job_id:
            return  # After its last report, the trial continues in another run, or has failed.
        phase, reason, error = record.phase, record.reason, None
        state = TrialState(phase.value)
        if trial.verdict and phase is not JobPhase.FAILED:
            state, reason = TrialState.STOPPED, trial.verdict
            phase = JobPhase.SUCCEEDED
        elif phase is JobPhase.STOPPED and self._is_leaving:
            note_end(path, record.spec.job_id, phase, reason)
            self._log.add({"e": "left", "trial": trial.number})
            self._following.pop(trial.number).watch.close()
            return
        elif phase is JobPhase.FAILED:
            failure = record.failure
            error = {"error_type": "", "message": reason, "traceback": "", "worker": ""}
            if failure is not None:
                error = {**asdict(failure), "worker": record.failed_worker}
        elif phase is JobPhase.SUCCEEDED and (size := size_asked_by(record.result)):
            note_end(path, record.spec.job_id, JobPhase.STOPPED, GOES_ON)
            self._resize(trial, size)
            return
        elif phase is JobPhase.SUCCEEDED and not trial.reports:
            note_end(path, record.spec.job_id, phase, "")
            self._fail(trial, f"it ended without reporting {self._wanted()}")
            return
        elif phase is JobPhase.SUCCEEDED:
            reason = ""
        note_end(path, record.spec.job_id, phase, reason)
        self._end(trial, state, reason, error)

    def _wanted(self) -> str:
        return repr(self.study.metric) if self.study.metric else "anything"

    def _end(
        self, trial: Trial, state: TrialState, reason: str, error: Mapping[str, str] | None = None
    ) -> None:
        event: dict[str, Any] = {
            "e": "ended",
            "trial": trial.number,
            "phase": state.value,
            "reason": reason,
        }
        if error is not None:
            event["error"] = dict(error)
        self._log.add(event)
        self._unfollow(trial)
        self._report_search(trial)
        value = trial.value(self.study.metric)
        shown = f", {self.study.metric}={value:.4g}" if value is not None else ""
        why = f": {reason}" if reason else ""
        line = f"trial {trial.label} {state.value} after {trial.iteration} reports{shown}{why}"
        (self._view.print_line if state is TrialState.FAILED else self._view.moved)(line)
        what = "on_trial_error" if state is TrialState.FAILED else "on_trial_complete"
        self._plan.callbacks.call(what, trials=self.study.trials, trial=trial)
        if state is TrialState.FAILED:
            self._judge_failure(trial, reason)

    def _judge_failure(self, trial: Trial, reason: str) -> None:
        if self._plan.fail_fast:
            self._stop_all(f"trial {trial.label} failed, and fail_fast is set")
        if any(one.reports for one in self.study.trials):
            return
        self._same.append(str((trial.error or {}).get("message", "")))
        if len(self._same) == SAME_FAILURES_MAX and len(set(self._same)) == 1:
            self._stop_all(f"the first {SAME_FAILURES_MAX} trials failed alike: {reason}")

    def _report_search(self, trial: Trial) -> None:
        result = None
        if trial.reports:
            last = trial.reports[-1]
            result = reported(trial, last.number, last.metrics, last.seconds)
        is_error = trial.state is TrialState.FAILED
        self._plan.search.on_trial_complete(trial.name, result, is_error)

    # ---------------------------------------------------------------------------- periodically

    def _check_all(self) -> None:
        """Count the nodes, and check for a stop request and the time budget."""
        now = time.monotonic()
        budget = self._plan.time_budget_s
        if budget is not None and now - self._since > budget and not self._stop_reason:
            self._stop_all(f"time_budget_s={budget:g} is over")
        if now - self._checked < POLL_S:
            return
        self._checked = now
        self._cluster.check()
        self._count_room()
        if not self._stop_reason and (reason := self._log.take_stop()):
            self._stop_all(f"stopped by a user: {reason}")

    def _count_room(self) -> None:
        """Count how many trials the cluster has room for, by the newest trial's resources.

        Not by a size that its function asks for: it may be one for which there is never room.
        """
        if self.study.trials:
            trial = self.study.trials[-1]
            config = from_log(trial.logged_config)
            spec = self._plan.recipe.trainer(trial.name, config, size=self.study.size).job_spec()
            self._nodes = self._client.status().view.nodes
            self._room = room_for(spec, self._nodes)
