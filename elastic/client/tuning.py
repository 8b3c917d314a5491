"""The commands `elastic tune status`, `best` and `stop`: a study by its log.

Rule: the log is the only source, except for stopping the jobs that a dead driver has left.
"""

from __future__ import annotations

import contextlib
import os

import click
from rich.markup import escape

from elastic.client.study_show import config_line, headline, study_as_dict, study_table
from elastic.client.submission import DEFAULT_STORAGE, directory_of, run_path_of
from elastic.client.terminal import (
    EXIT_FAILED,
    ClusterTarget,
    fail,
    output_option,
    print_json,
    stdout_console,
)
from elastic.errors import Refused, UsageError
from elastic.storage.run_record import RunOwner
from elastic.storage.study_log import StudyLog


@click.group()
def tune() -> None:
    """Show and stop studies of elastic.tune.

    STUDY is its directory, storage_path/name, or its name below ~/elastic_results.
    """


def _opened(study: str) -> StudyLog:
    """Return the log of a study.

    Raises:
        UsageError: there is none.
    """
    is_named = "/" not in study and not os.path.isdir(study)
    path = run_path_of(DEFAULT_STORAGE, study) if is_named else directory_of(study)
    log = StudyLog(path)
    if not log.is_there:
        raise UsageError(
            f"no study is in {path} (it has no study.jsonl): name its directory, storage_path/name"
        )
    return log


@tune.command()
@click.argument("study")
@output_option
def status(study: str, output: str) -> None:
    """Show all trials of STUDY, and how far it is."""
    log = _opened(study)
    if output == "json":
        print_json(study_as_dict(log.study))
        return
    console = stdout_console()
    console.print(study_table(log.study))
    console.print(escape(headline(log.study)))


@tune.command()
@click.argument("study")
@output_option
def best(study: str, output: str) -> None:
    """Show the best trial of STUDY: its metric, its config, and where its run is."""
    log = _opened(study)
    found = log.study.best()
    if found is None:
        metric = log.study.metric
        what = f"no trial has reported {metric!r} yet" if metric else "it has no metric to compare"
        fail(f"study {study}: {what}", EXIT_FAILED)
    path = log.files.folder(found.attempt.run).path
    if output == "json":
        print_json(
            {
                "trial": found.name,
                "metrics": dict(found.reports[-1].metrics),
                "config": found.config,
                "path": path,
            }
        )
        return
    value = found.value(log.study.metric)
    click.echo(f"{found.label}  {log.study.metric}={value:.6g}  after {found.iteration} reports")
    click.echo(f"  config  {config_line(found.config, chars_max=0)}")
    click.echo(f"  run     {path}")


@tune.command()
@click.argument("study")
@click.option("--reason", default="", help="Shown with the trials.")
@click.pass_obj
def stop(target: ClusterTarget, study: str, reason: str) -> None:
    """Stop all trials of STUDY; its driver ends, and results stay."""
    log = _opened(study)
    if log.study.over:
        click.echo(f"study {study} is over: {log.study.over}", err=True)
        return
    log.ask_to_stop(reason)
    owner = log.study.owner
    if owner is not None and RunOwner(**owner).is_other_and_alive():
        click.echo(f"study {study}: its driver (process {owner['pid']}) stops all trials", err=True)
        return
    live = [trial for trial in log.study.trials if trial.attempts and not trial.is_over]
    stopped = 0
    with target.connect() as client:
        for trial in live:
            with contextlib.suppress(Refused):
                client.stop(trial.attempt.job_id, reason or "its study was stopped")
                stopped += 1
    click.echo(
        f"study {study}: no driver of it runs on this machine; {stopped} of {len(live)} trials "
        f"were stopped here, and a driver on another machine stops within seconds",
        err=True,
    )
