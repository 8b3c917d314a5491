"""A study for people: a table of its trials, and one line per event.

Rule: it shows the contents of the log, and in addition the driver's numbers of workers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from elastic.client.show import coloured, new_table
from elastic.client.text_format import duration
from elastic.core.study import Study, Trial, TrialState, number_of

ROWS_MAX = 30
"""Rows of a live table: running trials and the best one, then the newest ended ones."""
CONFIG_CHARS_MAX = 60
REFRESH_PER_S = 4


def config_line(config: Any, *, chars_max: int = CONFIG_CHARS_MAX) -> str:
    """Return a config as "lr=0.01 layers=3", cut at `chars_max`, 0 for no limit."""
    parts: list[str] = []

    def add(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                inner = "" if key == "train_loop_config" and not path else f"{path}{key}"
                add(part, f"{inner}/" if isinstance(part, dict) and inner else inner)
        else:
            plain = f"{value:.4g}" if isinstance(value, float) else str(value)
            parts.append(f"{path.rstrip('/')}={plain}")

    add(config, "")
    line = " ".join(parts)
    return line if not chars_max or len(line) <= chars_max else line[: chars_max - 3] + "..."


def study_as_dict(study: Study) -> dict[str, Any]:
    best = study.best()
    return {
        **study.settings,
        "over": study.over,
        "best": best.name if best else None,
        "trials": [
            {
                "trial": trial.name,
                "state": trial.state.value,
                "config": trial.config,
                "iteration": trial.iteration,
                "rung": max(trial.rungs, default=None),
                "metrics": dict(trial.reports[-1].metrics) if trial.reports else {},
                "reason": trial.reason,
                "run": trial.attempt.run if trial.attempts else None,
            }
            for trial in study.trials
        ],
    }


def headline(study: Study, seconds: float = 0.0) -> str:
    """Return the state of a study in one line."""
    counts = dict.fromkeys(TrialState, 0)
    for trial in study.trials:
        counts[trial.state] += 1
    by_state = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
    total = study.settings.get("total")
    line = f"study {study.settings.get('name', '')}: {by_state or 'no trials yet'}"
    line += f", of {total}" if total else ""
    best = study.best()
    if best is not None:
        value = best.value(study.metric)
        line += f"; best {best.label} {study.metric}={value:.4g} ({config_line(best.config)})"
    left = eta_s(study, seconds)
    if left is not None:
        line += f"; about {duration(round(left * 1e9), digits=0)} left"
    return f"{line}; over: {study.over}" if study.over else line


def eta_s(study: Study, seconds: float) -> float | None:
    """Return the estimated seconds left, at the pace so far; None if unknown."""
    total, ended = study.settings.get("total"), sum(t.is_over for t in study.trials)
    if not total or not ended or not seconds or study.over:
        return None
    return float(total - ended) * seconds / ended


def study_table(
    study: Study, workers: Mapping[int, str] | None = None, *, rows_max: int = 0
) -> Table:
    """Return a table of trials."""
    metric = (escape(study.metric),) if study.metric else ()
    best = (f"best {escape(study.metric)}",) if study.metric else ()
    table = new_table(
        "trial", "state", "workers", "reports", "rung", *metric, *best, "config", "reason"
    )
    for trial in _shown(study, rows_max):
        values = [v for r in trial.reports if (v := _value(study, r.metrics)) is not None]
        top = max(values, key=lambda v: v * study.sign) if values else None
        numbers = (_number(trial.value(study.metric)), _number(top)) if study.metric else ()
        table.add_row(
            escape(trial.label),
            coloured(trial.state.value),
            (workers or {}).get(trial.number, "-"),
            str(trial.iteration),
            str(max(trial.rungs, default="-")),
            *numbers,
            escape(config_line(trial.config)),
            escape(trial.reason.partition("\n")[0]) or "-",
        )
    return table


def _value(study: Study, metrics: Mapping[str, Any]) -> float | None:
    return number_of(metrics.get(study.metric))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _shown(study: Study, rows_max: int) -> Sequence[Trial]:
    if not rows_max or len(study.trials) <= rows_max:
        return study.trials
    best = study.best()
    live = [trial for trial in study.trials if not trial.is_over]
    ended = [trial for trial in reversed(study.trials) if trial.is_over and trial is not best]
    chosen = [*([best] if best is not None else []), *live, *ended][:rows_max]
    return sorted({trial.number: trial for trial in chosen}.values(), key=lambda t: t.number)


class StudyView:
    """Shows a study while it runs: a table on a terminal, lines in a pipe."""

    def __init__(self, study: Study, *, is_quiet: bool = False) -> None:
        """Show nothing yet.

        Args:
            study: may change while it is shown.
            is_quiet: show nothing at all.
        """
        self._study, self._is_quiet = study, is_quiet
        self._live: Live | None = None
        self.workers: dict[int, str] = {}

    def __enter__(self) -> StudyView:
        """Start the table, if there is a terminal."""
        if not self._is_quiet and sys.stderr.isatty():
            from rich.console import Console

            console = Console(stderr=True, highlight=False)
            self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, transient=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()

    def print_line(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(escape(line))
        elif not self._is_quiet:
            print(line, file=sys.stderr, flush=True)

    def moved(self, line: str) -> None:
        """Print an event of a trial, if there is no table."""
        if self._live is None:
            self.print_line(line)

    def draw(self, seconds: float) -> None:
        """Update the table.

        Args:
            seconds: since this driver started the study.
        """
        if self._live is not None:
            table = study_table(self._study, self.workers, rows_max=ROWS_MAX)
            self._live.update(Group(table, escape(headline(self._study, seconds))))
