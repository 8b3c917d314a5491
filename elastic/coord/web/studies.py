"""Pages of elastic.tune studies, read from the studies' logs.

Rule: the operator names the folder of the studies (`--studies`); nothing else in storage is read.
A thread reads it, at most every few seconds for all viewers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import quote

import anyio.to_thread

from elastic.client.study_show import config_line, headline
from elastic.coord.web.html import Html, element, joined
from elastic.coord.web.parts import Page, Part, number, pill, row, table
from elastic.core.study import Study, Trial
from elastic.errors import NotFound, StorageError
from elastic.runtime.clock import Clock
from elastic.storage.files import Files
from elastic.storage.study_log import LOG, StudyLog

READ_AGAIN_S = 3.0
TRIALS_SHOWN = 500
PLOT_WIDTH, PLOT_HEIGHT = 600, 160


@dataclass
class Studies:
    """The studies below one folder."""

    folder: str
    clock: Clock
    _names: tuple[int, tuple[str, ...]] = (0, ())
    _read: dict[str, tuple[int, Study]] = field(default_factory=dict)

    async def names(self) -> tuple[str, ...]:
        """Return the names of all studies; none if storage fails."""
        if not self.folder:
            return ()
        when_ns, names = self._names
        if not when_ns or self._is_old(when_ns):
            names = await anyio.to_thread.run_sync(self._list, abandon_on_cancel=True)
            self._names = self.clock.monotonic_ns(), names
        return names

    async def page(self, name: str) -> Page:
        """Return the page of a study.

        Raises:
            NotFound: there is none of this name.
            StorageError: it cannot be read.
        """
        if name not in await self.names():
            raise NotFound(f"no study has the name {name[:100]!r}")
        when_ns, study = self._read.get(name, (0, Study()))
        if not when_ns or self._is_old(when_ns):
            path = f"{self.folder.rstrip('/')}/{name}"
            log = await anyio.to_thread.run_sync(StudyLog, path, abandon_on_cancel=True)
            study = log.study
            self._read = {name: (self.clock.monotonic_ns(), study)}
        return study_page(name, study)

    def _is_old(self, when_ns: int) -> bool:
        return self.clock.monotonic_ns() - when_ns > READ_AGAIN_S * 1e9

    def _list(self) -> tuple[str, ...]:
        try:
            files = Files(os.path.expanduser(self.folder))
            found = files.list(f"*/{LOG}") or files.list("*/study/00000000.jsonl")
        except StorageError:
            return ()
        return tuple(sorted({path.split("/")[0] for path in found}))


def study_page(name: str, study: Study) -> Page:
    best = study.best()
    rows = {
        f"t-{trial.number}": _trial_row(study, trial, is_best=trial is best)
        for trial in study.trials[-TRIALS_SHOWN:]
    }
    metric = study.metric or "metric"
    body: list[Html | Part] = [
        element("h1", name),
        Part("headline", element("p", headline(study), id="headline", class_="why")),
        _plot(study),
        element("h2", "Trials"),
        *table(
            Part("trials", items=rows, tag="tbody"),
            *("trial", "state", "reports", "rung", metric, f"best {metric}", "config", "why"),
            label="Trials",
        ),
    ]
    return Page(name, body)


def _values(study: Study, trial: Trial) -> list[float]:
    found = (report.metrics.get(study.metric) for report in trial.reports)
    return [float(value) for value in found if isinstance(value, (int, float))]


def _trial_row(study: Study, trial: Trial, *, is_best: bool) -> Html:
    values = _values(study, trial)
    top = max(values, key=lambda value: value * study.sign) if values else None
    label: object = trial.label
    if trial.attempts and trial.attempt.job_id:
        job = quote(trial.attempt.job_id, safe="")
        label = element("a", trial.label, href=f"/jobs/{job}")
    return row(
        f"t-{trial.number}",
        joined(label, " ★ best" if is_best else None),
        pill(trial.state.value),
        trial.iteration,
        max(trial.rungs, default="–"),
        number(values[-1] if values else None, 6),
        number(top, 6),
        config_line(trial.config, chars_max=200),
        trial.reason.partition("\n")[0] or "–",
        css="best" if is_best else None,
    )


def _plot(study: Study) -> Part:
    """Return a line for each trial: the metric over its reports; the best one is highlighted."""
    lines = [(trial, _values(study, trial)) for trial in study.trials[-TRIALS_SHOWN:]]
    lines = [(trial, values) for trial, values in lines if values]
    known = [value for _, values in lines for value in values]
    if not known:
        return Part("plot", element("p", "No trial has reported yet.", id="plot"))
    low, high = min(known), max(known)
    longest = max(len(values) for _, values in lines)
    across = PLOT_WIDTH / max(longest - 1, 1)
    best, drawn = study.best(), []
    for trial, values in sorted(lines, key=lambda one: one[0] is best):
        if len(values) == 1:
            values = values * 2
        step = max(1, len(values) // 200)
        points = " ".join(
            f"{i * across:.1f},{_height(value, low, high):.1f}"
            for i, value in enumerate(values)
            if i % step == 0 or i == len(values) - 1
        )
        css = "line best" if trial is best else "line"
        drawn.append(element("polyline", element("title", trial.label), points=points, class_=css))
    picture = element(
        "svg", *drawn, viewBox=f"0 0 {PLOT_WIDTH} {PLOT_HEIGHT}", preserveAspectRatio="none",
        role="img", aria_label=f"{study.metric} of all trials by report", class_="plot",
    )  # fmt: skip
    caption = f"{study.metric}: {number(low)} to {number(high)}, by report 1 to {longest}"
    return Part("plot", element("figure", picture, element("figcaption", caption), id="plot"))


def _height(value: float, low: float, high: float) -> float:
    return PLOT_HEIGHT - 4 - (value - low) / ((high - low) or 1.0) * (PLOT_HEIGHT - 8)
