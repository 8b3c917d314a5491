"""The command `elastic track`: sends a run's reported metrics to trackers."""

from __future__ import annotations

import click

from elastic.client.submission import directory_of
from elastic.errors import UsageError
from elastic.storage.metrics import has_metrics
from elastic.storage.run_directory import RunDirectory
from elastic.storage.trackers import Tracking, parse_trackers


@click.command()
@click.argument("run")
@click.argument("trackers", nargs=-1, required=True, metavar="KIND[:WHERE]...")
def track(run: str, trackers: tuple[str, ...]) -> None:
    """Send trackers what RUN, a run directory, has reported and they lack.

    KIND is tensorboard[:DIR], json[:FILE], wandb:PROJECT or mlflow:URI. `--tracker` of `submit`
    and `run` does the same while a job runs; this is for runs before it, and for what a tracker
    that was away has missed.
    """
    path = directory_of(run)
    if not has_metrics(RunDirectory(path).files):
        raise UsageError(f"{path} has no metrics: name the directory of a run, storage_path/name")
    for spec in parse_trackers(",".join(trackers)):
        tracking = Tracking(path, spec)
        count = tracking.turn()
        tracking.close()
        click.echo(f"{spec.kind}: {count} new report{'' if count == 1 else 's'}")
